"""Disks that are full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to make files larger, with an error like that of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullDisk(Callback):
    """Has the system refuse files from an optimizer step on, above a size, and not any more behind its context."""

    def __init__(self, size: int = 4096, first: int = 1, last: int = 99) -> None:
        self.size, self.first, self.last = size, first, last
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        size = self.size if self.first <= trainer.global_step <= self.last else self.limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.limits[1]))

    def lift(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)

    def __enter__(self) -> FullDisk:
        return self

    on_fit_end = on_exception = __exit__ = lift
