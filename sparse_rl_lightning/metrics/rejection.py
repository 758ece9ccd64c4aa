"""How much of a rollout rejection throws away: whole sequences, and tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def rejection_rate(keep: Tensor, mask: Tensor) -> Tensor:
    """Share of sequences of which no token is left.

    Args:
        keep: (B, T) bool, what rejection leaves.
        mask: (B, T) bool, the completions.

    Returns:
        A scalar between 0 and 1.
    """
    rejected, sequences = _count_rejected(keep, mask)
    return rejected / sequences.clamp(min=1)


def token_mask_rate(keep: Tensor, mask: Tensor) -> Tensor:
    """Share of completion tokens that are left out, those of rejected sequences included.

    Args:
        keep: (B, T) bool, what rejection leaves.
        mask: (B, T) bool, the completions.

    Returns:
        A scalar between 0 and 1.
    """
    return (mask & ~keep).sum() / mask.sum().clamp(min=1)


class RejectionRate(Metric):
    """:func:`rejection_rate` over all rollouts seen."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    rejected: Tensor
    sequences: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("rejected", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("sequences", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, keep: Tensor, mask: Tensor) -> None:
        """Add a rollout's ``keep`` (B, T) and completion mask (B, T)."""
        rejected, sequences = _count_rejected(keep, mask)
        self.rejected += rejected
        self.sequences += sequences

    def compute(self) -> Tensor:
        """A number between 0 and 1; 0 before the first sequence."""
        return self.rejected / self.sequences.clamp(min=1)


def _count_rejected(keep: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    present = mask.any(dim=1)
    return (present & ~(keep & mask).any(dim=1)).sum(), present.sum()
