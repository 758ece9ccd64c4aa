"""One behavior each, switched on by a line under ``trainer.callbacks``."""

from __future__ import annotations

from sparse_rl_lightning.callbacks.base import CorrectionCallback, RolloutCallback
from sparse_rl_lightning.callbacks.corrections.centering import ScoreCentering
from sparse_rl_lightning.callbacks.corrections.presets import (
    CIS,
    MIS,
    TIS,
    GeometricTIS,
    IcePop,
    SequenceMaskTIS,
    SequenceMIS,
    SequenceTIS,
)
from sparse_rl_lightning.callbacks.corrections.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.corrections.reweighting import ImportanceReweighting
from sparse_rl_lightning.callbacks.corrections.support import SamplerSupport
from sparse_rl_lightning.callbacks.guards.dry_run import DryRun
from sparse_rl_lightning.callbacks.guards.empty_rollouts import EmptyRollouts
from sparse_rl_lightning.callbacks.guards.log_guard import LastSave, LogGuard
from sparse_rl_lightning.callbacks.guards.preemption import Preemption
from sparse_rl_lightning.callbacks.guards.rank_watch import RankWatch
from sparse_rl_lightning.callbacks.guards.run_lock import RunLock
from sparse_rl_lightning.callbacks.guards.step_guard import StepGuard
from sparse_rl_lightning.callbacks.guards.tail_guard import TailGuard
from sparse_rl_lightning.callbacks.monitors.acceptance import AcceptanceMonitor
from sparse_rl_lightning.callbacks.monitors.mismatch_split import MismatchSplit
from sparse_rl_lightning.callbacks.monitors.step_times import StepTimes
from sparse_rl_lightning.callbacks.outputs.checkpoint import RolloutCheckpoint
from sparse_rl_lightning.callbacks.outputs.completions import CompletionsTable
from sparse_rl_lightning.callbacks.outputs.export import ExportPolicy
from sparse_rl_lightning.callbacks.outputs.progress import RolloutProgress
from sparse_rl_lightning.callbacks.outputs.summary import RunSummary
from sparse_rl_lightning.callbacks.schedules import FollowValidation
from sparse_rl_lightning.callbacks.sharding import ZeroSharding

__all__ = [
    "CIS",
    "MIS",
    "TIS",
    "AcceptanceMonitor",
    "CompletionsTable",
    "CorrectionCallback",
    "DryRun",
    "EmptyRollouts",
    "ExportPolicy",
    "FollowValidation",
    "GeometricTIS",
    "IcePop",
    "ImportanceReweighting",
    "LastSave",
    "LogGuard",
    "MismatchSplit",
    "Preemption",
    "RankWatch",
    "RolloutCallback",
    "RolloutCheckpoint",
    "RolloutProgress",
    "RunLock",
    "RunSummary",
    "SamplerSupport",
    "ScoreCentering",
    "SequenceMIS",
    "SequenceMaskTIS",
    "SequenceTIS",
    "SparsityAwareRejection",
    "StepGuard",
    "StepTimes",
    "TailGuard",
    "ZeroSharding",
]
