"""Snapshots: policies exported along a run, whose gradients are measured afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from experiments.arms.runs import Run
from sparse_rl_lightning.callbacks import RolloutCallback
from sparse_rl_lightning.callbacks.outputs.export import write_policy


def exporting(run: Run, every_n_rollouts: int) -> Run:
    """The same run, which exports policies besides."""
    snapshots = {"class_path": f"{__name__}.{Snapshots.__name__}", "init_args": {"every_n_rollouts": every_n_rollouts}}
    return replace(run, settings=replace(run.settings, callbacks=(*run.settings.callbacks, snapshots)))


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
