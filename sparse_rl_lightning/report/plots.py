"""Panels filled with numbers: the charts of one run, or of several runs together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sparse_rl_lightning.report.measures import CACHES
from sparse_rl_lightning.report.panels import LEARNING, PANELS, Line, Panel, reward_panel
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.text import byte_unit

MOST_POINTS = 400
"""Largest number of points in a line; the lines of several runs share three times as many."""
COLORS = 12
"""Number of lines that are distinguishable in a chart, by color and dashes."""

Points = list[tuple[float, float]]
Named = Sequence[tuple[str, RunRecord]]


@dataclass(frozen=True)
class Series:
    """A named line; ``color`` is ``c`` and its index among the colors, or ``ref`` for a reference."""

    label: str
    points: Points
    color: str

    @property
    def last(self) -> str:
        """The last value, for the legend."""
        return short(self.points[-1][1])


@dataclass(frozen=True)
class Plot:
    """A panel with its numbers, in the panel's unit."""

    panel: Panel
    series: Sequence[Series]
    pale: bool = True  # show the values behind a smoothed line

    def described(self) -> str:
        """The chart in words: ends and extremes of every line."""
        parts = []
        for s in self.series:
            values = [y for _, y in s.points]
            first, last, low, high = map(short, (values[0], values[-1], min(values), max(values)))
            parts.append(f"{s.label}: from {first} to {last}, between {low} and {high}")
        end = max(x for s in self.series for x, _ in s.points)
        return f"{self.panel.title} in {self.panel.unit} up to rollout {end:g}. {'; '.join(parts)}."


def plots_of_run(record: RunRecord) -> list[Plot]:
    """The charts of all numbers that the run has."""
    extra = reward_panel(record)
    panels = [*PANELS[:1], *([extra] if extra else []), *PANELS[1:]]
    return _accuracy_of_run(record) + [plot for panel in panels for plot in _of_run(panel, record)]


def plots_of_runs(records: Named) -> list[Plot]:
    """The charts of all numbers that any of the named runs has; a run keeps its color."""
    accuracies = [plot for cache in CACHES for plot in _accuracy_of_runs(records, cache)]
    return accuracies + [plot for panel in PANELS for plot in _of_runs(panel, records)]


def color(index: int) -> str:
    """The color of the n-th line of a chart."""
    return f"c{index % COLORS}"


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


# ---------------------------------------------------------------- numbers over the rollouts


def _filled(panel: Panel, record: RunRecord) -> list[tuple[Line, Points]]:
    """The lines that have values; a stack keeps only the rollouts that all its lines have, without the first."""
    lines = [(line, values) for line in panel.lines if (values := record.points(line.key, panel.factor))]
    if not panel.stacked or not lines:
        return lines
    common = set.intersection(*({x for x, _ in values} for _, values in lines))
    common -= {min(common)} if len(common) > 2 else set()
    unique = [(line, sorted(dict(values).items())) for line, values in lines]  # an edited file may name one twice
    return [(line, [(x, y) for x, y in values if x in common]) for line, values in unique] if common else []


def _thinned(panel: Panel, values: Points, most: int) -> Points:
    """At most ``most`` points: neighbors become one, at their middle, with their mean or minimum."""
    size = max(1, math.ceil(len(values) / most))
    pick: Callable[[list[float]], float] = min if panel.smallest else fmean
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [(group[len(group) // 2][0], pick([y for _, y in group])) for group in groups]


def _plot(panel: Panel, lines: Sequence[tuple[str, Points, str]], pale: bool = True) -> list[Plot]:
    """A chart of the lines with values, by label, values and color; bytes get the unit that fits the largest."""
    series = [Series(label, values, color) for label, values, color in lines if values]
    if not series:
        return []
    if panel.unit == "bytes":
        largest = max(y for s in series for _, y in s.points)
        unit, factor = byte_unit(largest)
        panel = replace(panel, unit=unit)
        series = [replace(s, points=[(x, y / factor) for x, y in s.points]) for s in series]
    return [Plot(panel, series, pale)]


def _of_run(panel: Panel, record: RunRecord) -> list[Plot]:
    filled = _filled(panel, record)
    if panel.stacked and filled and len(filled[0][1]) < 2:
        return []  # a band needs two points
    places = iter(range(len(filled)))
    lines = [
        (line.label, _thinned(panel, values, MOST_POINTS), "ref" if line.reference else color(next(places)))
        for line, values in filled
    ]
    return _plot(panel, lines)


def _of_runs(panel: Panel, records: Named) -> list[Plot]:
    """The panel's first line, or the sum of a stack; for a tail both lines, because the first may show nothing."""
    if panel.stacked:
        totals = [_total([values for _, values in _filled(panel, record)]) for _, record in records]
        return _together(replace(panel, stacked=False), totals, records)
    plots = []
    for line in panel.lines if panel.log else panel.lines[:1]:
        is_only = len(panel.lines) == 1 or any(extra.reference for extra in panel.lines)
        title = panel.title if is_only else f"{panel.title}: {line.label}"
        by_run = [record.points(line.key, panel.factor) for _, record in records]
        plots += _together(replace(panel, title=title), by_run, records)
    return plots


def _together(panel: Panel, by_run: list[Points], records: Named) -> list[Plot]:
    """One chart with a line per run that has values, none if no run has."""
    most = max(100, 3 * MOST_POINTS // len(records))
    named = enumerate(zip(by_run, records, strict=True))
    lines = [(name, _thinned(panel, values, most), color(index)) for index, (values, (name, _)) in named]
    return _plot(panel, lines, pale=len(records) < 3)


def _total(lines: list[Points]) -> Points:
    return [(column[0][0], sum(y for _, y in column)) for column in zip(*lines, strict=True)]


# ---------------------------------------------------------------- accuracy on held-out problems


def _accuracy_points(record: RunRecord, cache: str) -> Points:
    """The accuracy before training, at validations, and after, by the number of rollouts done."""
    history = record.history or [{"rollout": 0.0}]
    first = history[0].get("rollout", 0.0)
    last = history[-1].get("rollout", len(history) - 1.0) + bool(record.history)
    middle = [(row.get("rollout", math.nan), row.get(cache, math.nan)) for row in record.validation]
    accuracies = [(first, record.before.get(cache, math.nan)), (last, record.after.get(cache, math.nan))]
    accuracies[1:1] = middle if _measure(record) == "accuracy" else []
    return [(x, y) for x, y in accuracies if math.isfinite(x) and math.isfinite(y)]


def _measure(record: RunRecord) -> str:
    """The measure of :func:`_accuracy_points`; validations, which may be alone, always have accuracy."""
    return record.measure if record.before or record.after else "accuracy"


def _accuracy_of_run(record: RunRecord) -> list[Plot]:
    lines = [
        (name, _accuracy_points(record, cache), color(index)) for index, (cache, name) in enumerate(CACHES.items())
    ]
    is_greedy, measure = bool(record.before or record.after), _measure(record)
    return _accuracy(f"Greedy {measure}" if is_greedy else "Validation accuracy", measure, lines)


def _accuracy_of_runs(records: Named, cache: str) -> list[Plot]:
    lines = [(name, _accuracy_points(record, cache), color(index)) for index, (name, record) in enumerate(records)]
    measures = list(dict.fromkeys(_measure(record) for _, record in records))
    return _accuracy(f"Greedy {' or '.join(measures)}, {CACHES[cache]}", measures[0], lines)


def _accuracy(title: str, measure: str, lines: list[tuple[str, Points, str]]) -> list[Plot]:
    caption = "Held-out problems, which are not trained on: greedy before and after, between them validations."
    return _plot(Panel(LEARNING, title, f"mean {measure}", caption, marked=True, pictured=True), lines)
