"""Writes whose failure is no reason to end a run."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_warn


class Expendable:
    """Writes what a run can do without: a full disk or a removed folder is told of once, until it is mended.

    Args:
        owner: What writes, for the message.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._is_failing = False

    def __call__(self, write: Callable[[], object]) -> None:
        """Write; the next time is another attempt."""
        try:
            write()
        except OSError as error:
            if not self._is_failing:
                rank_zero_warn(f"{self.owner} cannot be written: {error}. The run goes on.")
            self._is_failing = True
        else:
            self._is_failing = False
