"""Budgeted: the base of compressors and retrievers, with a budget of tokens that can be replaced and raised."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self

from sparse_rl_lightning.budgets.rules import BudgetRule, checked_rule
from sparse_rl_lightning.budgets.schedules import LengthSchedule
from sparse_rl_lightning.errors import UserError


class Budgeted(ABC):
    """Has a budget of tokens per layer and KV head, and a rule by which layers and heads share it.

    Subclasses set the attributes that ``_check_schedule`` reads before they call ``super().__init__``.

    Args:
        budget: Number of tokens, or a schedule by the length of the sequence.
        budget_rule: Rule by which layers and heads share the budget, null for equally.
    """

    schedule: LengthSchedule
    """The current budget."""

    def __init__(self, budget: int | LengthSchedule, budget_rule: BudgetRule | None) -> None:
        self.budget_rule = checked_rule("budget_rule", budget_rule)
        self._set_budget(budget)
        self._given_schedule = self.schedule

    @property
    def budget(self) -> int:
        """The largest budget of ``schedule``, which determines the size of the memory."""
        return self.schedule.maximum

    @property
    def is_limited(self) -> bool:
        """Whether the budget limits anything; False for the full cache."""
        return True

    def with_budget(self, budget: int | LengthSchedule) -> Self:
        """A copy with another budget, which is refused where a new instance would refuse it."""
        clone = copy.deepcopy(self)
        clone._set_budget(budget)
        clone._given_schedule = clone.schedule
        return clone

    def raise_budget(self, steps: int) -> None:
        """Set the budget ``steps`` steps above the given one; samplers follow at their next call.

        A step is that of :meth:`~sparse_rl_lightning.budgets.LengthSchedule.raised`: the next budget of the schedule, a
        quarter more for a single number. Steps count from the budget at construction: the same call twice is one.
        """
        if not self.is_limited:
            raise UserError(f"{type(self).__name__} keeps everything: there is no budget to raise.")
        self._set_budget(self.raised(steps))

    def raised(self, steps: int) -> LengthSchedule:
        """The schedule that :meth:`raise_budget` sets."""
        return self._given_schedule.raised(steps)

    def _set_budget(self, budget: int | LengthSchedule) -> None:
        if not isinstance(budget, (int, LengthSchedule)):
            raise UserError(
                f"{type(self).__name__}: budget counts tokens, got budget={budget!r}, a {type(budget).__name__}. Give "
                "an int, such as 512, or a LengthSchedule; a share of the sequence is neither."
            )
        if isinstance(budget, int) and budget < 1:
            raise UserError(f"{type(self).__name__}: budget must be a positive number of tokens, got budget={budget}.")
        schedule = LengthSchedule.constant(budget) if isinstance(budget, int) else budget
        self._check_schedule(schedule)
        self.schedule = schedule

    @abstractmethod
    def _check_schedule(self, schedule: LengthSchedule) -> None:
        """Refuse budgets that leave nothing to choose."""

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "schedule" and not name.startswith("_")}
        arguments = ", ".join(f"{name}={value!r}" for name, value in {"budget": self.schedule.plain, **shown}.items())
        return f"{type(self).__name__}({arguments})"
