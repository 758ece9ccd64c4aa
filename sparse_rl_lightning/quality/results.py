"""The file of a benchmark's cells: written after every cell, read where an interrupted run goes on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparse_rl_lightning.files import from_json, is_of
from sparse_rl_lightning.fingerprints import read_results, write_results
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.text import say


class Results:
    """Cells by method and budget in a JSON file, of one policy, its problems and how it is sampled.

    Args:
        path: The file, which need not be there yet.
        settings: What must be the same for cells to stand in one table, by name.

    Raises:
        ValueError: If the file holds cells of other settings, or is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, str]) -> None:
        self.path = path
        self.settings = settings
        self.lengths: list[int] = []  # of whole texts with the full cache: the mean and the largest
        self.completions: list[int] = []  # tokens of each completion with the full cache
        self.cells: dict[tuple[str, int | None], Cell] = {}
        read_results(path, settings, self._take, "Choose another --output, or remove it.")

    def _take(self, content: dict[str, Any]) -> None:
        lengths, completions = content["lengths"], content["completions"]
        if not is_of([*lengths, *completions], list[int]) or len(lengths) != 2 * bool(completions):
            raise TypeError("lengths are missing, or no numbers")
        self.lengths, self.completions = lengths, completions
        cells = [from_json(Cell, values) for values in content["cells"]]
        self.cells = {(cell.method, cell.budget): cell for cell in cells}

    def write(self) -> None:
        """Write everything that is known."""
        cells = [asdict(cell) for cell in self.cells.values()]
        content = {"lengths": self.lengths, "completions": self.completions, "cells": cells}
        write_results(self.path, self.settings, content)

    def find(self, method: str, budget: int | None, fingerprint: str) -> Cell | None:
        """The cell of a method as it is now, if it was measured; a cell with a reason was not."""
        cell = self.cells.get((method, budget))
        if cell is None or cell.reason:
            return None
        if cell.fingerprint != fingerprint:
            say(f"{method}, budget {budget or 'full'}: its row is of other settings or code; it is measured anew.")
            return None
        return cell

    def put(self, cell: Cell) -> Cell:
        """Keep and write a cell."""
        self.cells[cell.method, cell.budget] = cell
        self.write()
        return cell
