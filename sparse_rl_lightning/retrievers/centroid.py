"""Centroid: read pages whose mean key points where the query does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.errors import check_choice
from sparse_rl_lightning.ops.select_pages import PageReduction, page_scores
from sparse_rl_lightning.ops.summarize_pages import page_means
from sparse_rl_lightning.retrievers.base import Retriever


class Centroid(Retriever):
    """Read the pages with the largest product of mean key and mean query of the group (Sparrow, arXiv 2606.08446).

    It keeps one vector per page, 1/32 of the memory of keys and values with pages of 16.

    Args:
        budget: Tokens that a query reads per layer and KV head.
        group_reduction: Scores of the query heads of a group are averaged (``mean``, as Sparrow does) or the largest
            counts (``max``).
        **sizes: Arguments of :class:`Retriever`.
    """

    def __init__(self, budget: int | LengthSchedule, *, group_reduction: PageReduction = "mean", **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        check_choice("group_reduction", group_reduction, PageReduction, type(self).__name__)
        self.group_reduction: PageReduction = group_reduction

    def summarize(self, keys: Tensor) -> Tensor:
        """The mean key: (..., 1, D)."""
        return page_means(keys)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """The products of query and mean key: (..., Q, P)."""
        return page_scores(queries, summaries, self.group_reduction)

    @property
    def kernel(self) -> PageReduction | None:
        """The group's reduction, unless a subclass computes something else."""
        is_standard = type(self).summarize is Centroid.summarize and type(self).score is Centroid.score
        return self.group_reduction if is_standard else None
