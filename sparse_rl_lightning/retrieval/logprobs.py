"""The learner under retrieval: log-probabilities under the pages a sampler read, or under those it would read now.

Retrieval chooses anew for every query, so unlike evictions the choice is too large to record but for short runs. The
learner can make it again instead: one parallel pass in which every layer chooses pages from its own queries and keys,
as the sampler did. Rounding then decides near-ties differently now and then, which is measured where a record is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.geometry import check_window
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.hooks import attention_implementation
from sparse_rl_lightning.replay.logprobs import drawn_by_several
from sparse_rl_lightning.retrieval.attention import RETRIEVAL, LearnerPages
from sparse_rl_lightning.retrievers import Retriever


@dataclass(frozen=True)
class RetrievalLogprobs:
    """What a pass under retrieval computes, with gradient through attention but not through the choice of pages."""

    logprobs: Tensor  # (B, T), 0 outside the completions
    entropy: Tensor  # (B, T) nats
    differing_pages: Tensor | None  # () share of the recorded pages that competed and were not chosen here


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
        rollout: Sequences; with ``rollout.pages`` the choices are compared.
        temperature: Divides the logits; the sampler's, 1 for greedy rollouts.
        chunk_size: As in ``sequence_logprobs``.
        head_in_float32: As in ``sequence_logprobs``.

    Raises:
        ValueError: If the rollout was evicted from as well, or its record is of other pages.
    """
    kv, record = rollout.kv, rollout.pages
    if kv is not None and bool((kv.stored < kv.full).any()):
        raise ValueError(
            "This rollout was compressed besides (rollout.kv.stored is below rollout.kv.full), so that its pages were "
            "not those of its tokens. Only a sampler with FullKV and a retriever can be followed."
        )
    own = (retriever.page_size, retriever.num_dense_layers)
    if record is not None and own != (record.page_size, record.num_dense_layers):
        raise ValueError(
            f"The rollout's pages are of page_size={record.page_size} and num_dense_layers={record.num_dense_layers}, "
            f"the retriever has {own[0]} and {own[1]}. Give the sampler's retriever, or drop rollout.pages."
        )
    # the query at t - 1 draws token t
    queries = rollout.completion_mask.roll(-1, dims=1)
    layers = int(model.config.num_hidden_layers)
    pages = LearnerPages(rollout.prompt_lengths, queries, retriever, record, num_layers=layers)
    logprobs, entropy = _under(model, rollout, pages, temperature, chunk_size, head_in_float32)
    return RetrievalLogprobs(logprobs, entropy, pages.share_differing())


def page_replay_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the rollout's tokens under the pages that the sampler read, with gradient.

    Args:
        model: The policy; with the sampler's weights the result equals ``rollout.sampler_logprobs``.
        rollout: Sequences of a sampler that was made with ``record_pages``.
        temperature: The sampler's temperature, 1 for greedy rollouts.

    Returns:
        (B, T), 0 outside the completions.

    Raises:
        ValueError: If the rollout carries no record of its pages, or a sequence was drawn by several policies.
    """
    if rollout.pages is None:
        raise ValueError(
            "This rollout has no record of the pages it read (rollout.pages is None). Give record_pages to the "
            "RolloutSampler, or use retrieval_logprobs, which chooses pages anew."
        )
    rows = drawn_by_several(rollout).nonzero().flatten().tolist()
    if rows:
        raise ValueError(f"Sequences {rows} were drawn by several versions of the policy: no replay reproduces them.")
    pages = LearnerPages(rollout.prompt_lengths, rollout.completion_mask, record=rollout.pages)
    return _under(model, rollout, pages, temperature)[0]


def _under(
    model: PreTrainedModel, rollout: Rollout, pages: LearnerPages, temperature: float, chunk_size: int = 512,
    head_in_float32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_window(model, rollout.sequences.shape[1])
    with attention_implementation(model, RETRIEVAL):
        return sequence_logprobs(
            model, rollout.sequences, rollout.completion_mask, temperature, chunk_size, head_in_float32, retrieval=pages
        )
