"""Quest: read pages in which a key may have a large product with the query."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.errors import check_choice
from sparse_rl_lightning.ops.select_pages import PageReduction, page_scores
from sparse_rl_lightning.ops.summarize_pages import page_bounds
from sparse_rl_lightning.retrievers.base import Retriever


class Quest(Retriever):
    """Read the pages with the largest upper bound of query x key (arXiv 2406.10774).

    The largest and the smallest value of every key element are kept for each page, two vectors: 1/16 of the memory of
    keys and values with pages of 16. The bound is ``sum_i max(q_i max_i, q_i min_i)``. Quest was published without
    grouped heads; here a group reads the same pages, as in Vortex, and the largest bound of its heads counts.

    Args:
        budget: Tokens that a query reads per layer and KV head.
        group_reduction: The largest bound of the query heads of a group counts (``max``) or their mean (``mean``).
        **sizes: Arguments of :class:`Retriever`.
    """

    num_vectors = 2

    def __init__(self, budget: int | LengthSchedule, *, group_reduction: PageReduction = "max", **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        check_choice("group_reduction", group_reduction, PageReduction, type(self).__name__)
        self.group_reduction: PageReduction = group_reduction

    def summarize(self, keys: Tensor) -> Tensor:
        """The largest and smallest elements: (..., 2, D)."""
        return page_bounds(keys)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """The upper bounds of query x key: (..., Q, P)."""
        return page_scores(queries, summaries, self.group_reduction)

    @property
    def kernel(self) -> PageReduction | None:
        """The group's reduction, unless a subclass computes something else."""
        is_standard = type(self).summarize is Quest.summarize and type(self).score is Quest.score
        return self.group_reduction if is_standard else None
