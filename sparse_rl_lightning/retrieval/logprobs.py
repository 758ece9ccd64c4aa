"""The learner under retrieval: log-probabilities under the pages that the sampler would read now.

Retrieval chooses anew for every query, so unlike evictions the choice is too large to record. The learner makes it
again instead: one parallel pass in which every layer chooses pages from its own queries and keys, as the sampler did.
Rounding decides near-ties differently now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.geometry import check_window
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.hooks import attention_implementation
from sparse_rl_lightning.retrieval.attention import RETRIEVAL, LearnerPages
from sparse_rl_lightning.retrievers import Retriever


@dataclass(frozen=True)
class RetrievalLogprobs:
    """What a pass under retrieval computes, with gradient through attention but not through the choice of pages."""

    logprobs: Tensor  # (B, T), 0 outside the completions
    entropy: Tensor  # (B, T) nats


def retrieval_logprobs(
    model: PreTrainedModel,
    rollout: Rollout,
    retriever: Retriever,
    temperature: float = 1.0,
    chunk_size: int = 512,
    head_in_float32: bool = False,
) -> RetrievalLogprobs:
    """Log-probabilities and entropies of the rollout's tokens when the learner itself retrieves.

    Args:
        model: The policy.
        retriever: Chooses pages from each layer's queries and keys in this pass; queries of prompts read everything,
            as in the rollout engine.
        rollout: Sequences of a sampler with this retriever.
        temperature: Divides the logits; the sampler's, 1 for greedy rollouts.
        chunk_size: As in ``sequence_logprobs``.
        head_in_float32: As in ``sequence_logprobs``.

    Raises:
        ValueError: If the rollout was evicted from as well.
    """
    kv = rollout.kv
    if kv is not None and bool((kv.stored < kv.full).any()):
        raise UserError(
            "This rollout was compressed besides (rollout.kv.stored is below rollout.kv.full), so that its pages were "
            "not those of its tokens. Only a sampler with FullKV and a retriever can be followed."
        )
    check_window(model, rollout.sequences.shape[1])
    pages = LearnerPages(rollout.prompt_lengths, retriever, num_layers=int(model.config.num_hidden_layers))
    with attention_implementation(model, RETRIEVAL):
        logprobs, entropy = sequence_logprobs(
            model, rollout.sequences, rollout.completion_mask, temperature, chunk_size, head_in_float32, retrieval=pages
        )
    return RetrievalLogprobs(logprobs, entropy)
