"""Callbacks that modules bring to every run, unless its trainer has its own."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

from sparse_rl_lightning.callbacks.guards.dry_run import DryRun
from sparse_rl_lightning.callbacks.guards.empty_rollouts import EmptyRollouts
from sparse_rl_lightning.callbacks.guards.last_save import LastSave
from sparse_rl_lightning.callbacks.guards.log_guard import LogGuard
from sparse_rl_lightning.callbacks.guards.preemption import Preemption
from sparse_rl_lightning.callbacks.guards.rank_watch import RankWatch
from sparse_rl_lightning.callbacks.guards.run_lock import RunLock
from sparse_rl_lightning.callbacks.guards.step_guard import StepGuard
from sparse_rl_lightning.callbacks.monitors.step_times import StepTimes
from sparse_rl_lightning.callbacks.sharding import ZeroSharding

EVERY_RUN: tuple[type[Callback], ...] = (RunLock, LogGuard, LastSave)
"""Of all modules."""

ROLLING_OUT: tuple[type[Callback], ...] = (
    DryRun, ZeroSharding, StepTimes, EmptyRollouts, StepGuard, RankWatch, Preemption
)  # fmt: skip
"""Of modules that roll out, beside the others."""


def added_to(trainer: Trainer, kinds: tuple[type[Callback], ...]) -> list[Callback]:
    """One of each kind that the trainer was not given."""
    given = trainer.callbacks  # type: ignore[attr-defined]
    return [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in given)]
