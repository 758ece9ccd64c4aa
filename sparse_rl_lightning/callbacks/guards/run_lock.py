"""RunLock: refuses a second run that would write into the folders of an unfinished one."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from sparse_rl_lightning.callbacks.outputs.checkpoint import checkpoint_folder
from sparse_rl_lightning.checkpoints.lock import FolderLock
from sparse_rl_lightning.errors import UserError


class RunLock(Callback):
    """During ``fit``, keep other runs out of the fixed folders of the trainer's checkpoint callbacks.

    The lock is one of the operating system, held by rank zero, so that it disappears with a killed run; a file system
    without locks gets a warning. All modules add this callback themselves.

    Raises:
        ValueError: On all ranks at the start of ``fit``, if another run is writing there.
    """

    def __init__(self) -> None:
        self._locks: list[FolderLock] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the locks before anything is written."""
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        problem = None
        if trainer.is_global_zero:
            folders = {checkpoint_folder(callback, trainer) or "" for callback in trainer.checkpoint_callbacks} - {""}
            self._locks = [FolderLock(Path(folder)) for folder in sorted(folders) if "://" not in folder]
            try:
                for lock in self._locks:
                    lock.take()
            except ValueError as error:
                problem = str(error)
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            self._release()
            raise UserError(problem)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the locks."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the locks."""
        self._release()

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = []
