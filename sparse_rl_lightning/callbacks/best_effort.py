"""Writes whose failure must not end a run."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_warn


class BestEffortWrite:
    """Turns the failure of a write (full disk, removed folder) into one warning, until writing works again."""

    def __init__(self, owner: str) -> None:
        self.owner = owner  # name of the writer and its file, for the message
        self._is_failing = False

    def __call__(self, write: Callable[[], object]) -> None:
        """Write; a failure does not prevent the next attempt."""
        try:
            write()
        except OSError as error:
            if not self._is_failing:
                rank_zero_warn(f"{self.owner} cannot be written: {error}. The run goes on.")
            self._is_failing = True
        else:
            self._is_failing = False
