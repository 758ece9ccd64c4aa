"""Log-probabilities of the learner under retrieval: with the pages that the sampler would read now.

Retrieval makes a new choice for every query, so unlike evictions the choices are too large to record. The learner
makes them again: one parallel pass in which every layer chooses pages from its own queries and keys, like the sampler.
Because of rounding, near-ties are occasionally decided differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.select_pages import keep_pages
from sparse_rl_lightning.policies.support import attention_modules, check_full_layers, check_length
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.hooks import attention_implementation, register
from sparse_rl_lightning.replay.masked_attention import MASK_BYTES, group_heads, masked_attention
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.retrievers.base import PageLimits


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
    ids: Tensor | None = None,
) -> RetrievalLogprobs:
    """Compute log-probabilities and entropies of the rollout's tokens when the learner itself retrieves.

    The retriever, the sampler's, chooses pages from each layer's queries and keys in this pass; queries of prompts read
    everything, as in the rollout engine. The temperature is the sampler's, 1 for greedy rollouts; chunks,
    precision and candidates ``ids`` are as in ``sequence_logprobs``.
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
        statistics = sequence_logprobs(
            model,
            rollout.sequences,
            rollout.completion_mask,
            temperature,
            chunk_size,
            head_in_float32,
            rollout.routing,
            ids=ids,
            retrieval=pages,
        )
    return RetrievalLogprobs(*statistics)


RETRIEVAL = "sparse_rl_retrieval"


@dataclass
class LearnerPages:
    """The pages that the queries of a batch of sequences read, layer by layer.

    Queries of prompts read everything. For the others pages are chosen from each layer's own queries and keys in this
    very pass, with the rule of the rollout engine.
    """

    prompt_lengths: Tensor  # (B,)
    retriever: Retriever  # the sampler's
    mask_bytes: int = MASK_BYTES  # limit of a mask, as in masked_attention
    num_layers: int = 0  # layers of the model, for a budget rule of the retriever; 0 if all layers read as much
    limits_at: PageLimits = field(init=False)

    def __post_init__(self) -> None:
        retrieving = max(self.num_layers - self.retriever.num_dense_layers, 1)
        self.limits_at = self.retriever.page_limits(retrieving, self.prompt_lengths.device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute one layer's attention (B, Hq, T, D) from queries (B, Hq, T, D), keys and values (B, H, T, D)."""
        if sinks is not None:
            raise UserError(f"{type(self.retriever).__name__} does not know the learned sinks of this model.")
        batch, heads, length, width = key.shape
        if layer < self.retriever.num_dense_layers:
            alike = group_heads(query, key, value)
            return F.scaled_dot_product_attention(*alike, is_causal=True, scale=scale).reshape(query.shape)
        with torch.no_grad():
            grouped = query.detach().reshape(batch, heads, -1, length, width)
            summaries = self._summaries(key.detach())

        def mask_of(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                pages = self.choose(layer, grouped[:, :, :, start:stop], summaries, start, length)
                return self._tokens(pages, start, stop)

        return masked_attention(query, key, value, mask_of, scale, self.mask_bytes)

    def _summaries(self, key: Tensor) -> Tensor:
        """The vectors (B, H, C, P, D) of the complete pages of keys (B, H, T, D)."""
        size = self.retriever.page_size
        count = key.shape[2] // size
        whole = key[:, :, : count * size].reshape(*key.shape[:2], count, size, key.shape[3])
        return self.retriever.summarize(whole).transpose(2, 3)

    def choose(self, layer: int, queries: Tensor, summaries: Tensor, start: int, total: int) -> Tensor:
        """The pages (B, H, t, P), bool, for queries (B, H, G, t, D), the first at position ``start`` of ``total``."""
        r = self.retriever
        lengths = torch.arange(start + 1, start + 1 + queries.shape[3], device=queries.device)
        counts = -(-lengths // r.page_size)
        missing = -(-total // r.page_size) - summaries.shape[3]
        scores = F.pad(r.score(queries, summaries).float(), (0, missing))  # the incomplete page is read anyway
        limits = self.limits_at(lengths)[min(layer - r.num_dense_layers, len(self.limits_at.limits) - 1)]
        return keep_pages(scores, counts, limits, r.num_first_pages, r.num_last_pages)

    def _tokens(self, pages: Tensor, start: int, stop: int) -> Tensor:
        """The tokens (B, H, 1, t, stop), bool, that queries see in their pages (B, H, t, P)."""
        step = torch.arange(stop, device=pages.device)
        at = step[start:, None]
        everything = (step[start:] < self.prompt_lengths[:, None])[:, None]
        seen = pages.repeat_interleave(self.retriever.page_size, dim=-1)[..., :stop] | everything.unsqueeze(-1)
        return (seen & (step <= at)).unsqueeze(2)


register(RETRIEVAL, "retrieval", LearnerPages.attend)
