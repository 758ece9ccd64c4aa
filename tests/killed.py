"""A process that is killed at a bad moment: nothing of it runs any more, not even ``finally``."""

from __future__ import annotations

import os
from collections.abc import Callable


def killed_at_rename(number: int, work: Callable[[], object]) -> None:
    """Do some work in a fork of this process, which ends before the rename of this number, counted from zero."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    left, rename = number, os.rename

    def counted(*paths: object) -> None:
        nonlocal left
        if not left:
            os._exit(1)
        left -= 1
        rename(*paths)  # type: ignore[arg-type]

    os.rename = counted  # type: ignore[assignment]
    try:
        work()
    finally:
        os._exit(0)
