"""Numbers made fit for a chart: fewer points, smoothed lines, round ticks, short labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Points = list[tuple[float, float]]


def smoothed(values: list[float], reach: int) -> list[float]:
    """Mean over up to ``reach`` neighbours on either side, NaN left out."""
    result = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


def thinned(points: Points, most: int, pick: Callable[[list[float]], float]) -> Points:
    """At most ``most`` points: neighbours become one, at their middle, with the value that ``pick`` makes of them."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[len(group) // 2][0], pick([y for _, y in group])) for group in groups]


def mean(values: list[float]) -> float:
    """Of at least one value, without overflow at the end of float's range."""
    return math.fsum(value / len(values) for value in values)


@dataclass(frozen=True)
class Scale:
    """A stretch of an axis and where it lies: ``low`` is drawn at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value is drawn; beyond the ends at the end."""
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        share = (value - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def value_range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Round ends of an axis that holds all values; a linear one begins at 0 unless values are negative."""
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return 10.0**first, 10.0 ** max(last, first + 1)
    low, high = min(0.0, *values), max(0.0, *values)
    if low == high:
        return 0.0, 1.0
    step = round_step((high - low) / 4)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def round_step(least: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def ticks(low: float, high: float, log: bool, most: int = 5) -> list[float]:
    """Round values from one end to the other, at most ``most`` and one."""
    if log:
        first, last = round(math.log10(low)), round(math.log10(high))
        return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / most)))]
    step = round_step((high - low) / most)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [place * step for place in range(first, last + 1)]


def rollout_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Whole numbers."""
    step = math.ceil(round_step(max((high - low) / most, 1.0)))  # 2.5 is no rollout
    return [float(place * step) for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """A number in three digits: ``0.312``, ``48``, ``1,530``, ``1.2e-5``.

    >>> [short(x) for x in (0, 0.25, 0.31249, 48.0, 1530.2, 2.5e7, 0.000012, -3.14159)]
    ['0', '0.25', '0.312', '48', '1,530', '2.5e7', '1.2e-5', '-3.14']
    """
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    if size >= 100:
        return f"{value:,.0f}"
    text = f"{value:.{2 - math.floor(math.log10(size))}f}"
    return text.rstrip("0").rstrip(".")
