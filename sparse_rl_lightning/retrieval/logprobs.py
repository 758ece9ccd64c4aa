"""Log-probabilities of the learner under retrieval: with the pages that the sampler would read now.

Retrieval makes a new choice for every query, so unlike evictions the choices are too large to record. The learner
makes them again: one parallel pass in which every layer chooses pages from its own queries and keys, like the sampler.
Because of rounding, near-ties are occasionally decided differently.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.support import attention_modules, check_full_layers, check_length
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.hooks import attention_implementation
from sparse_rl_lightning.retrieval.attention import RETRIEVAL, LearnerPages
from sparse_rl_lightning.retrievers import Retriever


class RetrievalLogprobs(NamedTuple):
    """The result of a pass under retrieval, with gradient through attention but not through the choice of pages."""

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
    """Compute log-probabilities and entropies of the rollout's tokens when the learner itself retrieves.

    The retriever, the sampler's, chooses pages from each layer's queries and keys in this pass; queries of prompts read
    everything, as in the rollout engine. The temperature is the sampler's, 1 for greedy rollouts; chunks and precision
    are as in ``sequence_logprobs``.
    """
    kv = rollout.kv
    if kv is not None and bool((kv.stored < kv.full).any()):
        raise UserError(
            "This rollout was compressed besides (rollout.kv.stored is below rollout.kv.full), so that its pages were "
            "not those of its tokens. Only a sampler with FullKV and a retriever can be followed."
        )
    check_length(model, rollout.sequences.shape[1])
    check_full_layers(model, rollout.sequences.shape[1], type(retriever).__name__)
    pages = LearnerPages(rollout.prompt_lengths, retriever, num_layers=len(attention_modules(model)))
    with attention_implementation(model, RETRIEVAL):
        found = sequence_logprobs(
            model,
            rollout.sequences,
            rollout.completion_mask,
            temperature,
            chunk_size,
            head_in_float32,
            rollout.routing,
            retrieval=pages,
        )
    return RetrievalLogprobs(*found)
