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
        self._locks: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the locks before anything is written."""
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        problem = None
        if trainer.is_global_zero:
            folders = {checkpoint_folder(callback, trainer) or "" for callback in trainer.checkpoint_callbacks} - {""}
            try:
                for folder in sorted(folders):
                    if "://" not in folder and (descriptor := lock(Path(folder))) is not None:
                        self._locks.append(descriptor)
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
        while self._locks:
            os.close(self._locks.pop())


HELD = (errno.EACCES, errno.EAGAIN)


def lock_file(folder: Path) -> Path:
    """The file whose lock is a folder's, hidden beside it, which stays after release."""
    return folder.parent / f".{folder.name}.lock"


def lock(folder: Path) -> int | None:
    """Keep other processes out of a folder, which need not exist, until the descriptor is closed.

    The lock belongs to the process: children do not inherit it (as they would flock's, which filelock takes), and a
    later run of the same process may take it again. None, and a warning, where the file system has no locks.

    Raises:
        ValueError: If another process has it.
    """
    path = lock_file(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        _warn(folder, error)
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = printable(os.pread(descriptor, 200, 0).decode("utf-8", "replace"), 100)
        os.close(descriptor)
        if error.errno not in HELD:
            _warn(folder, error)
            return None
        raise UserError(
            f"{folder} is in use by a run that has not ended ({holder or 'its process is not known'}): two runs would "
            "overwrite each other's checkpoints. Wait for it or end it, or give this run a folder of its own "
            "(trainer.default_root_dir, dirpath of ModelCheckpoint)."
        ) from None
    with suppress(OSError):  # the disk may be full: it is locked all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _warn(folder: Path, error: OSError) -> None:
    rank_zero_warn(
        f"{folder} cannot be locked ({error}): nothing keeps a second run out of it, see that there is none."
    )
