"""Charts drawn by matplotlib: as SVG elements of a page, or together as one PNG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.report.measures import CACHES
from sparse_rl_lightning.report.plots import Plot, Series, plots_of_run, short
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.text import number, percent, printable, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = ("#1d4ed8", "#c2410c", "#0e9f6e", "#4a044e")
DARK = ("#7aa8ff", "#ff8a3d", "#5eead4", "#fde68a")
"""Colors of lines on light and on dark background; more lines than colors are dashed, then dotted."""
DASHES = ("-", "--", ":")
INK, SOFT, GRAY, GRID, WHITE = "#1f2937", "#4b5563", "#7b8794", "#e5e7eb", "#ffffff"
VARIABLES = {**{color: f"--c{index}" for index, color in enumerate(LIGHT)},
             SOFT: "--soft", GRAY: "--gray", GRID: "--grid", WHITE: "--card"}  # fmt: skip
"""Colors of a chart that the page's style sheet replaces in dark mode."""

INSTALL_HINT = "The charts need matplotlib: pip install 'sparse-rl-lightning[report]'."
COLUMNS = 2  # so that letters can be read on a phone
SMOOTHED_FROM = 8
"""Number of points from which a bold line is a mean over neighbors, drawn over the pale values."""
WIDTH, HEIGHT, TOP, BOTTOM, RIGHT = 400, 210, 8, 36, 20  # size and margins of a chart in the page
DIGIT = 7.7
"""Width of a digit in the page's labels, in the widest of the usual fonts."""

STYLE: Any = {
    "font.family": "sans-serif", "font.size": 10, "text.color": INK, "text.parse_math": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GRAY, "axes.labelcolor": SOFT,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.frameon": False, "legend.fontsize": 9, "svg.fonttype": "none",
}  # fmt: skip


def picture(record: RunRecord) -> bytes:
    """The most informative charts of a run as one PNG.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message includes what to install.
    """
    plots = [plot for plot in plots_of_run(record) if plot.panel.pictured]
    with figures() as figure_class:
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        rows = max(1, math.ceil(len(plots) / COLUMNS))
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # inches
        figure = figure_class(figsize=(3.3 * COLUMNS, 2.4 * rows + 0.9), layout=layout, facecolor="white")
        headline = figure.suptitle(_headline(record), x=0.012, ha="left", fontsize=11, fontweight="bold")
        headline.set_linespacing(1.6)
        for index, plot in enumerate(plots):
            ax = figure.add_subplot(rows, COLUMNS, index + 1)
            draw(ax, plot)
            ax.set(title=plot.panel.title, ylabel=plot.panel.unit)
            if len(plot.series) > 1:
                ax.legend(loc="best")
        return png(figure)


def drawings(plots: Sequence[Plot]) -> list[str]:
    """The content of one SVG element per chart, sized :data:`WIDTH` by :data:`HEIGHT`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message includes what to install.
    """
    with figures() as figure_class:
        return [_drawing(figure_class(figsize=(WIDTH / 72, HEIGHT / 72)), plot) for plot in plots]


def draw(ax: Axes, plot: Plot) -> None:
    """Draw bands, dots, or lines smoothed over the pale values; the legend is up to the caller."""
    from matplotlib.ticker import MaxNLocator

    series = plot.series
    if plot.panel.stacked:
        across, heights = [x for x, _ in series[0].points], [[y for _, y in s.points] for s in series]
        colors = [_look(s.color)[0] for s in series]
        ax.stackplot(across, heights, colors=colors, labels=[s.label for s in series])
        values = [sum(column) for column in zip(*heights, strict=True)]
    else:
        values = [y for s in series for _, y in s.points]
    low, labels = _scale(ax, values, plot.panel.log)
    for s in () if plot.panel.stacked else series:
        _line(ax, s, plot, low)
    across = [x for s in series for x, _ in s.points]
    ax.set_xlim(min(across), max(max(across), min(across) + 1))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(lambda value, _: short(value))
    ax.set_yticks(labels, [short(value) for value in labels])
    ax.set_xlabel("rollout")
    ax.minorticks_off()
    ax.tick_params(left=False, bottom=False)


def _line(ax: Axes, s: Series, plot: Plot, low: float) -> None:
    across, values = [x for x, _ in s.points], [max(y, low) for _, y in s.points]
    (color, dashes), label = _look(s.color), f"{s.label} {s.last}" if plot.panel.marked else s.label
    few = plot.panel.marked or len(values) < SMOOTHED_FROM
    if few or plot.panel.exact or plot.panel.log:
        (line,) = ax.plot(across, values, dashes, color=color, lw=2 if few else 1.5, label=label, clip_on=False)
        line.set(marker="o" if few else "", markersize=5, markeredgecolor=WHITE)
        return
    if plot.pale:
        ax.plot(across, values, color=color, lw=0.9, alpha=0.32)
    ax.plot(across, smoothed(values, 1 + len(values) // 12), dashes, color=color, lw=2.2, label=label)


def smoothed(values: list[float], reach: int) -> list[float]:
    """The mean over up to ``reach`` neighbors on either side, without NaN."""
    result = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


def _look(color: str) -> tuple[str, str]:
    """The color and dashes of a line."""
    if color == "ref":
        return GRAY, "--"
    dashes, index = divmod(int(color.removeprefix("c")), len(LIGHT))
    return LIGHT[index], DASHES[dashes]


def _scale(ax: Axes, values: Sequence[float], log: bool) -> tuple[float, list[float]]:
    """Set round limits of the vertical axis, including 0 unless it is logarithmic; returns its low end and labels."""
    from matplotlib.ticker import MaxNLocator

    if log:
        positive = [value for value in values if value > 0] or [1.0]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        last = max(last, first + 1)
        ax.set_yscale("log")
        labels = [10.0**power for power in range(last, first - 1, -math.ceil((last - first) / 5))]
        low, high = 10.0**first, 10.0**last
    else:
        low, high = min(0.0, *values), max(0.0, *values)
        labels = list(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high if high > low else 1.0))
        low, high = labels[0], labels[-1]
    ax.set_ylim(low, high)
    return low, labels


def _drawing(figure: Figure, plot: Plot) -> str:
    ax = figure.add_subplot()
    draw(ax, plot)
    left = 10 + DIGIT * max(len(label.get_text()) for label in ax.get_yticklabels())
    figure.subplots_adjust(left / WIDTH, BOTTOM / HEIGHT, 1 - RIGHT / WIDTH, 1 - TOP / HEIGHT)
    for patch in (figure.patch, ax.patch):
        patch.set_visible(False)  # the page has its own background
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return _plain(buffer.getvalue())


def _plain(svg: str) -> str:
    """Drawn elements only: no style attributes, which the page's policy forbids, no identifiers, no references."""
    svg = re.sub(r"<defs>.*?</defs>|\n\s*", "", svg[svg.index("<g ") : svg.rindex("</svg>")], flags=re.DOTALL)
    svg = re.sub(r'<use xlink:href="[^"]*" x="([^"]*)" y="([^"]*)"', r'<circle r="3" cx="\1" cy="\2"', svg)
    svg = re.sub(r' (?:id|clip-path|transform)="[^"]*"', "", svg)
    svg = re.sub(r' style="([^"]*)"', _attributes, svg)
    svg = re.sub(r"(?<=\d)(\.\d)\d+(?=[^<>]*>)", r"\1", svg)  # a tenth of a pixel, but not in labels
    return re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match[0]]})", svg)


def _attributes(style: re.Match[str]) -> str:
    declared = re.findall(r"([\w-]+): ([^;]+)", style[1])
    return "".join(f' {name}="{value}"' for name, value in declared if not name.startswith("font"))


def write_picture(path: Path, make: Callable[[], bytes]) -> list[Path]:
    """Write a picture, and return its path; without matplotlib say what to install, and return nothing."""
    try:
        write_whole(path, make())
    except ModuleNotFoundError as error:
        say(f"No picture: {error}")
        return []
    return [path]


def png(figure: Figure) -> bytes:
    """A figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


@contextmanager
def figures() -> Iterator[type[Figure]]:
    """The Figure class in our style, without pyplot: no window, no global figure.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message includes what to install.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(INSTALL_HINT) from error
    with matplotlib.rc_context(STYLE):
        yield Figure


def _headline(record: RunRecord) -> str:
    parts = []
    for cache in CACHES:
        if cache in record.before and cache in record.after:
            change = f"{number(record.before[cache], 2)} → {number(record.after[cache], 2)}"
            parts.append(f"{record.measure} with the {CACHES[cache]} {change}")
    if record.mean("kv/saving_final") is not None:
        parts.append(f"{percent(record.mean('kv/saving_final'))} of KV tokens saved")
    return "\n".join([printable(record.title, 80), *parts]).strip()
