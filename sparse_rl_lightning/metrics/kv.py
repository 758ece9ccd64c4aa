"""How much of a full KV cache the rollouts did without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from sparse_rl_lightning.records import KVUsage


class KVSaving(Metric):
    """Share of KV tokens not stored: ``final`` at the end of the sequences, ``integral`` over all decode steps.

    Token counts add up first and are divided last, so long sequences weigh more, as they do in memory. One
    rollout's numbers are the properties of :class:`~sparse_rl_lightning.records.KVUsage`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    stored: Tensor
    full: Tensor
    stored_integral: Tensor
    full_integral: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("stored", "full", "stored_integral", "full_integral"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, usage: KVUsage) -> None:
        """Add what one rollout held."""
        self.stored += usage.stored.double().sum()
        self.full += usage.full.double().sum()
        self.stored_integral += usage.stored_integral.double().sum()
        self.full_integral += usage.full_integral.double().sum()

    def compute(self) -> dict[str, Tensor]:
        """``final`` and ``integral``, shares of the full cache's tokens; 0 where a full cache would hold nothing."""
        return {
            "final": _saving(self.stored, self.full),
            "integral": _saving(self.stored_integral, self.full_integral),
        }


def _saving(stored: Tensor, full: Tensor) -> Tensor:
    return torch.where(full > 0, 1 - stored / full, 0.0)
