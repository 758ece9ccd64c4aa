"""What runs came to, in numbers, and means of them over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.runner.records import Record

MISSING = "–"
ENOUGH = 3  # values for an interval
COLLAPSED = 0.25  # of the accuracy before training
QUANTILES = dict(
    enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179), start=2)
)
"""Of Student's t at 97.5 %, by the number of values; for more, that of the last is taken, which is a little wide."""


@dataclass(frozen=True)
class Outcome:
    """A finished run under one budget: greedy accuracies before and at the end, with both caches."""

    record: Record
    budget: int
    last: int = 3  # evaluations that make the end

    @property
    def dense(self) -> float:
        """With the full cache at the end, mean of the last evaluations."""
        return self.record.end("dense", self.last)

    @property
    def sparse(self) -> float | None:
        """With the compressed cache, if it was judged under that."""
        cache = str(self.budget)
        return self.record.end(cache, self.last) if cache in self.record.evaluations[-1] else None

    def before(self, cache: str) -> float | None:
        """Before training, if it was judged then with this cache."""
        return next((row.get(cache) for row in self.record.evaluations if not row["rollouts"]), None)

    def collapsed(self, before: float | None = None) -> bool:
        """Whether training ruined the policy: with the full cache, less than a quarter of what it could is left."""
        started = self.before("dense") if before is None else before
        return started is not None and self.dense < COLLAPSED * started


Runs = Mapping[int, Outcome]
"""Those of an arm, by seed."""


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean of two values or more (Student's t)."""
    return QUANTILES[min(len(values), max(QUANTILES))] * statistics.stdev(values) / math.sqrt(len(values))


def mean(values: Sequence[float], digits: int = 2, percent: bool = False, signed: bool = False) -> str:
    """Mean ± half the width of its 95 % interval; one or two values as they are, for whom it would say nothing."""
    factor, unit = (100.0, " %") if percent else (1.0, "")
    scaled, form = [factor * value for value in values], f"{'+' if signed else ''}.{digits}f"
    if len(scaled) < ENOUGH:
        return " / ".join(f"{value:{form}}" for value in scaled) + unit
    return f"{statistics.fmean(scaled):{form}} ± {interval(scaled):.{digits}f}{unit}"


def geometric(values: Sequence[float]) -> str:
    """Geometric mean, for numbers that differ by orders of magnitude; 0 if one is."""
    return "0" if 0.0 in values else f"{statistics.geometric_mean(values):.2g}"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Differences by seed, of the seeds that both have."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def points(leads: Mapping[int, float]) -> str:
    """Differences of accuracies in points."""
    return mean([100 * lead for lead in leads.values()], 1, signed=True) if leads else MISSING


def lead(ours: Runs, theirs: Runs, cache: str) -> str:
    """Points by which an arm ends ahead of another, paired by seed: ``dense`` or a budget, under which both are judged.

    A dash where one of them was not.
    """
    ends = (
        {s: run.record.end(cache, run.last) for s, run in runs.items() if cache in run.record.evaluations[-1]}
        for runs in (ours, theirs)
    )
    return points(paired(*ends))
