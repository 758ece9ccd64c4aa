"""H2O: keep the heavy hitters, which have received most attention so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import newest_position
from sparse_rl_lightning.ops import CachedEntries, score_entries
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.records import LayerState, StateUpdate


class H2O(Compressor):
    """Evict what has received least attention since it entered the cache (arXiv 2306.14048).

    Attention adds up over all steps and the query heads of a group; an evicted token loses its sum. Old tokens have had
    more time to accumulate, which ``age_normalized`` divides out; ``value_weighted`` multiplies by the norm of the
    value, since attention to a small value has little effect. The paper keeps as many recent tokens as heavy hitters,
    which is ``window = budget // 2`` here, and compresses at every step, which is ``buffer=1``. The sums need the
    attention probabilities of every step: the most expensive method here while decoding.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        age_normalized: Divide by the number of queries that could see the token.
        value_weighted: Multiply by the norm of the value.
        **sizes: Arguments of :class:`Compressor`.
    """

    num_queries = 0
    state_fields = ("mass",)
    needs_attention = True

    def __init__(
        self, budget: int | LengthSchedule, *, age_normalized: bool = False, value_weighted: bool = False, **sizes: Any
    ) -> None:
        super().__init__(budget, **sizes)
        self.age_normalized = age_normalized
        self.value_weighted = value_weighted

    def update_state(self, update: StateUpdate) -> None:
        """Add the attention of the new tokens."""
        update.state["mass"].add_(update.mass.sum(dim=2))

    def score(self, layer: LayerState) -> Tensor:
        """The attention received: (S, H, N)."""
        scores = layer.state["mass"]
        if self.age_normalized:
            age = newest_position(layer)[:, None, None] - layer.positions + 1
            scores = scores / age
        if self.value_weighted:
            dtype = accumulation_dtype(layer.values.dtype)
            scores = scores * torch.linalg.vector_norm(layer.values, dim=-1, dtype=dtype)
        return scores

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return score_entries(entries, "mass", by_age=self.age_normalized, by_value=self.value_weighted)
