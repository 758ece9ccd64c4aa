"""The charts of one run, or of several runs together: panels filled with a record's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparse_rl_lightning.report.panels import (
    LEARNING,
    PANELS,
    Line,
    Panel,
    accuracy_measure,
    accuracy_points,
    points,
    reward_panel,
)
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.scale import Points
from sparse_rl_lightning.report.svg import Plot, Series
from sparse_rl_lightning.report.terminal import CACHES

MOST_POINTS = 400
"""Of a line; of the lines of several runs together three times as many."""
COLORS = 12
"""Lines of a chart that can be told apart, by colour and dashes."""
UNITS = (("GiB", 1024.0**3), ("MiB", 1024.0**2), ("KiB", 1024.0), ("bytes", 1.0))

Plots = list[tuple[str, Plot]]


def plots_of_run(record: RunRecord) -> Plots:
    """Section and chart of everything that the run has numbers for."""
    extra = reward_panel(record)
    panels = [*PANELS[:1], *([extra] if extra else []), *PANELS[1:]]
    drawn = [(panel.section, plot) for panel in panels if (plot := _of_run(panel, record)) is not None]
    greedy = _accuracy_of_run(record)
    return drawn if greedy is None else [(LEARNING, greedy), *drawn]


def plots_of_runs(records: Sequence[tuple[str, RunRecord]]) -> Plots:
    """Section and chart of everything that any of the named runs has numbers for; a run keeps its colour."""
    drawn = [(LEARNING, plot) for cache in CACHES if (plot := _accuracy_of_runs(records, cache)) is not None]
    return drawn + [(panel.section, plot) for panel in PANELS for plot in _of_runs(panel, records)]


def color(place: int) -> str:
    """The style class of the n-th line of a chart."""
    return f"c{place % COLORS}"


def _of_run(panel: Panel, record: RunRecord) -> Plot | None:
    found = panel.found(record)
    if panel.stacked:
        found = _shared(found)
    if not found or (panel.stacked and len(found[0][1]) < 2):
        return None
    places = iter(range(len(found)))
    series = [
        Series(line.label, panel.fewer(values, MOST_POINTS), "ref" if line.reference else color(next(places)))
        for line, values in found
    ]
    series, unit = _in_unit(series, panel.unit)
    return Plot(panel.title, unit, panel.caption, series, log=panel.log, stacked=panel.stacked, exact=panel.exact)


def _of_runs(panel: Panel, records: Sequence[tuple[str, RunRecord]]) -> list[Plot]:
    """The panel's first line, or the sum of a stack; of a tail both lines, because the first may tell nothing."""
    if panel.stacked:
        totals = [_total([values for _, values in _shared(panel.found(record))]) for _, record in records]
        return _together(panel, panel.title, totals, records)
    plots = []
    for line in panel.lines if panel.log else panel.lines[:1]:
        is_only = len(panel.lines) == 1 or any(other.reference for other in panel.lines)
        title = panel.title if is_only else f"{panel.title}: {line.label}"
        plots += _together(panel, title, [points(record, line.key, panel.factor) for _, record in records], records)
    return plots


def _together(panel: Panel, title: str, found: list[Points], records: Sequence[tuple[str, RunRecord]]) -> list[Plot]:
    """One chart with a line per run that has values, none if no run has."""
    most = max(100, 3 * MOST_POINTS // len(records))
    named = zip(found, (name for name, _ in records), strict=True)
    series = [
        Series(name, panel.fewer(values, most), color(place)) for place, (values, name) in enumerate(named) if values
    ]
    if not series:
        return []
    series, unit = _in_unit(series, panel.unit)
    few = len(records) < 3
    return [Plot(title, unit, panel.caption, series, log=panel.log, pale=few, exact=panel.exact)]


def _accuracy_of_run(record: RunRecord) -> Plot | None:
    found = [(name, accuracy_points(record, cache)) for cache, name in CACHES.items()]
    series = [Series(name, values, color(place), marked=True) for place, (name, values) in enumerate(found) if values]
    if not series:
        return None
    measure, count = accuracy_measure(record), f"{record.num_problems} " if record.num_problems else ""
    is_greedy = bool(record.before or record.after)
    parts = [f"Greedy completions of {count}held-out problems, before and after training."] if is_greedy else []
    parts += ["Between them, validations as the run is set to draw."] if is_greedy and record.validation else []
    parts += ["Validations of held-out problems, as the run is set to draw."] if not is_greedy else []
    title = f"Greedy {measure}" if is_greedy else "Validation accuracy"
    return Plot(title, f"mean {measure}", f"{' '.join(parts)} These are not trained on.", series)


def _accuracy_of_runs(records: Sequence[tuple[str, RunRecord]], cache: str) -> Plot | None:
    found = [(place, name, accuracy_points(record, cache)) for place, (name, record) in enumerate(records)]
    series = [Series(name, values, color(place), marked=True) for place, name, values in found if values]
    measures = list(dict.fromkeys(accuracy_measure(record) for _, record in records))
    title = f"Greedy {' or '.join(measures)}, {CACHES[cache]}"
    caption = "Held-out problems, which are not trained on: greedy before and after, between them validations."
    return Plot(title, f"mean {measures[0]}", caption, series) if series else None


def _shared(found: list[tuple[Line, Points]]) -> list[tuple[Line, Points]]:
    """Only rollouts of which all lines are known, so that they can be added up, and not the first, which warms up."""
    common = set.intersection(*({x for x, _ in values} for _, values in found)) if found else set()
    common -= {min(common)} if len(common) > 2 else set()
    return [(line, [(x, y) for x, y in values if x in common]) for line, values in found] if common else []


def _total(lines: list[Points]) -> Points:
    return [(column[0][0], sum(y for _, y in column)) for column in zip(*lines, strict=True)]


def _in_unit(series: list[Series], unit: str) -> tuple[list[Series], str]:
    """Bytes in the unit that fits the largest."""
    if unit != "bytes":
        return series, unit
    largest = max(y for s in series for _, y in s.points)
    name, factor = next((name, factor) for name, factor in UNITS if largest >= factor or factor == 1)
    return [replace(s, points=[(x, y / factor) for x, y in s.points]) for s in series], name
