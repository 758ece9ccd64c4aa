"""The charts of a run, drawn by matplotlib: one picture of all of them, or each for itself as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.terminal import CACHES
from sparse_rl_lightning.report.text import number, percent, printable, size

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
    "legend.frameon": False, "legend.fontsize": 9, "svg.fonttype": "none", "svg.hashsalt": "sparse-rl",
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """Lines over the rollouts, smoothed over the raw values; a subclass draws something else."""

    title: str
    unit: str
    caption: str  # one sentence for a reader who sees such a chart for the first time
    lines: tuple[tuple[str, str, str], ...] = ()  # key, label, colour
    factor: float = 1.0
    raw: bool = False  # show the values as they are, on a logarithmic axis

    def has_data(self, record: RunRecord) -> bool:
        """Whether there is anything to draw."""
        return bool(self._values(record))

    def draw(self, ax: Axes, record: RunRecord) -> None:
        """Draw the lines."""
        numbers = [int(value) for value in record.column("rollout")]
        for key, label, color in self.lines:
            values = [self.factor * value for value in record.column(key)]
            if self.raw or len(values) < 8:
                ax.plot(numbers, values, color=color, lw=1.3, label=label, marker="." if len(values) < 8 else "")
            else:
                ax.plot(numbers, values, color=color, lw=0.8, alpha=0.3)
                ax.plot(numbers, smoothed(values, 1 + len(values) // 12), color=color, lw=2, label=label)
        ax.set(xlabel="rollout", ylabel=self.unit)
        ax.xaxis.set_major_locator(_whole_numbers())
        if self.raw and max(self._values(record)) > 0:
            ax.set_yscale("log")
        elif min(self._values(record)) >= 0:
            ax.set_ylim(bottom=0.0)
        if len(self.lines) > 1:
            ax.legend(loc="best")

    def _values(self, record: RunRecord) -> list[float]:
        return [value for key, _, _ in self.lines for value in record.column(key) if math.isfinite(value)]


class ResultChart(Chart):
    """Greedy results on held-out problems, before and after, by cache."""

    def has_data(self, record: RunRecord) -> bool:
        """Whether anything was evaluated."""
        return bool(record.before or record.after)

    def draw(self, ax: Axes, record: RunRecord) -> None:
        """Two bars per cache."""
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


class MemoryChart(Chart):
    """Peak bytes of the KV cache against those of a full one."""

    def has_data(self, record: RunRecord) -> bool:
        """Whether rollouts were measured."""
        return record.maximum("kv/peak_bytes") is not None

    def draw(self, ax: Axes, record: RunRecord) -> None:
        """Two bars."""
        used, full = record.maximum("kv/peak_bytes") or 0.0, record.maximum("kv/full_peak_bytes") or 0.0
        bars = ax.barh(["full cache", "this run"], [full, used], 0.55, color=[GRAY, BLUE])
        share = percent(used / full) if full else ""
        ax.bar_label(bars, [size(full), f"{size(used)} ({share})"], padding=4, fontsize=9)
        ax.set_xlim(0, 1.45 * max(used, full, 1.0))
        ax.set_xticks([])
        ax.spines["bottom"].set_visible(False)
        ax.grid(False)


CHARTS: tuple[Chart, ...] = (
    ResultChart("Held-out problems", "", "Mean reward of greedy completions on problems that are not trained on."),
    Chart("Reward", "mean reward", "Mean reward of the sampled completions: pale per rollout, bold smoothed.",
          (("reward", "reward", BLUE),)),
    Chart("Completion length", "tokens", "Mean and longest length of the sampled completions.",
          (("completions/mean_length", "mean", BLUE), ("completions/max_length", "longest", GRAY))),
    Chart("KV tokens saved", "% of a full cache", "Cache entries that were not held when a sequence ended, and on "
          "average over all decode steps.",
          (("kv/saving_final", "at the end", BLUE), ("kv/saving_integral", "over all steps", ORANGE)), 100.0),
    MemoryChart("Peak KV memory", "", "Bytes allocated for keys and values, and what the same number of sequences "
                "would need with a full cache."),
    Chart("Repetition", "% of 4-grams", "Phrases of four tokens that stood in the same completion before; a sampler "
          "that forgets too much falls into loops.",
          (("completions/repetition_rate", "repeated", BLUE),), 100.0),
    Chart("Rejected", "%", "Sequences that rejection drops because the dense policy finds a token near-impossible, and "
          "all tokens left out.",
          (("rejection_rate", "sequences", BLUE), ("token_mask_rate", "tokens", ORANGE)), 100.0),
    Chart("Mismatch KL", "nats per token", "Distance of the sampling (sparse) policy from the dense one; 0 is a "
          "perfect match.",
          (("mismatch/kl_k3", "k3", BLUE),)),
    Chart("Ratio dense / sparse", "ratio", "The tail of the mismatch: the smallest probability ratio of a rollout, and "
          "its 5th percentile.",
          (("mismatch/ratio_p05", "5th percentile", BLUE),
           ("sampling/importance_sampling_ratio/min", "smallest", ORANGE)), raw=True),
)  # fmt: skip


def smoothed(values: list[float], reach: int) -> list[float]:
    """Mean over up to ``reach`` neighbours on either side, NaN left out."""
    result = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


def picture(record: RunRecord) -> bytes:
    """All charts that have data as one PNG.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message says what to install.
    """
    with _figures() as figure_class:
        charts = [chart for chart in CHARTS if chart.has_data(record)]
        rows = max(1, math.ceil(len(charts) / COLUMNS))
        figure = figure_class(figsize=(4.3 * COLUMNS, 3.1 * rows + 0.8), layout=_roomy(), facecolor="white")
        headline = figure.suptitle(_headline(record), x=0.012, ha="left", fontsize=11, fontweight="bold")
        headline.set(linespacing=1.6, parse_math=False)
        for place, chart in enumerate(charts):
            ax = figure.add_subplot(rows, COLUMNS, place + 1)
            ax.set_title(chart.title)
            chart.draw(ax, record)
        return _saved(figure, "png")


def vector_charts(record: RunRecord) -> list[tuple[Chart, str]]:
    """Every chart that has data with its SVG element, fit to stand in one HTML page together.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message says what to install.
    """
    drawn = []
    with _figures() as figure_class:
        for place, chart in enumerate(CHARTS):
            if not chart.has_data(record):
                continue
            figure = figure_class(figsize=(4.0, 2.5), layout="constrained")
            figure.patch.set_alpha(0.0)
            chart.draw(figure.add_subplot(), record)
            drawn.append((chart, _inline(_saved(figure, "svg").decode(), f"c{place}-", chart.title)))
    return drawn


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


def _saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {}
    figure.savefig(buffer, format=kind, dpi=110, metadata=metadata)
    return buffer.getvalue()


def _inline(svg: str, prefix: str, title: str) -> str:
    """The element alone, as wide as its place, with ids that no other chart of the page has."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r' (xmlns(:xlink)?|version|width|height)="[^"]*"', "", element, count=5)
    element = element.replace("xlink:href=", "href=")
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


def _headline(record: RunRecord) -> str:
    parts = []
    for cache in CACHES:
        if cache in record.before and cache in record.after:
            change = f"{number(record.before[cache], 2)} → {number(record.after[cache], 2)}"
            parts.append(f"{record.measure} with the {CACHES[cache]} {change}")
    if record.mean("kv/saving_final") is not None:
        parts.append(f"{percent(record.mean('kv/saving_final'))} of KV tokens saved")
    return f"{printable(record.title, 120)}\n{'   ·   '.join(parts)}".strip()
