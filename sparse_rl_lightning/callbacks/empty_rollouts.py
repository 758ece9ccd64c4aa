"""EmptyRollouts: notice that rejection leaves nothing, or little, to learn from."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from sparse_rl_lightning.callbacks.base import RolloutCallback, warn_of_run
from sparse_rl_lightning.types import Rollout, ScoredRollout


class EmptyRollouts(RolloutCallback):
    """Count rollouts of which rejection keeps nothing, on any rank, and warn where little is kept, with advice.

    A policy that learns from the few samples that are left can lose in a few steps what it knew. Steps on nothing have
    a policy loss of zero, so momentum, weight decay and the KL penalty alone move the weights. ``empty_rollouts`` is
    logged, the number so far. Modules that roll out add this callback themselves.

    Args:
        warn_after: Rollouts in a row after which to warn, once of empty ones and once of those with little.
        little: Share of completion tokens; a rollout that keeps less has little.

    Raises:
        ValueError: If the number is below 1, or the share not between 0 and 1.
    """

    def __init__(self, warn_after: int = 3, little: float = 0.5) -> None:
        if warn_after < 1:
            raise ValueError(f"EmptyRollouts: warn_after must be at least 1, got warn_after={warn_after}.")
        if not 0 <= little <= 1:
            raise ValueError(f"EmptyRollouts: little must be between 0 and 1, got little={little}.")
        self.warn_after, self.little = warn_after, little
        self.count = 0
        self.in_a_row = 0
        self.little_in_a_row = 0

    def on_rollout_scored(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """Count, and warn."""
        kept = _share_kept(trainer, scored.rollout)
        self.in_a_row = self.in_a_row + 1 if kept == 0 else 0
        self.little_in_a_row = self.little_in_a_row + 1 if kept < self.little else 0
        self.count += kept == 0
        if self.in_a_row == self.warn_after:
            self._warn(trainer, "no token", "the steps on them follow nothing but momentum, weight decay and penalty")
        elif self.little_in_a_row == self.warn_after:
            few = f"less than {self.little:.0%} of the tokens"
            self._warn(trainer, few, "what is left can ruin the policy: watch its accuracy with the full cache")

    def _warn(self, trainer: Trainer, kept: str, so: str) -> None:
        warn_of_run(
            trainer,
            f"Rejection kept {kept} of each of the last {self.warn_after} rollouts; {so}. The compressed cache's "
            "policy is too far from the dense one. Stop and raise the compressor's budget, choose another compressor, "
            "or train with ReplayGRPO.",
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log with every batch, so that a run resumed in the middle of a rollout has the count too."""
        pl_module.log("empty_rollouts", float(self.count), batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"count": self.count, "in_a_row": self.in_a_row, "little_in_a_row": self.little_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.count, self.in_a_row = state_dict["count"], state_dict["in_a_row"]
        self.little_in_a_row = state_dict.get("little_in_a_row", 0)  # not in older checkpoints


def _share_kept(trainer: Trainer, rollout: Rollout) -> float:
    """Tokens that have a loss over completion tokens, of all ranks."""
    if rollout.keep is None:
        return 1.0
    mask = rollout.completion_mask
    counts = torch.stack([(rollout.keep & mask).sum(), mask.sum()]).float()
    if trainer.world_size > 1:
        counts = torch.as_tensor(trainer.strategy.reduce(counts, reduce_op="sum"))
    return float(counts[0] / counts[1].clamp(min=1))
