"""What a run of benchmarks/stability.py came to, in numbers, and means of them over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _curves import Found

from sparse_rl_lightning.report.charts import smoothed

COLLAPSED = 0.5  # of the best reward of the run, or of the policy it began with; one that ends below it has collapsed
WINDOW = 20  # rollouts that a reward is averaged over
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's t at 97.5 %, by the number of seeds


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
    k3: float  # nats per token from the dense to the sampling policy, median of the last quarter of the rollouts
    p05: float  # 5th percentile of the acceptance, the same
    reward: float  # mean of the last rollouts
    best: float  # the best mean of as many rollouts in a row
    minutes: float  # of training, without the evaluations of the comparison

    @property
    def collapsed(self) -> bool:
        """Whether the reward fell and did not come back."""
        return self.reward < COLLAPSED * self.best

    @classmethod
    def of(cls, found: Found, budget: int) -> Outcome:
        """Read off a finished run."""
        rewards, evaluations = found.column("reward"), found.course["evaluations"]
        window = min(WINDOW, max(1, len(rewards) // 4))
        means = [statistics.fmean(rewards[i : i + window]) for i in range(len(rewards) - window + 1)]
        evicts = found.run.arm.evicts
        return cls(
            dense=found.end("dense"), sparse=found.end(str(budget)),
            dense_before=evaluations[0]["dense"], sparse_before=evaluations[0][str(budget)],
            saved=found.report["summary"]["kv_saving_final"],
            rejected=_mean(found.column("rejection_rate")), clipped=_mean(found.course["clipped"]),
            k3=_late(found.column("mismatch/kl_k3")) if evicts else 0.0,
            p05=_late(found.logged("acceptance/p05")) if evicts else 1.0,
            reward=means[-1], best=max(means), minutes=found.minutes,
        )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def _late(values: Sequence[float]) -> float:
    """Median of what the last quarter has; a median, because k3 of a collapsed policy has no bounds."""
    known = [value for value in values[-max(1, len(values) // 4) :] if math.isfinite(value)]
    return statistics.median(known) if known else math.nan


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean (Student's t); NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return QUANTILES[min(len(values), max(QUANTILES))] * statistics.stdev(values) / math.sqrt(len(values))


def mean(values: Sequence[float], digits: int = 2, percent: bool = False) -> str:
    """Mean ± half the width of its 95 % confidence interval, which two values or more have."""
    factor, sign = (100.0, " %") if percent else (1.0, "")
    scaled = [factor * value for value in values]
    text = f"{statistics.fmean(scaled):.{digits}f}"
    width = interval(scaled)
    return (text if math.isnan(width) else f"{text} ± {width:.{digits}f}") + sign


def geometric(values: Sequence[float]) -> str:
    """Geometric mean of positive numbers, for those that differ by orders of magnitude."""
    if not all(value > 0.0 for value in values):
        return f"{statistics.fmean(values):.2g}"
    return f"{statistics.geometric_mean(values):.2g}"


def curve_band(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, least and largest of smoothed curves, point by point, as far as the shortest goes."""
    smooth = [smoothed(curve, 1 + len(curve) // 24) for curve in curves]
    points = list(zip(*smooth, strict=False))
    return [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]


Value = Callable[[Outcome], float]
