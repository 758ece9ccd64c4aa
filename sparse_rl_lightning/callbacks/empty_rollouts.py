"""EmptyRollouts: notice that rejection leaves nothing to learn from."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from sparse_rl_lightning.callbacks.base import RolloutCallback, warn_of_run
from sparse_rl_lightning.types import ScoredRollout


class EmptyRollouts(RolloutCallback):
    """Count rollouts of which rejection keeps nothing, on any rank, and warn after some in a row with advice.

    Their policy loss is zero, so that steps on them move weights by momentum, weight decay and the KL penalty only.
    ``empty_rollouts`` is logged, the number so far. Modules that roll out add this callback themselves.

    Args:
        warn_after: Empty rollouts in a row after which to warn, once.

    Raises:
        ValueError: If the number is below 1.
    """

    def __init__(self, warn_after: int = 3) -> None:
        if warn_after < 1:
            raise ValueError(f"EmptyRollouts: warn_after must be at least 1, got warn_after={warn_after}.")
        self.warn_after = warn_after
        self.count = 0
        self.in_a_row = 0

    def on_rollout_scored(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """Count, and warn."""
        keep = scored.rollout.keep
        kept = torch.tensor(0.0 if keep is None else float(keep.sum()), device=scored.rollout.sequences.device)
        if trainer.world_size > 1:
            kept = torch.as_tensor(trainer.strategy.reduce(kept, reduce_op="sum"))
        is_empty = keep is not None and not bool(kept > 0)
        self.in_a_row = self.in_a_row + 1 if is_empty else 0
        self.count += is_empty
        if self.in_a_row == self.warn_after:
            warn_of_run(
                trainer,
                f"Rejection kept no token of the last {self.in_a_row} rollouts, so nothing is learned: the compressed "
                "cache's policy is too far from the dense one. Raise the compressor's budget, lower "
                "SparsityAwareRejection.threshold, or choose another compressor.",
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log with every batch, so that a run resumed in the middle of a rollout has the count too."""
        pl_module.log("empty_rollouts", float(self.count), batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"count": self.count, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.count, self.in_a_row = state_dict["count"], state_dict["in_a_row"]
