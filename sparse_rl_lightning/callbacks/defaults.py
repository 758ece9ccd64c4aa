"""Callbacks that every run with rollouts has, unless its trainer has its own."""

from __future__ import annotations

from lightning.pytorch import Callback

from sparse_rl_lightning.callbacks.dry_run import DryRun
from sparse_rl_lightning.callbacks.empty_rollouts import EmptyRollouts
from sparse_rl_lightning.callbacks.preemption import Preemption
from sparse_rl_lightning.callbacks.rank_watch import RankWatch
from sparse_rl_lightning.callbacks.step_guard import StepGuard
from sparse_rl_lightning.callbacks.step_times import StepTimes
from sparse_rl_lightning.callbacks.zero_sharding import ZeroSharding

CALLBACKS: tuple[type[Callback], ...] = (
    DryRun, ZeroSharding, StepTimes, EmptyRollouts, StepGuard, RankWatch, Preemption
)  # fmt: skip
