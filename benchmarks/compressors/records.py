"""What was measured on each task: a line of JSON in a file of the repository, enough for all tables and the picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import kept
from benchmarks.compressors.quality import Quality


@dataclass(frozen=True)
class Measured:
    """Every compressor on one task."""

    task: str
    about: str  # texts and model
    machine: str  # and what else it did
    qualities: list[Quality]


def read(path: Path) -> dict[str, Measured]:
    """By task; empty if there is no file yet."""
    lines = [{**line, "qualities": [_quality(quality) for quality in line["qualities"]]} for line in kept.read(path)]
    return {line["task"]: Measured(**line) for line in lines}


def write(path: Path, measured: Iterable[Measured]) -> None:
    """A line per task, five digits of every number, null where there is none."""
    kept.write(path, ({**asdict(task), "qualities": [_fields(q) for q in task.qualities]} for task in measured))


def _fields(quality: Quality) -> dict[str, Any]:
    values = asdict(quality)
    numbers = {name: float(f"{value:.5g}") for name, value in values.items() if isinstance(value, float)}
    return values | {name: None if math.isnan(number) else number for name, number in numbers.items()}


def _quality(values: dict[str, Any]) -> Quality:
    return Quality(**{name: math.nan if value is None else value for name, value in values.items()})
