"""VaSE: keep the largest values, and draw the rest by the attention that they receive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.entries import fresh_draws, live_entries
from sparse_rl_lightning.compressors.snapkv import SnapKV
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.ops.evict import select_entries
from sparse_rl_lightning.records import LayerState


class VaSE(SnapKV):
    """Keep the entries with the largest values, and draw the others by the attention they receive (arXiv 2606.03928).

    The size of a value is its range, the largest channel minus the smallest. Of the entries before the window
    ``num_large`` stay for it, sinks first. The rest of the budget is drawn without replacement, anew at every
    compression, with chances proportional to :class:`SnapKV`'s importance, here the attention of the last ``window``
    queries in the mean over queries, ``kernel_size`` neighbors and the query heads of the KV head. A sequence draws its
    own numbers, so it keeps the same entries in any batch and slot. Buffer, window, kernel and the quarter are those of
    the published runs, whose prompts are not compressed before the first token.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        num_large: Entries that stay for their values, sinks among them; null for a quarter of the smallest budget.
        kernel_size: Entries that the average over neighbors looks at, an odd number; 1 averages nothing.
        buffer: Tokens appended between two compressions.
        window: Most recent tokens that are never evicted, also the number of queries that score.
        **sizes: Other arguments of :class:`Compressor`.

    Raises:
        ValueError: If ``kernel_size`` is even or below 1, or ``num_large`` more than ``window`` leaves of the budget.
    """

    needs_layer_index = True

    def __init__(
        self, budget: int | LengthSchedule, *, num_large: int | None = None, kernel_size: int = 5, buffer: int = 64,
        window: int = 64, **sizes: Any,
    ) -> None:  # fmt: skip
        self.num_large = num_large
        super().__init__(
            budget, kernel_size=kernel_size, pooling="avg", group_reduction="mean", variant="decode",
            aggregation="mean", buffer=buffer, window=window, **sizes,
        )  # fmt: skip

    def _check_schedule(self, schedule: LengthSchedule) -> None:
        super()._check_schedule(schedule)
        most = schedule.minimum - self.window
        check_number("num_large", self.num_large, least=0, most=most, owner="VaSE", or_none=True, whole=True)

    def layer_budgets(self, num_layers: int, budget: int | None = None) -> list[int]:
        """Those of the rule, each of which leaves room for draws beside window and large values."""
        budgets = super().layer_budgets(num_layers, budget)
        check_number("num_large", self._number_of_large, least=0, most=min(budgets) - self.window, owner="VaSE")
        return budgets

    @property
    def _number_of_large(self) -> int:
        return self.schedule.minimum // 4 if self.num_large is None else self.num_large

    def score(self, layer: LayerState) -> Tensor:
        """The range of the largest values, and below 0 the draws of the others: (S, H, N)."""
        # the smallest exponentials divided by weights are a draw without replacement (Efraimidis, Spirakis 2006)
        draws = torch.log1p(-fresh_draws(layer)) / super().score(layer)
        values = live_entries(layer.values, layer.valid)
        size = values.amax(dim=-1) - values.amin(dim=-1)
        # as many as the cache keeps of a budget without draws: sinks, the largest and the window
        is_large = select_entries(
            size, layer.valid, layer.positions, self._number_of_large + self.window, self.num_sinks, self.window
        )
        return torch.where(is_large, size, draws)
