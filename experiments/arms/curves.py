"""What the runs of the comparison found: tables of their ends."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.common.tables import Table
from experiments.arms.runs import Arm, Run

LAST = 3  # evaluations that the tables average
COMPRESSION = "mismatch_split/compression/kl_k3"
ROUNDING = "mismatch_split/rounding/kl_k3"


@dataclass(frozen=True)
class Found:
    """The numbers of a finished run."""

    run: Run
    course: dict[str, Any]
    report: dict[str, Any]

    @classmethod
    def read(cls, run: Run) -> Found:
        """From the run's folder."""
        course, report = (
            json.loads((run.folder / name).read_text(encoding="utf-8")) for name in ("course.json", "summary.json")
        )
        return cls(run, course, report)

    def curve(self, cache: str) -> tuple[list[float], list[float]]:
        """Rollouts and greedy accuracies; the cache is ``dense`` or a budget."""
        rows = self.course["evaluations"]
        return [row["rollouts"] for row in rows], [row[cache] for row in rows]

    def end(self, cache: str) -> float:
        """Mean accuracy of the last evaluations."""
        return _mean(self.curve(cache)[1][-LAST:])

    def column(self, name: str) -> list[float]:
        """One number per rollout."""
        return [math.nan if row.get(name) is None else row[name] for row in self.report["history"]]

    def logged(self, name: str) -> list[float]:
        """What the run's logger has of a number, step by step.

        A resumed run has several files, and a later one says again what its checkpoint had not yet.
        """
        found = {int(row["step"]): float(row[name]) for row in self._log if row.get(name)}
        return [found[step] for step in sorted(found)]

    @cached_property
    def _log(self) -> list[dict[str, str]]:
        """Every line of the logger's files; read once, because many tables ask."""
        files = sorted(self.run.folder.rglob("version_*/metrics.csv"), key=lambda p: int(p.parent.name[8:]))
        return [row for path in files for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())]

    def split(self) -> tuple[list[float], list[float]]:
        """Rollouts, and how far compression moves the policy, as k3."""
        rows = [row for row in self.course["splits"] if math.isfinite(row[COMPRESSION])]
        return [row["rollouts"] for row in rows], [row[COMPRESSION] for row in rows]

    @property
    def minutes(self) -> float:
        """Wall time of training without the evaluations of the comparison."""
        return float(self.report["summary"]["wall_time_seconds"] - self.course["seconds"]) / 60


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _late(values: Sequence[float]) -> float:
    """Mean of the last quarter."""
    return _mean(values[-max(1, len(values) // 4) :])


COLUMNS: dict[str, Callable[[Found, int], str]] = {
    "full cache": lambda found, _: f"{found.end('dense'):.3f}",
    "compressed cache": lambda found, budget: f"{found.end(str(budget)):.3f}",
    "sequences rejected": lambda found, _: f"{_mean(found.column('rejection_rate')):.1%}",
    "tokens without weight": lambda found, _: f"{_mean(found.course['unused']):.1%}",
    "compression k3": lambda found, _: f"{_late(found.split()[1]):.2g}",
    "clipped": lambda found, _: f"{_mean(found.course['clipped']):.1%}",
    "minutes": lambda found, _: f"{found.minutes:.1f}",
}


def cells(found: Sequence[Found], budget: int) -> list[str]:
    """One per column, the seeds of an arm behind each other."""
    return [" / ".join(value(one, budget) for one in found) for value in COLUMNS.values()]


def of(found: Sequence[Found], arm: Arm, budget: int) -> list[Found]:
    """The runs of an arm that say something about a budget, one per seed."""
    return [one for one in found if one.run.arm == arm and budget in one.run.budgets]


def sampled(found: Sequence[Found], budgets: Sequence[int]) -> list[int]:
    """The budgets that some run has sampled under."""
    return [budget for budget in budgets if any(one.run.budget == budget for one in found)]


def table(title: str, found: Sequence[Found], arms: Sequence[Arm], budgets: Sequence[int], note: str) -> Table:
    """Finished arms by columns, one block of rows per budget, the policy before training first."""
    result = Table(title, ["budget", "", *COLUMNS], note)
    for budget in sampled(found, budgets):
        for started in [one for one in found if budget in one.run.budgets][:1]:
            first = [f"{started.curve(cache)[1][0]:.3f}" for cache in ("dense", str(budget))]
            result.add(str(budget), "before training", *first, *["–"] * (len(COLUMNS) - len(first)))
        for arm in arms:
            own = of(found, arm, budget)
            if own:
                result.add(str(budget), arm.label, *cells(own, budget))
    return result
