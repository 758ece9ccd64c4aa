"""What a calibration found, in a few rows: fixed budgets, the schedule that was picked, and one picked bin by bin."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.tables import Table
from sparse_rl_lightning.budgets import LengthSchedule, ScheduleFile

CHECK = "schedule"  # the rows in which a calibration measured what it had picked
LONGEST = 47  # tokens; hardly any sequence is longer


def table_rows(folder: Path) -> list[dict[str, str]]:
    """A row per budget and bin of lengths, from the folder that ``sparse-rl calibrate`` wrote."""
    return list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))


@dataclass(frozen=True)
class Tails:
    """The 5th percentiles of a calibration by budget and bin of lengths, and its schedule."""

    worst: dict[str, float]  # of the bins up to LONGEST tokens, by budget, CHECK among them
    schedule: LengthSchedule

    @classmethod
    def read(cls, folder: Path) -> Tails:
        """From the folder that ``sparse-rl calibrate`` wrote."""
        worst: dict[str, float] = {}
        for row in table_rows(folder):
            if row["tail"] and int(row["first_length"]) <= LONGEST:
                worst[row["budget"]] = min(worst.get(row["budget"], 1.0), float(row["tail"]))
        return cls(worst, ScheduleFile(str(folder / "schedule.yaml")))


def calibration_table(rising: Tails, free: Tails, entries: Callable[[int | LengthSchedule], float]) -> Table:
    """Worst 5th percentile and entries read per token: fixed budgets, the rising schedule, the free one."""
    table = Table("", ["budget", "entries read per token", "worst 5th percentile"])
    for budget, tail in rising.worst.items():
        if budget != CHECK:
            table.add(f"{budget}, fixed", f"{entries(int(budget)):.1f}", _tail(tail))
    for name, own in (("rising", rising), ("chosen bin by bin", free)):
        spelled = ", ".join(f"{b} from {s}" for s, b in zip(own.schedule.starts, own.schedule.budgets, strict=True))
        table.add(f"{name}: {spelled}", f"{entries(own.schedule):.1f}", _tail(own.worst[CHECK]))
    return table


def _tail(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1g}"
