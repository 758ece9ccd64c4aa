"""Sparse-RL Lightning: reinforcement learning of language models on rollouts with an evicted KV cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_rl_lightning.modules import DistillSparse, Evaluation, ReplayGRPO, SparseGRPO, SupervisedWarmup
    from sparse_rl_lightning.records import Rollout
    from sparse_rl_lightning.replay import replay_logprobs
    from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams

__version__ = "0.3.0.dev0"

__all__ = [
    "DistillSparse",
    "Evaluation",
    "ReplayGRPO",
    "Rollout",
    "RolloutSampler",
    "SamplingParams",
    "SparseGRPO",
    "SupervisedWarmup",
    "__version__",
    "replay_logprobs",
]

_HOMES = {
    "DistillSparse": "modules",
    "Evaluation": "modules",
    "ReplayGRPO": "modules",
    "Rollout": "records",
    "RolloutSampler": "rollout",
    "SamplingParams": "rollout",
    "SparseGRPO": "modules",
    "SupervisedWarmup": "modules",
    "replay_logprobs": "replay",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: torch and transformers take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
