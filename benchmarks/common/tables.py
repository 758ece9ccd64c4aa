"""Tables in Markdown, and what stands in their cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Table:
    """A titled table with a few words below the title."""

    title: str
    header: Sequence[str]
    note: str = ""
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row."""
        assert len(cells) == len(self.header), (cells, self.header)
        self.rows.append(cells)

    @property
    def untitled(self) -> str:
        """GitHub Markdown for a page that has a title of its own."""
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, *self.rows)]
        lines.insert(1, "|---" * len(self.header) + "|")
        return "\n\n".join([*([self.note] if self.note else []), "\n".join(lines)])

    def __str__(self) -> str:
        """GitHub Markdown."""
        return f"## {self.title}\n\n{self.untitled}"


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Median over the rounds of ``theirs / ours``."""
    return statistics.median(rival / mine for rival, mine in zip(theirs, ours, strict=True))


def met(value: float, goal: float) -> str:
    """Cell of the column "met"."""
    return "yes" if value >= goal else "NO"


def label(dtype: torch.dtype) -> str:
    """Name of a type: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")
