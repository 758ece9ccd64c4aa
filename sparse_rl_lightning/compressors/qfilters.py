"""QFilters: project keys on the direction that queries have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import live_entries
from sparse_rl_lightning.compressors.query_statistics import QueryStatistics, resolve_statistics
from sparse_rl_lightning.records import LayerState


class QFilters(Compressor):
    """Keep the keys that point where the model's queries point (Q-Filters, arXiv 2503.02812).

    The filters are the main directions of queries after rotation, gathered once from the model's own text; gather
    them again when the policy has moved far. They point to the side of the queries, so that a larger product is a
    larger logit. kvpress subtracts the product: change the sign of filters that are published for it.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        statistics: File written by ``sparse-rl statistics``, or the statistics themselves.
        **sizes: Arguments of :class:`Compressor`.

    Raises:
        ValueError: If the file of statistics is missing or holds something else, or :class:`Compressor` refuses an
            argument.
    """

    num_queries = 0
    needs_layer_index = True

    def __init__(self, budget: int | LengthSchedule, statistics: str | QueryStatistics, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.statistics = resolve_statistics(statistics, type(self).__name__)

    def score(self, layer: LayerState) -> Tensor:
        """The product of each key with its head's filter: (S, H, N)."""
        _, _, filters = self.statistics.layer(layer, type(self).__name__)
        return (live_entries(layer.keys, layer.valid) * filters[:, None]).sum(dim=-1)
