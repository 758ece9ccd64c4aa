"""Results of an evaluation as a table for the terminal and as a picture, caches side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparse_rl_lightning.evaluation.results import BenchmarkResult
from sparse_rl_lightning.metrics import mean_accuracy
from sparse_rl_lightning.rewards.math import CONVENTIONS, Convention
from sparse_rl_lightning.text import DASH, number, percent, size, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#1f2937", "#2563eb", "#c2410c", "#059669", "#7c3aed", "#ca8a04", "#db2777", "#64748b")


def results_table(results: Sequence[BenchmarkResult], answers: Convention = "strict") -> str:
    """Accuracy in percent with its 95 % interval by benchmark and cache, the mean, and what each cache costs.

    A second table has the accuracies by both conventions of what counts as the answer.
    """
    caches, benchmarks = _names(results)
    found = {(result.benchmark, result.cache): result for result in results}
    rows = [["benchmark", "problems", "measure", *caches]]
    for benchmark in benchmarks:
        own = [found[benchmark, cache] for cache in caches if (benchmark, cache) in found]
        cells = [_cell(found.get((benchmark, cache)), answers) for cache in caches]
        rows.append([benchmark, str(own[0].by(answers).num_problems), own[0].measure, *cells])
    means = [_mean(results, cache, answers) for cache in caches]
    rows.append(["mean", "", "", *(_interval(*mean) for mean in means)])
    costs = [["cache", "mean length", "cut off", "KV tokens saved", "peak KV memory"]]
    for cache in caches:
        own = [result for result in results if result.cache == cache]
        length, clipped, saved = (
            sum(getattr(result, name) for result in own) / len(own)
            for name in ("mean_length", "clipped", "kv_saving_final")
        )
        peak = max(result.kv_peak_bytes for result in own)
        costs.append([cache, number(length, 1), percent(clipped), percent(saved), size(peak)])
    note = f"Accuracy in % (answers: {answers}), with 95 % confidence over the problems. "
    note += "Costs are means over the benchmarks."
    too_long = {result.benchmark: result.too_long for result in results if result.too_long}
    if too_long:
        named = ", ".join(f"{name} {count}" for name, count in too_long.items())
        note += f"\nNot sampled, counted as wrong, since prompt and completion exceed the context: {named}."
    parts = (table(rows, "lrl" + "r" * len(caches)), _both_conventions(results), table(costs, "lrrrr"), note)
    return "\n\n".join(parts)


def results_picture(results: Sequence[BenchmarkResult], answers: Convention = "strict") -> bytes | None:
    """Bars with their 95 % intervals as PNG, None without matplotlib; arguments as for the table."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return None
    with rc_context({"text.parse_math": False}):  # a benchmark has any name
        figure = Figure(figsize=(max(6.0, 1.5 * (len(_names(results)[1]) + 1)), 3.6), layout="constrained")
        draw(figure.add_subplot(), results, answers)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def draw(ax: Axes, results: Sequence[BenchmarkResult], answers: Convention) -> None:
    """The bars of every cache over the benchmarks, and over their mean; none where nothing was measured."""
    caches, benchmarks = _names(results)
    found = {(result.benchmark, result.cache): result.by(answers) for result in results}
    width = 0.8 / len(caches)
    for place, cache in enumerate(caches):
        own = {n: found[name, cache] for n, name in enumerate(benchmarks) if (name, cache) in found}
        bars = [*((a.mean, a.low, a.high) for a in own.values()), mean_accuracy([*own.values()])]
        heights = [100 * mean for mean, _, _ in bars]
        errors = [[100 * (m - low) for m, low, _ in bars], [100 * (high - m) for m, _, high in bars]]
        where = [n + (place - (len(caches) - 1) / 2) * width for n in (*own, len(benchmarks))]
        style = {"ecolor": "#9ca3af", "capsize": 2.0}
        ax.bar(
            where, heights, 0.92 * width, yerr=errors, color=COLORS[place % len(COLORS)], label=cache, error_kw=style
        )
    ax.set_xticks(range(len(benchmarks) + 1), [*benchmarks, "mean"])
    ax.set_ylabel("accuracy, %")
    ax.set_ylim(bottom=0.0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, ncols=len(caches), loc="lower left", bbox_to_anchor=(0, 1))  # over no bar


def _names(results: Sequence[BenchmarkResult]) -> tuple[list[str], list[str]]:
    """Caches and benchmarks in the order of the results."""
    return list(dict.fromkeys(r.cache for r in results)), list(dict.fromkeys(r.benchmark for r in results))


def _both_conventions(results: Sequence[BenchmarkResult]) -> str:
    """Accuracies by both conventions, side by side."""
    caches, benchmarks = _names(results)
    found = {(result.benchmark, result.cache): result for result in results}
    rows = [["strict / lenient", *caches]]
    for benchmark in benchmarks:
        own = [found.get((benchmark, cache)) for cache in caches]
        rows.append([benchmark, *(DASH if r is None else _pair(*(r.by(a).mean for a in CONVENTIONS)) for r in own)])
    rows.append(["mean", *(_pair(*(_mean(results, cache, a)[0] for a in CONVENTIONS)) for cache in caches)])
    return table(rows, "l" + "r" * len(caches))


def _pair(strict: float, lenient: float) -> str:
    return f"{100 * strict:.1f} / {100 * lenient:.1f}"


def _mean(results: Sequence[BenchmarkResult], cache: str, answers: Convention) -> tuple[float, float, float]:
    return mean_accuracy([result.by(answers) for result in results if result.cache == cache])


def _cell(result: BenchmarkResult | None, answers: Convention) -> str:
    if result is None:
        return DASH
    accuracy = result.by(answers)
    return _interval(accuracy.mean, accuracy.low, accuracy.high)


def _interval(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
