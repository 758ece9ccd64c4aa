"""SnapKV: keep what the most recent queries attend to."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.attention import recent_attention
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.ops import CachedEntries
from sparse_rl_lightning.ops.pools import live_entries
from sparse_rl_lightning.ops.window_importance import (
    GroupReduction,
    Pooling,
    cached_importance,
    pool_entries,
    window_importance,
)
from sparse_rl_lightning.records import LayerState

Variant = Literal["decode", "original"]
Aggregation = Literal["mean", "max_clamped"]


class SnapKV(Compressor):
    """Keep the entries that the last ``window`` queries attend to most, pooled over neighbors (arXiv 2404.14469).

    ``variant="decode"`` with all defaults and ``num_sinks=0`` is the SnapKV of the R-KV repository, which Sparse-RL
    uses: softmax over the entries outside the window, mean over the queries. ``variant="original"`` is the one of the
    SnapKV repository: softmax over all live entries under the causal mask, sum over the queries; its class defaults
    are ``num_sinks=0, window=64, kernel_size=5, pooling="avg"`` (``window=32`` in its model configurations). It selects
    entries per query head, on keys repeated for each of them; here a set belongs to a KV head, so with grouped queries
    ``group_reduction`` makes one score of the group ("mean" as in kvpress). Both originals score every compression
    with ``window`` queries; here means run over the queries available.

    ``aggregation="max_clamped"`` is defensive (DefensiveKV, arXiv 2510.13334): an entry's score is the largest
    importance that any query of any head of the group gives it, at least the mean of all entries, times the norm of its
    value. What one query needed badly then outweighs what all need a little, and low entries are compared by their
    values. The paper has ``variant="original", window=32, kernel_size=5, pooling="avg"``, budgets per head, the norm
    behind the output projection, and first keeps what makes up nine tenths of the mean attention.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        kernel_size: Entries that pooling looks at, an odd number; 1 pools nothing.
        pooling: "max", "avg" or "none" over neighboring entries.
        group_reduction: "max" of the logits over the query heads of a KV head before the softmax, or "mean" of their
            importance after softmax and pooling.
        variant: "decode" or "original".
        aggregation: "mean" over the queries (their sum in the variant "original"), or "max_clamped" over queries and
            query heads, which leaves nothing for ``group_reduction`` to do.
        **sizes: Arguments of :class:`Compressor`; ``window`` is also the number of queries that score.
    """

    def __init__(
        self,
        budget: int | LengthSchedule,
        *,
        kernel_size: int = 7,
        pooling: Pooling = "max",
        group_reduction: GroupReduction = "max",
        variant: Variant = "decode",
        aggregation: Aggregation = "mean",
        **sizes: Any,
    ) -> None:
        super().__init__(budget, **sizes)
        name = type(self).__name__
        check_number("kernel_size", kernel_size, least=1, owner=name, whole=True)
        if kernel_size % 2 == 0:
            raise UserError(f"{name}: kernel_size must be an odd number of entries, got kernel_size={kernel_size}.")
        check_choice("pooling", pooling, Pooling, type(self).__name__)
        check_choice("group_reduction", group_reduction, GroupReduction, type(self).__name__)
        check_choice("variant", variant, Variant, type(self).__name__)
        check_choice("aggregation", aggregation, Aggregation, type(self).__name__)
        if aggregation == "max_clamped" and group_reduction != "max":
            raise UserError(
                f"{name}: aggregation='max_clamped' takes the largest importance of all query heads, so "
                f"group_reduction must be 'max', got group_reduction={group_reduction!r}. Leave it out."
            )
        self.kernel_size = kernel_size
        self.pooling: Pooling = pooling
        self.group_reduction: GroupReduction = group_reduction
        self.variant: Variant = variant
        self.aggregation: Aggregation = aggregation
        self._has_op = aggregation == "mean"

    def score(self, layer: LayerState) -> Tensor:
        """Pooled attention of the last queries: (S, H, N), 0 in the window."""
        if self.aggregation == "max_clamped":
            return self._largest_importance(layer)
        return window_importance(
            layer.queries.to(layer.keys.dtype),
            layer.query_positions,
            layer.keys,
            layer.valid.sum(dim=-1),
            layer.positions,
            layer.scale,
            **self._importance(),
        )

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return cached_importance(entries, **self._importance())

    def _largest_importance(self, layer: LayerState) -> Tensor:
        """The largest importance that a query of the group gives, at least the mean, times the norm of the value."""
        outside = live_entries(layer.lengths - self.window, layer.valid.shape[-1])  # (S, H, N)
        entries = outside[:, :, None, None]
        paid = recent_attention(layer).masked_fill(~entries, 0.0)  # (S, H, G, A, N)
        shares = F.normalize(pool_entries(paid, entries, self.pooling, self.kernel_size), p=1, dim=-1)
        if self.variant == "original":  # pooling leaves a query what it paid; in the other the softmax is over these
            shares = shares * paid.sum(dim=-1, keepdim=True)
        largest = shares.amax(dim=(2, 3))
        mean = largest.sum(dim=-1, keepdim=True) / outside.sum(dim=-1, keepdim=True).clamp(min=1)
        norms: Tensor = torch.linalg.vector_norm(layer.values, dim=-1, dtype=largest.dtype)
        return (largest.clamp(min=mean) * norms).masked_fill(~outside, 0.0)

    def _importance(self) -> dict[str, Any]:
        """The settings of the op, of one layer's state or of the cache."""
        return {
            "window": self.window,
            "exclude_window": self.variant == "decode",
            "group_reduction": self.group_reduction,
            "query_reduction": "mean" if self.variant == "decode" else "sum",
            "pooling": self.pooling,
            "kernel_size": self.kernel_size,
        }
