"""RolloutCheckpoint: Lightning's ModelCheckpoint with defaults that a run can be resumed from."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from sparse_rl_lightning.callbacks.schedules import follows_validation, is_of_validation
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import incomplete, own_folder, recover, remove, swap

EVERY_N_TRAIN_STEPS = 40
"""Optimizer steps between two checkpoints: ten rollouts with the paper's settings."""


class RolloutCheckpoint(ModelCheckpoint):
    """Save what ``--ckpt_path=last`` resumes: the newest checkpoint and ``last.ckpt`` in one fixed folder.

    It is a ModelCheckpoint with other defaults; it takes all other arguments of that class too, including ``monitor``
    and ``save_top_k``. A second run in the same folder replaces the checkpoints of the first. With a metric of
    validation as ``monitor``, every validation saves what it has measured, unless ``every_n_epochs`` is given, and
    ``every_n_train_steps`` is about ``last.ckpt``.

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
        ValueError: If ``minutes`` is not above 0, ``train_time_interval`` is given for a ``monitor`` that only
            validations measure, or another checkpoint callback writes files of the same names.
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
        self.last_every: int | None = None  # optimizer steps between two last.ckpt beside what validations save
        if is_of_validation(options.get("monitor")):
            if options.get("train_time_interval"):
                raise UserError(
                    f"RolloutCheckpoint: validations measure monitor={options['monitor']!r}, and train_time_interval "
                    "would save other weights. Leave it out: every validation saves."
                )
            options.setdefault("save_on_train_epoch_end", False)
            if every_n_train_steps and options.get("every_n_epochs") is None:
                self.last_every, every_n_train_steps = every_n_train_steps, None
                options["every_n_epochs"] = 1
        self._step, self._saved_at = 0, time.monotonic()  # optimizer steps seen; the last checkpoint
        self._last_at = -1  # optimizer step of last.ckpt
        self._files: set[str] = set()  # saved since the newest optimizer step
        super().__init__(
            dirpath=dirpath, every_n_train_steps=every_n_train_steps, save_last=save_last,
            enable_version_counter=enable_version_counter, **options,
        )  # fmt: skip

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determine the folder before Lightning would take the logger's."""
        self.dirpath = checkpoint_folder(self, trainer)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse another checkpoint callback that would remove this one's files, or has its own removed."""
        super().on_fit_start(trainer, pl_module)
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        for rival in (each for each in savers if each is not self):
            is_alike = (rival.dirpath, rival.filename) == (self.dirpath, self.filename)
            if is_alike and rival.save_top_k and self.save_top_k and max(rival.save_top_k, self.save_top_k) > 0:
                raise UserError(
                    f"trainer.callbacks: two checkpoint callbacks write files of the same names to {self.dirpath}, and "
                    "would remove each other's. Give one of them another dirpath or filename."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock: what came before is no training."""
        super().on_train_start(trainer, pl_module)
        self._step, self._saved_at = trainer.global_step, time.monotonic()
        self._last_at, self._files = trainer.global_step, set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save behind an optimizer step if it is one of those given, or if the last checkpoint is too old."""
        is_new, self._step = trainer.global_step != self._step, trainer.global_step
        self._files = set() if is_new else self._files
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not is_new or (self.minutes is None and self.last_every is None):
            return
        if self._last_global_step_saved == trainer.global_step:
            self._saved_at = time.monotonic()
        is_due = self.last_every is not None and not trainer.global_step % self.last_every
        if self.minutes is not None:
            is_due |= time.monotonic() - self._saved_at > 60 * self.minutes or _is_last_step(trainer)
        if trainer.world_size > 1:
            is_due = trainer.strategy.broadcast(is_due)
        if is_due and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_alone(trainer)
            self._saved_at = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was measured, and again what was saved before it if it may have changed the learning rate."""
        earlier, self._files = self._files, set()
        super().on_validation_end(trainer, pl_module)
        # a resumed run does not repeat a validation, unless batches lie between that and the checkpoint
        if follows_validation(trainer) and not trainer.fit_loop._should_accumulate():
            for path in sorted(earlier - self._files):
                if self.file_exists(path, trainer):
                    self._save_checkpoint(trainer, path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step too if it was not known to be the last, as where a validation has ended training."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it where no type says so
            return
        super().on_train_end(trainer, pl_module)
        is_whole = not trainer.fit_loop._should_accumulate()
        if self.minutes is not None and self._last_at != trainer.global_step and is_whole:
            self._save_last_alone(trainer)

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        """Where Lightning does, and between two optimizer steps, when a part of a gradient would be lost."""
        return super()._should_skip_saving_checkpoint(trainer) or trainer.fit_loop._should_accumulate()

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._files.add(filepath)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        super()._save_last_checkpoint(trainer, monitor_candidates)
        self._last_at = trainer.global_step

    def _save_last_alone(self, trainer: Trainer) -> None:
        """Write ``last.ckpt``, and no link; a validation at this step may save another, of its score.

        Lightning goes on to know that it is what was saved last: an older one is not linked in its place.
        """
        if not self.save_last:
            return
        save_last, before = self.save_last, self._last_global_step_saved
        self.save_last = True
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
