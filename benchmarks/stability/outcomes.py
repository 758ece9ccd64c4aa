"""What a run of ``benchmarks.stability`` came to, in numbers, and means of them over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arms.curves import COMPRESSION, Found
from sparse_rl_lightning.report.charts import smoothed

ENOUGH = 3  # values for an interval
COLLAPSED = 0.25  # of the accuracy before training
QUANTILES = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=2))
"""Of Student's t at 97.5 %, by the number of values; for more than ten that of ten is taken, which is a little wide."""


@dataclass(frozen=True)
class Outcome:
    """A finished run under one budget in numbers; shares unless said otherwise."""

    dense: float  # greedy accuracy with the full cache at the end
    sparse: float  # the same with the compressed cache
    dense_before: float
    sparse_before: float
    saved: float  # of the KV tokens, at the end of a sequence
    rejected: float  # sequences
    clipped: float  # tokens whose gradient the clip of the staleness ratio stops
    k3: float  # nats per token from the dense to the compressed policy, median of the last quarter of the rollouts
    p05: float  # 5th percentile of the acceptance between the two, the same
    minutes: float  # of training, without the evaluations of the comparison

    @property
    def collapsed(self) -> bool:
        """Whether training ruined the policy: with the full cache, less than a quarter of what it could is left."""
        return self.dense < COLLAPSED * self.dense_before

    @classmethod
    def of(cls, found: Found, budget: int) -> Outcome:
        """Read off a finished run."""
        evaluations, evicts = found.course["evaluations"], found.run.arm.evicts
        splits = [row[COMPRESSION] for row in found.course["splits"]]
        return cls(
            dense=evaluations[-1]["dense"], sparse=evaluations[-1][str(budget)],
            dense_before=evaluations[0]["dense"], sparse_before=evaluations[0][str(budget)],
            saved=found.report["summary"]["kv_saving_final"],
            rejected=_mean(found.column("rejection_rate")), clipped=_mean(found.course["clipped"]),
            k3=_late_median(splits) if evicts else 0.0,
            p05=_late_median(found.logged("acceptance/p05")) if evicts else 1.0,
            minutes=found.minutes,
        )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def _late_median(values: Sequence[float]) -> float:
    """Median of the last quarter, which bears a k3 without bounds; NaN where nothing was measured."""
    late = values[-max(1, len(values) // 4) :]
    return statistics.median(math.inf if math.isnan(value) else value for value in late) if late else math.nan


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
    """Mean, least and largest of curves, point by point, as far as the shortest goes; long ones are smoothed."""
    smooth = [smoothed(curve, 1 + len(curve) // 24) if len(curve) > 24 else curve for curve in curves]
    points = list(zip(*smooth, strict=False))
    return [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]
