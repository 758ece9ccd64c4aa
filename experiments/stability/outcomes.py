"""What a run of ``experiments.stability`` came to, in numbers, and means of them over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from experiments.stability.records import Record

ENOUGH = 3  # values for an interval
COLLAPSED = 0.25  # of the accuracy before training
QUANTILES = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=2))
"""Of Student's t at 97.5 %, by the number of values; for more than ten that of ten is taken, which is a little wide."""
LAST = 3  # evaluations that make the end


@dataclass(frozen=True)
class Outcome:
    """A finished run under one budget: greedy accuracies before and at the end, with both caches."""

    record: Record
    budget: int

    @property
    def dense(self) -> float:
        """With the full cache at the end, mean of the last evaluations."""
        return self.record.end("dense", LAST)

    @property
    def sparse(self) -> float:
        """With the compressed cache."""
        return self.record.end(str(self.budget), LAST)

    def dense_after(self, rollouts: float) -> float:
        """With the full cache, mean of the last evaluations until so many rollouts."""
        return self.record.end("dense", LAST, until=rollouts)

    @property
    def dense_before(self) -> float:
        """With the full cache before training."""
        return self.record.evaluations[0]["dense"]

    @property
    def sparse_before(self) -> float:
        """With the compressed cache before training."""
        return self.record.evaluations[0][str(self.budget)]

    @property
    def collapsed(self) -> bool:
        """Whether training ruined the policy: with the full cache, less than a quarter of what it could is left."""
        return self.dense < COLLAPSED * self.dense_before


def fall(evaluations: Sequence[dict[str, float]], below: float) -> tuple[int, int] | None:
    """Rollouts at the last evaluation before the accuracy fell below a share of its best, and at the first after."""
    best = 0.0
    for before, row in pairwise(evaluations):
        best = max(best, before["dense"])
        if row["dense"] < below * best:
            return int(before["rollouts"]), int(row["rollouts"])
    return None


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


def curve_band(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, least and largest of curves, point by point, as far as the shortest goes."""
    points = list(zip(*curves, strict=False))
    return [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]
