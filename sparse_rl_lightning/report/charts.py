"""The picture of a run: its most telling charts drawn by matplotlib into one PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparse_rl_lightning.report.panels import PANELS, Panel
from sparse_rl_lightning.report.plots import MOST_POINTS
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.scale import smoothed
from sparse_rl_lightning.report.svg import SMOOTHED_FROM
from sparse_rl_lightning.report.terminal import CACHES
from sparse_rl_lightning.text import number, percent, printable, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine
    from matplotlib.ticker import Locator

BLUE, ORANGE, GRAY, INK = "#2563eb", "#c2410c", "#9ca3af", "#1f2937"
INSTALL_HINT = "The charts need matplotlib: pip install 'sparse-rl-lightning[report]'."
COLUMNS = 3

STYLE: Any = {
    "font.family": "sans-serif", "font.size": 10, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GRAY, "axes.labelcolor": "#4b5563",
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e5e7eb",
    "xtick.color": "#4b5563", "ytick.color": "#4b5563", "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.frameon": False, "legend.fontsize": 9, 
}  # fmt: skip


Draw = Callable[["Axes"], None]


def charts(record: RunRecord) -> list[tuple[str, Draw]]:
    """Title of every chart that has data, with the function that draws it."""
    drawn: list[tuple[str, Draw]] = []
    if record.before or record.after:
        drawn.append(("Held-out problems", lambda ax: _draw_results(ax, record)))
    if record.maximum("kv/peak_bytes") is not None:
        drawn.append(("Peak KV memory", lambda ax: _draw_memory(ax, record)))
    for panel in PANELS:
        if panel.pictured and panel.found(record):
            drawn.append((panel.title, lambda ax, panel=panel: _draw_panel(ax, panel, record)))  # type: ignore[misc]
    return drawn


def _draw_panel(ax: Axes, panel: Panel, record: RunRecord) -> None:
    """Lines over the rollouts, smoothed over the pale values."""
    found = [(line, panel.fewer(points, MOST_POINTS)) for line, points in panel.found(record)]
    for (line, points), color in zip(found, (BLUE, ORANGE, INK), strict=False):
        across, values = [x for x, _ in points], [y for _, y in points]
        color = GRAY if line.reference else color
        few = len(values) < SMOOTHED_FROM
        if panel.log or panel.exact or few:
            ax.plot(across, values, color=color, lw=1.3, label=line.label, marker="." if few else "")
        else:
            ax.plot(across, values, color=color, lw=0.8, alpha=0.3)
            ax.plot(across, smoothed(values, 1 + len(values) // 12), color=color, lw=2, label=line.label)
    known = [y for _, points in found for _, y in points]
    ax.set(xlabel="rollout", ylabel=panel.unit)
    ax.xaxis.set_major_locator(_whole_numbers())
    if panel.log and max(known) > 0:
        ax.set_yscale("log")
    elif min(known) >= 0:
        ax.set_ylim(bottom=0.0)
    if len(found) > 1:
        ax.legend(loc="best")


def _draw_results(ax: Axes, record: RunRecord) -> None:
    """Greedy results on held-out problems, before and after: two bars per cache."""
    caches = [cache for cache in CACHES if cache in record.before or cache in record.after]
    for shift, values, label, color in ((-0.2, record.before, "before", GRAY), (0.2, record.after, "after", BLUE)):
        heights = [values.get(cache, math.nan) for cache in caches]
        bars = ax.bar([i + shift for i in range(len(caches))], heights, 0.36, color=color, label=label)
        ax.bar_label(bars, [number(h, 2) for h in heights], padding=2, fontsize=9)
    ax.set_xticks(range(len(caches)), [CACHES[cache] for cache in caches])
    ax.set_xlim(-0.6, len(caches) - 0.4)
    ax.set(ylabel=record.measure)
    ax.margins(y=0.25)
    ax.legend(loc="upper left", ncols=2)


def _draw_memory(ax: Axes, record: RunRecord) -> None:
    """Peak bytes of the KV cache against those of a full one: two bars."""
    used, full = record.maximum("kv/peak_bytes") or 0.0, record.maximum("kv/full_peak_bytes") or 0.0
    bars = ax.barh(["full cache", "this run"], [full, used], 0.55, color=[GRAY, BLUE])
    share = percent(used / full) if full else ""
    ax.bar_label(bars, [size(full), f"{size(used)} ({share})"], padding=4, fontsize=9)
    ax.set_xlim(0, 1.45 * max(used, full, 1.0))
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.grid(False)


def picture(record: RunRecord) -> bytes:
    """All charts that have data as one PNG.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message says what to install.
    """
    with _figures() as figure_class:
        found = charts(record)
        rows = max(1, math.ceil(len(found) / COLUMNS))
        figure = figure_class(figsize=(4.3 * COLUMNS, 3.1 * rows + 0.8), layout=_roomy(), facecolor="white")
        headline = figure.suptitle(_headline(record), x=0.012, ha="left", fontsize=11, fontweight="bold")
        headline.set(linespacing=1.6, parse_math=False)
        for place, (title, draw) in enumerate(found):
            ax = figure.add_subplot(rows, COLUMNS, place + 1)
            ax.set_title(title)
            draw(ax)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def _whole_numbers() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _roomy() -> LayoutEngine:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # inches


@contextmanager
def _figures() -> Iterator[type[Figure]]:
    """The Figure class with our style, without pyplot: no window, no global figure."""
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
    return f"{printable(record.title, 120)}\n{'   ·   '.join(parts)}".strip()
