"""The file of a benchmark's cells: written after every cell, read where an interrupted run goes on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import from_json, is_of, whole_file, write_whole
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.text import say


class Results:
    """Cells by method and budget in a JSON file, of one policy, its problems and how it is sampled.

    Args:
        path: The file, which need not be there yet.
        settings: What must be the same for cells to stand in one table, by name.
        num_completions: Number of completions with the full cache.

    Raises:
        ValueError: If the file holds cells of other settings, or is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, str], num_completions: int) -> None:
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "lengths": None, "completions": None, "cells": []}
        try:
            self.content = json.loads(whole_file(path, 2**30)) if path.exists() else self.content
            other = [name for name in settings if self.content["settings"].get(name) != settings[name]]
            cells = [from_json(Cell, own) for own in self.content["cells"]]
            lengths, completions = (self.content[name] or [] for name in ("lengths", "completions"))
            is_whole = (len(lengths), len(completions)) in ((0, 0), (2, num_completions))
            if not is_of([*lengths, *completions], list[int]) or not (is_whole or other):
                raise TypeError("lengths are missing")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not of a benchmark. Choose another --output, or remove it.") from error
        if other:
            raise UserError(f"{path} holds a benchmark with another {', '.join(other)}. Choose another --output.")
        self.cells: dict[tuple[str, int | None], Cell] = {(cell.method, cell.budget): cell for cell in cells}

    def write(self, **content: Any) -> None:
        """Write everything that is known, and ``content`` beside it."""
        self.content |= {**content, "cells": [asdict(cell) for cell in self.cells.values()]}
        write_whole(self.path, json.dumps(self.content, indent=1) + "\n")

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
