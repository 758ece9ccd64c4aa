"""RunLock: refuses a second run that would write into the folders of an unfinished one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.callbacks.outputs.checkpoint import checkpoint_folder
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.text import printable


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


HELD = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Keeps other processes out of a folder, which need not exist, by a lock on a hidden file beside it.

    The file stays after release. The lock belongs to the process: children do not inherit it, and a later run of the
    same process may take it again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder.parent / f".{folder.name}.lock"
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock, or warn that the file system has none; it is refused if another process has it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            self._cannot(error)
            return
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = printable(os.pread(descriptor, 200, 0).decode("utf-8", "replace"), 100)
            os.close(descriptor)
            if error.errno not in HELD:
                self._cannot(error)
                return
            raise UserError(
                f"{self.folder} is in use by a run that has not ended ({holder or 'its process is not known'}): two "
                "runs would overwrite each other's checkpoints. Wait for it or end it, or give this run a folder of "
                "its own (trainer.default_root_dir, dirpath of ModelCheckpoint)."
            ) from None
        self._descriptor = descriptor
        with suppress(OSError):  # the disk may be full: it is locked all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _cannot(self, error: OSError) -> None:
        rank_zero_warn(
            f"{self.folder} cannot be locked ({error}): nothing keeps a second run out of it, see that there is none."
        )
