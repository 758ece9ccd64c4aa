"""One behaviour each, switched on by a line under ``trainer.callbacks``."""

from __future__ import annotations

from sparse_rl_lightning.callbacks.acceptance_monitor import AcceptanceMonitor
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.callbacks.completions import CompletionsTable
from sparse_rl_lightning.callbacks.dry_run import DryRun
from sparse_rl_lightning.callbacks.empty_rollouts import EmptyRollouts
from sparse_rl_lightning.callbacks.export import ExportPolicy
from sparse_rl_lightning.callbacks.last_save import LastSave
from sparse_rl_lightning.callbacks.log_guard import LogGuard
from sparse_rl_lightning.callbacks.mismatch_split import MismatchSplit
from sparse_rl_lightning.callbacks.opsm import OPSM
from sparse_rl_lightning.callbacks.preemption import Preemption
from sparse_rl_lightning.callbacks.presets import (
    MIS,
    TIS,
    GeometricTIS,
    IcePop,
    SequenceMaskTIS,
    SequenceMIS,
    SequenceTIS,
)
from sparse_rl_lightning.callbacks.progress import RolloutProgress
from sparse_rl_lightning.callbacks.rank_watch import RankWatch
from sparse_rl_lightning.callbacks.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.reweighting import ImportanceReweighting
from sparse_rl_lightning.callbacks.run_lock import RunLock
from sparse_rl_lightning.callbacks.step_guard import StepGuard
from sparse_rl_lightning.callbacks.step_times import StepTimes
from sparse_rl_lightning.callbacks.summary import RunSummary
from sparse_rl_lightning.callbacks.tail_guard import TailGuard
from sparse_rl_lightning.callbacks.zero_sharding import ZeroSharding

__all__ = [
    "MIS",
    "OPSM",
    "TIS",
    "AcceptanceMonitor",
    "CompletionsTable",
    "DryRun",
    "EmptyRollouts",
    "ExportPolicy",
    "GeometricTIS",
    "IcePop",
    "ImportanceReweighting",
    "LastSave",
    "LogGuard",
    "MismatchSplit",
    "Preemption",
    "RankWatch",
    "RolloutCallback",
    "RolloutProgress",
    "RunLock",
    "RunSummary",
    "SequenceMIS",
    "SequenceMaskTIS",
    "SequenceTIS",
    "SparsityAwareRejection",
    "StepGuard",
    "StepTimes",
    "TailGuard",
    "ZeroSharding",
]
