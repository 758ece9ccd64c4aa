"""Learner: log-probs of a policy at the tokens of a rollout, with options for precision and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.acceptance import rollout_acceptance
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.learner.checkpointing import Checkpointing, checkpoint_layers
from sparse_rl_lightning.learner.packing import Compute, in_parts, split, split_prompts, token_counts
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.logprobs import replay_statistics
from sparse_rl_lightning.replay.shared_prompts import check_shares, shared_statistics
from sparse_rl_lightning.retrieval.logprobs import retrieval_logprobs
from sparse_rl_lightning.retrievers import Retriever

Candidates = Callable[[Rollout], Tensor]
"""Ids (B, T, J) in the place of each token of a piece of a rollout, whose log-probs are wanted."""


@dataclass(frozen=True)
class LearnerOptions:
    """Options of the learner's forward passes: memory, precision and dropout.

    Args:
        micro_batch_tokens: Token limit of a forward pass. Null cuts a rollout into micro-batches of equally many
            sequences. A number packs the sequences of every optimizer step into its micro-batches by their tokens,
            without common padding, and a micro-batch with more tokens than this (rows x longest) is processed in parts.
        head_chunk_size: Number of tokens whose logits exist at the same time.
        head_in_float32: Compute logits in float32 whatever type the policy has. The sampler does so with
            ``rollout.head_in_float32``: otherwise its rounding is part of the mismatch that is measured.
        gradient_checkpointing: Keep only the inputs of the policy's layers for the backward pass, and compute each
            layer again there: less memory for a third more time. ``selective`` keeps the attention's output too and
            does not attend again, ``offload`` keeps the inputs in the host's memory, page-locked on a GPU. Rollouts
            and rescoring are not affected.
        share_prompts: Read a prompt once for all its samples that share a micro-batch, where those of an optimizer step
            are brought together: the same numbers but for rounding, in less time and memory the longer the prompts.
        disable_dropout: Set every dropout of the policy to zero. With dropout every sequence of a rollout is rescored,
            even those of the first optimizer step.

    Raises:
        ValueError: If a number is not positive, or checkpointing unknown.
    """

    micro_batch_tokens: int | None = None
    head_chunk_size: int = 512
    head_in_float32: bool = False
    gradient_checkpointing: Checkpointing = False
    share_prompts: bool = False
    disable_dropout: bool = True

    def __post_init__(self) -> None:
        for name in ("micro_batch_tokens", "head_chunk_size"):
            or_none = name == "micro_batch_tokens"
            check_number(f"learner.{name}", getattr(self, name), least=1, or_none=or_none, whole=True)
        how: object = self.gradient_checkpointing
        if not isinstance(how, bool) and how not in ("selective", "offload"):
            raise UserError(
                "learner.gradient_checkpointing must be true, false, 'selective' or 'offload', got "
                f"gradient_checkpointing={how!r}."
            )

    @cached_property
    def packs(self) -> bool:
        """Whether micro-batches are packed by tokens."""
        return self.micro_batch_tokens is not None


@dataclass(frozen=True)
class Learner:
    """Forward passes over rollouts; each returns (B, T) tensors, 0 outside the completions, of which two come first.

    Args:
        options: Options for memory and precision.
        temperature: Divisor of the logits, the sampler's.
        retriever: Retriever of the sampler, None if it reads everything.
        replays: Whether the learner attends as the sampler did, instead of densely.
    """

    options: LearnerOptions
    temperature: float = 1.0
    retriever: Retriever | None = None
    replays: bool = False

    def prepare(self, policy: PreTrainedModel) -> None:
        """Switch gradient checkpointing on; it works in training mode, which rollouts and rescoring never are in.

        Raises:
            ValueError: If prompts cannot be shared.
        """
        if self.options.share_prompts:
            check_shares(policy, self.retriever)
        checkpoint_layers(policy, self.options.gradient_checkpointing)

    def logprobs(self, policy: PreTrainedModel, rollout: Rollout) -> tuple[Tensor, ...]:
        """Log-probs and entropies (B, T) that the policy is trained on."""
        return self.replayed(policy, rollout) if self.replays else self.dense(policy, rollout)

    def dense(self, policy: PreTrainedModel, rollout: Rollout, ids: Candidates | None = None) -> tuple[Tensor, ...]:
        """Log-probs and entropies (B, T) under the full cache; of candidates ``ids`` the log-probs are (B, T, J)."""
        if self.options.share_prompts:
            return self._in_parts(partial(shared_statistics, policy, False, *self._head), rollout, ids, True)
        return self._in_parts(
            lambda piece, **more: sequence_logprobs(
                policy, piece.sequences, piece.completion_mask, *self._head, piece.routing, **more
            ),
            rollout,
            ids,
        )

    def replayed(self, policy: PreTrainedModel, rollout: Rollout, ids: Candidates | None = None) -> tuple[Tensor, ...]:
        """Log-probs and entropies (B, T) as the sampler saw the sequences: under its evictions, or retrieving.

        Raises:
            ValueError: If there is nothing to replay, see :func:`~sparse_rl_lightning.replay.replay_logprobs`.
        """
        retriever, head = self.retriever, self._head
        if self.options.share_prompts:  # never beside a retriever
            return self._in_parts(partial(shared_statistics, policy, True, *head), rollout, ids, True)
        if retriever is None:
            return self._in_parts(lambda piece, **more: replay_statistics(policy, piece, *head, **more), rollout, ids)
        return self._in_parts(
            lambda piece, **more: retrieval_logprobs(policy, piece, retriever, *head, **more), rollout, ids
        )

    def acceptance(self, policy: PreTrainedModel, rollout: Rollout) -> tuple[Tensor, ...]:
        """Lower and upper bound (B, T) of the acceptance at the completion tokens, without gradient.

        Raises:
            ValueError: For the reasons of :func:`~sparse_rl_lightning.acceptance.rollout_acceptance`.
        """
        return self._in_parts(lambda piece: rollout_acceptance(policy, piece, *self._head), rollout)

    @torch.no_grad()
    def rescored(self, policy: PreTrainedModel, rollout: Rollout, replayed: bool = False) -> Tensor:
        """Log-probs (B, T) without gradient, of as many sequences as a micro-batch of training has."""
        compute = self.replayed if replayed else self.logprobs
        with eval_mode(policy):  # no dropout, like the sampler
            return compute(policy, rollout)[0]

    @cached_property
    def _head(self) -> tuple[float, int, bool]:
        return self.temperature, self.options.head_chunk_size, self.options.head_in_float32

    def _in_parts(
        self, compute: Callable[..., tuple[Tensor, ...]], rollout: Rollout, ids: Candidates | None = None,
        shares_prompts: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        limit = self.options.micro_batch_tokens
        of_piece: Compute = compute if ids is None else lambda piece: compute(piece, ids=ids(piece))
        if limit is None:
            return of_piece(rollout)
        pieces = split_prompts(rollout, limit) if shares_prompts else split(token_counts(rollout), limit)
        return in_parts(of_piece, rollout, pieces)
