"""Preemption: a signal ends a run between two optimizer steps, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from itertools import chain, count
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from sparse_rl_lightning.callbacks.guards.log_guard import save_failed
from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS, AgreedExit
from sparse_rl_lightning.callbacks.outputs.checkpoint import checkpoint_folder

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption(Callback):
    """On SIGTERM or SIGUSR1: finish the optimizer step, save ``last.ckpt``, exit with status 0, or 75 if saving failed.

    One rank that gets the signal is enough, all stop after the same step. The final tasks of a training (export,
    report) are skipped; ``--ckpt_path=last`` continues where it stopped. Modules that roll out add this callback
    themselves. In a SLURM job this replaces Lightning's own handling of SIGUSR1, which saves in the middle of a step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._earlier: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers, if this thread can."""
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the last micro-batch of an optimizer step, stop if any rank got a signal."""
        if trainer.fit_loop._should_accumulate():
            return
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        name = "a signal to another rank" if self.received is None else self.received.name
        path = _path_to_write(trainer)
        if path is None:
            rank_zero_warn(f"Stopped on {name} without a checkpoint: no ModelCheckpoint has save_last and a dirpath.")
        else:
            trainer.save_checkpoint(path, weights_only=False)
            if save_failed(trainer):
                rank_zero_warn(
                    f"Stopped on {name} after optimizer step {trainer.global_step}, which could not be saved: the "
                    "warning above says why. --ckpt_path=last then goes on with the checkpoint before it, if any "
                    f"({path})."
                )
                raise AgreedExit(STATUS)
            rank_zero_info(
                f"Stopped on {name} after optimizer step {trainer.global_step}; go on with --ckpt_path=last ({path})."
            )
        raise AgreedExit(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the previous signal handlers."""
        self.on_train_end(trainer, pl_module)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)


def last_path(trainer: Trainer) -> str | None:
    """The path or address of the last checkpoint of the trainer's checkpoint callback, None if there is none."""
    callback = _saves_last(trainer)
    folder = None if callback is None else checkpoint_folder(callback, trainer)
    return folder and os.path.join(folder, f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}")


def _saves_last(trainer: Trainer) -> ModelCheckpoint | None:
    """The first callback that writes a last checkpoint to a folder that is known."""
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    return next((each for each in callbacks if each.save_last and checkpoint_folder(each, trainer)), None)


def _path_to_write(trainer: Trainer) -> str | None:
    """The last checkpoint of this run: with a version counter, that of an earlier run stays and this has a number."""
    path, callback = last_path(trainer), _saves_last(trainer)
    if path is None or callback is None:
        return None
    if callback._enable_version_counter:
        stem, suffix = os.path.splitext(path)
        names = chain([path], (f"{stem}-v{number}{suffix}" for number in count(1)))
        path = next(
            each for each in names if each == callback.last_model_path or not callback.file_exists(each, trainer)
        )
    callback.last_model_path = path  # which a resumed run goes on to write
    return path
