"""One run at a time in a folder: a lock of the operating system, released whenever and however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.text import printable

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
