"""Policies along a run: exported while it trains, chosen by what became of it, their gradients measured afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from sparse_rl_lightning.callbacks import RolloutCallback
from sparse_rl_lightning.callbacks.outputs.export import write_policy

FALLEN = 0.6  # of the best accuracy so far


def before_the_fall(evaluations: Sequence[dict[str, float]]) -> int | None:
    """Rollouts at the last evaluation before accuracy fell below FALLEN of its best; None if it never did."""
    best, earlier = 0.0, None
    for row in evaluations:
        if row["dense"] < FALLEN * best:
            return earlier
        best, earlier = max(best, row["dense"]), int(row["rollouts"])
    return None


class Snapshots(RolloutCallback):
    """Export the policy before every n-th rollout and at the end, to ``policies/{rollouts}``.

    Args:
        every_n_rollouts: Distance of two exports.
    """

    def __init__(self, every_n_rollouts: int = 20) -> None:
        self.every_n_rollouts = every_n_rollouts

    def on_rollout_start(self, trainer: Trainer, module: LightningModule, rows: list[dict[str, Any]]) -> None:
        """Export, if it is time."""
        number: Any = module.num_rollouts
        if number % self.every_n_rollouts == 0:
            self._export(trainer, module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export what training came to."""
        self._export(trainer, pl_module)

    def _export(self, trainer: Trainer, module: LightningModule) -> None:
        number: Any = module.num_rollouts
        folder = Path(trainer.default_root_dir) / "policies"
        folder.mkdir(parents=True, exist_ok=True)
        write_policy(module, folder / f"{number:04d}")
