"""The number of tokens to keep for every layer and KV head of a full slot: rules over heads, schedules over length."""

from sparse_rl_lightning.budgets.budgeted import Budgeted
from sparse_rl_lightning.budgets.rules import Adaptive, BudgetRule, Pyramid, Uniform
from sparse_rl_lightning.budgets.schedules import LengthSchedule, PublishedSchedule, ScheduleFile, published_schedules

__all__ = [
    "Adaptive",
    "BudgetRule",
    "Budgeted",
    "LengthSchedule",
    "PublishedSchedule",
    "Pyramid",
    "ScheduleFile",
    "Uniform",
    "published_schedules",
]
