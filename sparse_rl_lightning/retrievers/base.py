"""Retriever: summaries of the pages of a cache, and scores of pages for a query."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import Budgeted, BudgetRule, LengthSchedule
from sparse_rl_lightning.budgets.rules import checked_rule
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.ops.select_pages import PageReduction


class Retriever(Budgeted):
    """Decides which ``budget`` tokens of the cache each query reads; subclasses write :meth:`summarize`, :meth:`score`.

    Nothing is deleted: retrieval saves time for reading keys and values, not their memory, which even grows by the
    summary of each page. A sequence's entries are cut into pages of ``page_size``. At every decode step
    and for every KV head the first ``num_first_pages``, the last ``num_last_pages`` and the best scores among the
    others are attended to; the query heads of a group read the same pages. Prompts attend to everything. A retriever
    keeps no state: one instance serves all layers, slots and ranks.

    Args:
        budget: Number of tokens that a query reads per layer and KV head, first and last pages included (Sparrow counts
            only its chosen pages: its 1024 tokens are ``1024 + 3 * 16`` here); a number, or a schedule by the length of
            the sequence.
        page_size: Entries of a page.
        num_first_pages: Pages at the beginning that are always read.
        num_last_pages: Pages at the end that are always read, the incomplete one with the query's own token first.
        num_dense_layers: First layers whose queries read everything.
        budget_rule: Rule by which the other layers share the budget, null for equally; a layer reads whole pages. All
            heads of a layer read as much, so rules that split heads are refused.

    Raises:
        ValueError: If ``page_size`` or ``num_last_pages`` is below 1, ``num_first_pages`` or ``num_dense_layers`` is
            negative, ``budget_rule`` splits heads, or a budget is not a whole number of pages or is smaller than the
            pages that are always read.
    """

    num_vectors = 1
    """Number of vectors of the head size per page summary, in the type of the keys."""

    def __init__(
        self,
        budget: int | LengthSchedule,
        page_size: int = 16,
        num_first_pages: int = 1,
        num_last_pages: int = 2,
        num_dense_layers: int = 2,
        budget_rule: BudgetRule | None = None,
    ) -> None:
        name = type(self).__name__
        for option, value, least in (
            ("page_size", page_size, 1), ("num_first_pages", num_first_pages, 0), ("num_last_pages", num_last_pages, 1),
            ("num_dense_layers", num_dense_layers, 0),
        ):  # fmt: skip
            check_number(option, value, least=least, owner=name, whole=True)
        self.page_size = page_size
        self.num_first_pages = num_first_pages
        self.num_last_pages = num_last_pages
        self.num_dense_layers = num_dense_layers
        if checked_rule("budget_rule", budget_rule).splits_heads:
            raise UserError(
                f"{name}: all heads of a layer read as many pages, but {type(budget_rule).__name__} splits heads. "
                "Set budget_rule to Uniform or Pyramid."
            )
        super().__init__(budget, budget_rule)

    def _check_schedule(self, schedule: LengthSchedule) -> None:
        name, page_size = type(self).__name__, self.page_size
        broken = [tokens for tokens in schedule.budgets if tokens % page_size]
        if broken:
            near = [tokens for tokens in (broken[0] // page_size, -(-broken[0] // page_size)) if tokens]
            raise UserError(
                f"{name}: page_size={page_size} does not divide budget={broken[0]}. Take "
                f"{' or '.join(str(pages * page_size) for pages in near)} tokens, or another page_size."
            )
        reserved = self.num_first_pages + self.num_last_pages
        if schedule.minimum < reserved * page_size:
            raise UserError(
                f"{name}: budget={schedule.minimum} is smaller than the pages that are always read: "
                f"(num_first_pages + num_last_pages) x page_size = ({self.num_first_pages} + {self.num_last_pages}) x "
                f"{page_size} = {reserved * page_size} tokens. Raise budget or lower one of them."
            )

    def raised(self, steps: int) -> LengthSchedule:
        """The schedule that ``raise_budget`` sets, in whole pages."""
        raised, page = super().raised(steps), self.page_size
        return LengthSchedule(list(raised.starts), [-(-budget // page) * page for budget in raised.budgets])

    # ---------------------------------------------------------------- declarations of a method

    @abstractmethod
    def summarize(self, keys: Tensor) -> Tensor:
        """Summaries of complete pages: (..., page_size, D) post-RoPE keys to (..., num_vectors, D) of their type."""

    @abstractmethod
    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """Scores of pages for queries, higher is read.

        The engine scores one query at a time and the learner many, so no query may affect another.

        Args:
            queries: (..., G, Q, D) post-RoPE, G query heads of a group.
            summaries: (..., num_vectors, P, D) of P pages, from :meth:`summarize`.

        Returns:
            The scores (..., Q, P).
        """

    # ---------------------------------------------------------------- calls of the engine

    @property
    def kernel(self) -> PageReduction | None:
        """The reduction over a group with which the ops ``summarize_pages`` and ``select_pages`` compute the same.

        None runs :meth:`summarize` and :meth:`score` in PyTorch, as for a subclass of your own.
        """
        return None

    def layer_pages(self, num_layers: int, budget: int) -> list[int]:
        """The number of pages that a query reads in each retrieving layer, under one budget of the schedule."""
        reserved = self.num_first_pages + self.num_last_pages
        shares = self.budget_rule.layer_budgets(budget, num_layers, reserved * self.page_size)
        return [max(round(share / self.page_size), reserved) for share in shares]

    def page_limits(self, num_layers: int, device: torch.device | str) -> PageLimits:
        """Pages that a sequence reads in each of the layers that retrieve, as a function of tensors of lengths."""
        starts = torch.tensor(self.schedule.starts, dtype=torch.int64, device=device)
        pages = [self.layer_pages(num_layers, budget) for budget in self.schedule.budgets]
        return PageLimits(starts, torch.tensor(pages, dtype=torch.int32, device=device).T.contiguous())


class PageLimits:
    """A schedule in pages, as tensors created once, so that a decode step does not copy numbers to the device.

    From lengths ``starts`` (n,) int64 on, ascending from 0, retrieving layers read ``limits`` (L, n) int32 pages.
    """

    def __init__(self, starts: Tensor, limits: Tensor) -> None:
        self.starts, self.limits = starts, limits

    def __call__(self, lengths: Tensor) -> Tensor:
        """The number of pages (L, ...) int32 that sequences of these lengths read."""
        return self.limits[:, torch.bucketize(lengths, self.starts, right=True) - 1]
