"""RolloutCheckpoint: Lightning's ModelCheckpoint with defaults that a run can be resumed from."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import Tensor

from sparse_rl_lightning.callbacks.schedules import VALIDATION
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import incomplete, own_folder, recover, remove, swap

EVERY_N_TRAIN_STEPS = 40
"""Optimizer steps between two checkpoints: ten rollouts with the paper's settings."""


class RolloutCheckpoint(ModelCheckpoint):
    """Save what ``--ckpt_path=last`` resumes: the newest checkpoint and ``last.ckpt`` in one fixed folder.

    It is a ModelCheckpoint with other defaults; it takes all other arguments of that class too, including ``monitor``
    and ``save_top_k``. A second run in the same folder replaces the checkpoints of the first. What is due by a metric
    of validation is saved behind the next one, with the weights that were measured.

    Args:
        dirpath: Folder of the checkpoints, default ``checkpoints`` in ``trainer.default_root_dir``.
        every_n_train_steps: Optimizer steps between two checkpoints, default 40 unless ``every_n_epochs`` or
            ``train_time_interval`` is given.
        save_last: Whether ``last.ckpt`` is written beside the newest checkpoint; ``link`` makes it a link.
        enable_version_counter: Whether an existing ``last.ckpt`` is kept and ``last-v1.ckpt`` is written.
        minutes: Minutes after which ``last.ckpt`` is written even if none is due, after an optimizer step, as it is
            behind the last one; null for neither, as without ``save_last``, and with ``every_n_epochs`` or
            ``train_time_interval``.

    Raises:
        ValueError: If ``minutes`` is not above 0, or another checkpoint callback writes the same files.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_train_steps: int | None = None,
        save_last: bool | Literal["link"] = True,
        enable_version_counter: bool = False,
        minutes: float | None = 10.0,
        **options: Any,
    ) -> None:
        check_number("minutes", minutes, above=0, owner="RolloutCheckpoint", or_none=True)
        intervals = (options.get("every_n_epochs"), options.get("train_time_interval"))
        if every_n_train_steps is None and intervals == (None, None):
            every_n_train_steps = EVERY_N_TRAIN_STEPS
        self.minutes = minutes if intervals == (None, None) else None
        self._step, self._saved_at = 0, time.monotonic()  # optimizer steps seen; the last checkpoint
        self._alone_at = self._validated_at = -1  # optimizer steps: of last.ckpt alone, of the newest validation
        self._is_put_off = False  # until the validation behind this step
        if every_n_train_steps and str(options.get("monitor")).startswith(VALIDATION):
            options.setdefault("save_on_train_epoch_end", False)
        super().__init__(
            dirpath=dirpath, every_n_train_steps=every_n_train_steps, save_last=save_last,
            enable_version_counter=enable_version_counter, **options,
        )  # fmt: skip

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determine the folder before Lightning would take the logger's."""
        self.dirpath = checkpoint_folder(self, trainer)
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._check_others(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock: what came before is no training."""
        super().on_train_start(trainer, pl_module)
        self._step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save behind an optimizer step if it is one of those given, or if the last checkpoint is too old."""
        self._is_put_off = self._waits_for_validation(trainer)
        if not self._is_put_off:
            self._save_if_due(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was put off, or is chosen by what was measured."""
        self._validated_at = trainer.global_step
        if self._is_put_off:
            self._is_put_off = False
            self._save_if_due(trainer, pl_module)
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step too if it was not known to be the last, as where a validation has ended training."""
        super().on_train_end(trainer, pl_module)
        if self.minutes is not None and self._alone_at != trainer.global_step:
            self._save_last_alone(trainer)

    def _save_if_due(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        is_new, self._step = trainer.global_step != self._step, trainer.global_step
        if self.minutes is None or not is_new:
            return
        if self._last_global_step_saved == trainer.global_step:
            self._saved_at = time.monotonic()
        waits = self._defer_save_until_validation  # the metric, not the run's last state
        is_due = waits or time.monotonic() - self._saved_at > 60 * self.minutes or _is_last_step(trainer)
        if trainer.world_size > 1:
            is_due = trainer.strategy.broadcast(is_due)
        if is_due:
            self._save_last_alone(trainer)
            self._saved_at = time.monotonic()

    def _waits_for_validation(self, trainer: Trainer) -> bool:
        """Whether a validation follows that decides what is saved, or changes the learning rate."""
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        followed = [schedule.monitor for schedule in schedules if isinstance(schedule, ReduceLROnPlateau)]
        decides = any(str(name).startswith(VALIDATION) for name in (self.monitor, *followed))
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None  # in training
        return decides and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """The metrics, without what an earlier validation has measured of other weights: that is waited for."""
        metrics = super()._monitor_candidates(trainer)
        if str(self.monitor).startswith(VALIDATION) and self._validated_at != trainer.global_step:
            metrics.pop(str(self.monitor), None)
        return metrics

    def _check_others(self, trainer: Trainer) -> None:
        """Refuse another checkpoint callback that writes the same files, and removes them when it has newer ones."""
        for rival in trainer.checkpoint_callbacks:
            if rival is self or not isinstance(rival, ModelCheckpoint) or rival.filename != self.filename:
                continue
            if checkpoint_folder(rival, trainer) == self.dirpath and 0 not in (self.save_top_k, rival.save_top_k):
                raise UserError(
                    f"trainer.callbacks: two checkpoint callbacks write files of the same names to {self.dirpath}, and "
                    "would remove each other's. Give one of them another dirpath or filename."
                )

    def _save_last_alone(self, trainer: Trainer) -> None:
        """Write ``last.ckpt``, and no link; a validation at this step may save another, of its score.

        Lightning goes on to know that it is what was saved last: an older one is not linked in its place.
        """
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._alone_at = trainer.global_step
        save_last, before = self.save_last, self._last_global_step_saved
        self.save_last = bool(save_last)
        try:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        finally:
            self.save_last, self._last_global_step_saved = save_last, before

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Let ``last.ckpt`` lead to another file that is there, at once: Lightning removes the old link before."""
        is_other = os.path.realpath(filepath) != os.path.realpath(linkpath)
        if trainer.is_global_zero and is_other and os.path.exists(filepath):  # it may not have been saved
            new = incomplete(Path(linkpath))
            own_folder(new.parent)
            remove(new)
            os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), new)
            swap(Path(linkpath))
        trainer.strategy.barrier()

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """The paths that ``trainer.fit(ckpt_path="last")`` chooses from; Lightning calls this before ``setup``."""
        self.dirpath = checkpoint_folder(self, trainer)
        if self.dirpath and "://" not in self.dirpath:
            recover(Path(self.dirpath) / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")
        return super()._find_last_checkpoints(trainer)


def _is_last_step(trainer: Trainer) -> bool:
    """Whether training ends behind this optimizer step, as far as the trainer knows by now."""
    ends_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.should_stop or trainer.global_step == trainer.max_steps or ends_epoch


def checkpoint_folder(callback: Callback, trainer: Trainer) -> str | None:
    """The fixed folder that a callback saves checkpoints to, even before ``setup``; None if it has none."""
    dirpath = getattr(callback, "dirpath", None)
    if dirpath or not isinstance(callback, RolloutCheckpoint):
        return str(dirpath) if dirpath else None
    folder = default_folder(trainer.default_root_dir)
    return folder if "://" in folder else os.path.realpath(folder)


def default_folder(root: str | None) -> str:
    """The folder of RolloutCheckpoint in a run's ``trainer.default_root_dir``, by default the working directory."""
    return os.path.join(root or "", "checkpoints")
