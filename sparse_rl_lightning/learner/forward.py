"""Learner: how the dense policy's log-probs are computed, in what precision and in which pieces."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.acceptance import rollout_acceptance
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.packing import in_parts
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.logprobs import replay_statistics
from sparse_rl_lightning.retrieval.logprobs import retrieval_logprobs
from sparse_rl_lightning.retrievers import Retriever


@dataclass(frozen=True)
class Learner:
    """Memory and precision of the learner's forward passes; none of it changes the loss beyond rounding.

    Args:
        micro_batch_tokens: Null cuts a rollout into micro-batches of as many sequences. A number packs the sequences
            of every optimiser step into its micro-batches by their tokens, without common padding, and a micro-batch
            of more tokens than this (rows x longest) goes through the model in parts.
        head_chunk_size: Tokens whose logits exist at the same time.
        head_in_float32: Compute logits in float32 whatever the policy is stored in. The sampler does not: what it
            rounds differently becomes part of the mismatch that is measured.
        gradient_checkpointing: Keep only the inputs of the policy's layers for the backward pass, and compute each
            layer again there: less memory for a third more time. Rollouts and rescoring are as without it.

    Raises:
        ValueError: If a number is not positive.
    """

    micro_batch_tokens: int | None = None
    head_chunk_size: int = 512
    head_in_float32: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch_tokens", "head_chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"learner.{name} must be at least 1, got {name}={value}.")

    @property
    def packs(self) -> bool:
        """Whether micro-batches are packed by tokens."""
        return self.micro_batch_tokens is not None

    def prepare(self, policy: PreTrainedModel) -> None:
        """Switch gradient checkpointing on, in the form that needs no gradient of the embeddings (frozen under LoRA).

        It works while the policy is in training mode, which it is in no rollout and no rescoring.
        """
        if not self.gradient_checkpointing:
            return
        name = "activation_checkpointing_enable"  # gradient_checkpointing_enable in older transformers
        enable = getattr(policy, name, None) or policy.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        policy.disable_input_require_grads()  # a hook on the embeddings, which the sampler calls too

    def logprobs(
        self,
        policy: PreTrainedModel,
        part: Rollout,
        temperature: float,
        replay: bool = False,
        retriever: Retriever | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (B, T) of the completion tokens: dense, or as the sampler saw them.

        Args:
            policy: The policy.
            part: Sequences.
            temperature: The sampler's.
            replay: Under the sampler's evictions.
            retriever: Under the pages that it chooses.

        Raises:
            ValueError: If there is nothing to replay, see :func:`~sparse_rl_lightning.rollout.replay_logprobs`.
        """

        def compute(rollout: Rollout) -> tuple[Tensor, Tensor]:
            if retriever is not None:
                found = retrieval_logprobs(
                    policy, rollout, retriever, temperature, self.head_chunk_size, self.head_in_float32
                )
                return found.logprobs, found.entropy
            if replay:
                return replay_statistics(policy, rollout, temperature, self.head_chunk_size, self.head_in_float32)
            return sequence_logprobs(
                policy, rollout.sequences, rollout.completion_mask, temperature, self.head_chunk_size,
                self.head_in_float32,
            )  # fmt: skip

        if self.micro_batch_tokens is None:
            return compute(part)
        return in_parts(compute, part, self.micro_batch_tokens)

    def acceptance(self, policy: PreTrainedModel, part: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        """Lower and upper bound (B, T) of the acceptance at the completion tokens, without gradient.

        Raises:
            ValueError: As :func:`~sparse_rl_lightning.acceptance.rollout_acceptance`.
        """

        def compute(rollout: Rollout) -> tuple[Tensor, Tensor]:
            return rollout_acceptance(policy, rollout, temperature, self.head_chunk_size, self.head_in_float32)

        if self.micro_batch_tokens is None:
            return compute(part)
        return in_parts(compute, part, self.micro_batch_tokens)
