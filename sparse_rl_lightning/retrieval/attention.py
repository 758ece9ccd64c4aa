"""Attention of the learner to pages: those that a sampler recorded, or those that a retriever chooses for its queries.

Gradient flows through the attention; which pages are read is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_rl_lightning.ops.pages import keep_pages
from sparse_rl_lightning.page_record import PageRecord
from sparse_rl_lightning.replay.hooks import register
from sparse_rl_lightning.replay.masked_attention import MASK_BYTES, masked_attention
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.retrievers.base import PageLimits

RETRIEVAL = "sparse_rl_retrieval"


@dataclass
class LearnerPages:
    """What the queries of a batch of sequences read, layer by layer.

    Queries of prompts read everything. With a retriever pages are chosen from each layer's own queries and keys as they
    are in this very pass, with the rule of the rollout engine; with a record besides, the two are compared.

    Args:
        prompt_lengths: (B,).
        query_mask: (B, T) bool, queries that are compared.
        retriever: Chooses; None attends to the record.
        record: Of the sampler.
        mask_bytes: As in :func:`~sparse_rl_lightning.replay.masked_attention.masked_attention`.
        num_layers: Of the model, for a budget rule of the retriever; 0 where all layers read as much.

    Raises:
        ValueError: If there is neither a retriever nor a record.
    """

    prompt_lengths: Tensor
    query_mask: Tensor
    retriever: Retriever | None = None
    record: PageRecord | None = None
    mask_bytes: int = MASK_BYTES
    num_layers: int = 0
    limits_at: PageLimits | None = field(init=False, default=None)
    differing: dict[tuple[int, int], Tensor] = field(init=False, default_factory=dict)  # (2,) by layer and first query

    def __post_init__(self) -> None:
        known = self.retriever if self.record is None else self.record
        if known is None:
            raise ValueError("Give a retriever, or a record of the pages that a sampler has read.")
        self.page_size, self.num_dense_layers = known.page_size, known.num_dense_layers
        if self.retriever is not None:
            retrieving = max(self.num_layers - self.num_dense_layers, 1)
            self.limits_at = self.retriever.page_limits(retrieving, self.prompt_lengths.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of one layer: (B, Hq, T, D) from queries (B, Hq, T, D), keys and values (B, H, T, D)."""
        batch, heads, length, width = key.shape
        if layer < self.num_dense_layers:
            grouped = query.reshape(batch * heads, -1, length, width)
            keys, values = (t.reshape(batch * heads, 1, length, width).expand_as(grouped) for t in (key, value))
            return F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale).reshape(
                query.shape
            )
        with torch.no_grad():
            grouped = query.detach().reshape(batch, heads, -1, length, width)
            summaries = self._summaries(key.detach())
            recorded = None if self.record is None else self.record.kept(layer, -(-length // self.page_size))

        def mask_of(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                pages = recorded[:, :, start:stop] if recorded is not None else None
                if summaries is not None:
                    chosen = self._choose(layer, grouped[:, :, :, start:stop], summaries, start)
                    if pages is not None:
                        self.differing[layer, start] = self._compare(chosen, pages, start)
                    pages = chosen
                assert pages is not None
                return self._tokens(pages, start, stop)

        return masked_attention(query, key, value, mask_of, scale, self.mask_bytes)

    def share_differing(self) -> Tensor | None:
        """Share of the recorded pages that competed and that were not chosen again; None without a record."""
        if not self.differing:
            return None
        differing, competed = torch.stack(list(self.differing.values())).sum(dim=0).unbind()
        return differing / competed.clamp(min=1)

    # ---------------------------------------------------------------- inside

    def _summaries(self, key: Tensor) -> Tensor | None:
        """(B, H, C, P, D) of the complete pages of (B, H, T, D) keys."""
        if self.retriever is None:
            return None
        count = key.shape[2] // self.page_size
        whole = key[:, :, : count * self.page_size].reshape(*key.shape[:2], count, self.page_size, key.shape[3])
        return self.retriever.summarize(whole).transpose(2, 3)

    def _choose(self, layer: int, queries: Tensor, summaries: Tensor, start: int) -> Tensor:
        """(B, H, t, P) bool: what queries (B, H, G, t, D) read, the first at position ``start``."""
        r, limits_at = self.retriever, self.limits_at
        assert r is not None
        assert limits_at is not None
        lengths = torch.arange(start + 1, start + 1 + queries.shape[3], device=queries.device)
        counts = -(-lengths // self.page_size)
        missing = -(-int(self.query_mask.shape[1]) // self.page_size) - summaries.shape[3]
        scores = F.pad(r.score(queries, summaries).float(), (0, missing))  # the incomplete page is read anyway
        limits = limits_at(lengths)[min(layer - r.num_dense_layers, len(limits_at.limits) - 1)]
        return keep_pages(scores, counts, limits, r.num_first_pages, r.num_last_pages)

    def _tokens(self, pages: Tensor, start: int, stop: int) -> Tensor:
        """(B, H, 1, t, stop) bool: the tokens of pages (B, H, t, P) that queries see."""
        step = torch.arange(stop, device=pages.device)
        at = step[start:, None]
        unread = ~pages.any(dim=-1)  # (B, H, t): nothing recorded
        everything = unread | (step[start:] < self.prompt_lengths[:, None])[:, None]
        seen = pages.repeat_interleave(self.page_size, dim=-1)[..., :stop] | everything.unsqueeze(-1)
        return (seen & (step <= at)).unsqueeze(2)

    def _compare(self, chosen: Tensor, recorded: Tensor, start: int) -> Tensor:
        """(2,) float32: recorded pages (B, H, t, P) that were not chosen, and those that competed at all."""
        r = self.retriever
        assert r is not None
        counts = recorded.sum(dim=-1)
        existing = -(-torch.arange(start + 1, start + 1 + counts.shape[2], device=counts.device) // self.page_size)
        counted = self.query_mask[:, None, start : start + counts.shape[2]] & (counts < existing) & (counts > 0)
        differing = ((recorded & ~chosen).sum(dim=-1) * counted).sum()
        competed = ((counts - r.num_first_pages - r.num_last_pages) * counted).sum()
        return torch.stack([differing, competed]).float()


def retrieval_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    retrieval: LearnerPages,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the learner to the pages that queries read."""
    layer: int = module.layer_idx  # type: ignore[assignment]  # torch types module attributes as tensors
    return retrieval.attend(layer, query, key, value, scaling).transpose(1, 2), None


register(RETRIEVAL, retrieval_attention)
