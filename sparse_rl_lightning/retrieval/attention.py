"""Attention of the learner to the pages that a retriever chooses for its queries.

Gradient flows through the attention; the choice of pages is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.select_pages import keep_pages
from sparse_rl_lightning.replay.hooks import register
from sparse_rl_lightning.replay.masked_attention import MASK_BYTES, group_heads, masked_attention
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.retrievers.base import PageLimits

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
