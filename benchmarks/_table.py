"""What benchmarks of this folder share: the table, the line that says where it was measured, the file it goes to."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sparse_rl_lightning import ops

PACKAGES = ("torch", "transformers", "sparse-rl-lightning")


@dataclass
class Table:
    """A titled table with a few words below the title."""

    title: str
    header: Sequence[str]
    note: str = ""
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """One more row."""
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


def median_ratio(theirs: Sequence[float], own: Sequence[float]) -> float:
    """Median over the rounds of their time over the own time."""
    return statistics.median(other / mine for other, mine in zip(theirs, own, strict=True))


def met(value: float, goal: float) -> str:
    """The column that says whether a goal was reached."""
    return "yes" if value >= goal else "NO"


def machine(device: str) -> str:
    """Date, machine and versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    where = f"{model} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads{gpu}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    native = "kernels" if ops.has_kernel("decode_attention", device) else "PyTorch reference"
    return f"{datetime.date.today()}, {where}, {versions}, own ops: {native}"


def save(folder: Path, name: str, title: str, text: str) -> None:
    """Write a page of tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"# {title}\n\n{text}\n", encoding="utf-8")
