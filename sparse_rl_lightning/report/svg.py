"""Charts as SVG elements without a library: a few kilobytes each, coloured by the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparse_rl_lightning.report.html import text
from sparse_rl_lightning.report.scale import Points, Scale, rollout_ticks, short, smoothed, ticks, value_range

WIDTH, HEIGHT, TOP, BOTTOM, RIGHT = 400.0, 210.0, 8.0, 34.0, 10.0
DIGIT = 7.7
"""Width of a digit in the labels' type size, in the widest of the usual fonts."""
SMOOTHED_FROM = 8
"""Points from which on a bold line is a mean over neighbours and the values stand pale behind it."""


@dataclass(frozen=True)
class Series:
    """A named line; ``color`` is a class of the style sheet, such as ``c0``."""

    label: str
    points: Points
    color: str
    marked: bool = False  # few points that matter each: dots with their values


@dataclass(frozen=True)
class Plot:
    """Everything one chart needs; values as they are shown, in ``unit``."""

    title: str
    unit: str
    caption: str
    series: Sequence[Series] = field(default_factory=tuple)
    log: bool = False
    stacked: bool = False
    pale: bool = True  # show the values behind a smoothed line
    exact: bool = False  # do not smooth


def figure(plot: Plot) -> str:
    """A chart with title, unit, legend and explanation as one HTML element."""
    legend = "".join(
        f'<li class="{s.color}"><i></i>{text(s.label)} <b data-s="{place}">{short(s.points[-1][1])}</b></li>'
        for place, s in enumerate(plot.series)
    )
    return (
        f'<figure><h3>{text(plot.title)}</h3><p class="unit">{text(plot.unit)}<span data-at></span></p>'
        f"{drawing(plot)}"
        f'<ul class="legend">{legend}</ul><figcaption>{text(plot.caption)}</figcaption></figure>'
    )


def drawing(plot: Plot) -> str:
    """The SVG element, described in words for those who cannot see it."""
    series = _piled(plot.series) if plot.stacked else list(plot.series)
    values = [y for s in series for _, y in s.points]
    across = [x for s in series for x, _ in s.points]
    low, high = value_range(values, plot.log)
    labels = [(value, short(value)) for value in ticks(low, high, plot.log)]
    left = 10 + DIGIT * max(len(label) for _, label in labels)
    x = Scale(min(across), max(max(across), min(across) + 1), left, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, plot.log)
    drawn = _bands(series, x, y) if plot.stacked else "".join(_line(s, x, y, plot) for s in series)
    data = "".join(_data(s.points) for s in plot.series)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{text(described(plot))}" '
        f'data-low="{x.low:g}" data-high="{x.high:g}" data-left="{x.start:g}" data-right="{x.end:g}">'
        f"{_axes(x, y, labels)}{drawn}{data}"
        f'<line class="cursor" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}" visibility="hidden"/></svg>'
    )


def described(plot: Plot) -> str:
    """A chart in a sentence per line: where it begins and ends, and its extremes."""
    parts = []
    for s in plot.series:
        values = [y for _, y in s.points]
        parts.append(
            f"{s.label}: from {short(values[0])} to {short(values[-1])}, between {short(min(values))} and "
            f"{short(max(values))}"
        )
    last = max(x for s in plot.series for x, _ in s.points)
    return f"{plot.title} in {plot.unit} up to rollout {last:g}. {'; '.join(parts)}."


def _axes(x: Scale, y: Scale, labels: list[tuple[float, str]]) -> str:
    rows = [
        f'<line class="grid" x1="{x.start:g}" x2="{x.end:g}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text x="{x.start - 6:g}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>'
        for value, label in labels
    ]
    columns = []
    for value in rollout_ticks(x.low, x.high):
        label = f"{value:,.0f}"
        place = min(x(value), WIDTH - DIGIT * len(label) / 2)
        columns.append(f'<text x="{place:.1f}" y="{HEIGHT - 18:g}" text-anchor="middle">{label}</text>')
    middle = (x.start + x.end) / 2
    columns.append(f'<text x="{middle:.1f}" y="{HEIGHT - 3:g}" text-anchor="middle">rollout</text>')
    return "".join([*rows, *columns])


def _line(s: Series, x: Scale, y: Scale, plot: Plot) -> str:
    if s.marked or len(s.points) < SMOOTHED_FROM:
        dots = "".join(
            f'<circle class="dot {s.color}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="3"/>' for px, py in s.points
        )
        return _path(s.points, x, y, f"line {s.color}") + dots
    if plot.exact or plot.log:
        return _path(s.points, x, y, f"line thin {s.color}")
    across, values = [px for px, _ in s.points], [py for _, py in s.points]
    bold = list(zip(across, smoothed(values, 1 + len(values) // 12), strict=True))
    pale = _path(s.points, x, y, f"line pale {s.color}") if plot.pale else ""
    return pale + _path(bold, x, y, f"line {s.color}")


def _path(points: Points, x: Scale, y: Scale, style: str) -> str:
    return f'<path class="{style}" d="M{_joined(points, x, y)}"/>' if len(points) > 1 else ""


def _joined(points: Points, x: Scale, y: Scale) -> str:
    return "L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in points)


def _data(points: Points) -> str:
    """For the script: a value is shown as it is written here."""
    across, values = " ".join(f"{x:g}" for x, _ in points), " ".join(short(y) for _, y in points)
    return f'<g data-x="{across}" data-y="{values}"/>'


def _piled(series: Sequence[Series]) -> list[Series]:
    """Every line on top of those before it; all have the same rollouts."""
    heights: dict[float, float] = {}
    piled = []
    for s in series:
        for px, py in s.points:
            heights[px] = heights.get(px, 0.0) + py
        piled.append(Series(s.label, [(px, heights[px]) for px, _ in s.points], s.color))
    return piled


def _bands(piled: list[Series], x: Scale, y: Scale) -> str:
    bands, floor = [], [(px, 0.0) for px, _ in piled[0].points]
    for s in piled:
        outline = [*s.points, *reversed(floor)]
        bands.append(f'<path class="band {s.color}" d="M{_joined(outline, x, y)}Z"/>')
        floor = s.points
    return "".join(bands)
