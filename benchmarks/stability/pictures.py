"""The pictures of docs/results.md: what the arms came to, how they got there, and what the budget does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms.curves import Found
from benchmarks.arms.runs import Arm
from benchmarks.stability.outcomes import Outcome, curve_band
from benchmarks.stability.results import Results
from benchmarks.stability.studies import ABLATION, ALL, BUDGET, BUDGETS, MAIN, THREE, Study

COLORS = {
    "dense": "#6b7280", "naive": "#c2410c", "rejection only": "#d97706", "reweighting only": "#a21caf",
    "Sparse-RL (paper)": "#2563eb", "Sparse-RL (official)": "#0891b2", "replay": "#047857",
}  # fmt: skip
TITLES = {"sum": "sum: every step needs a number of the prompt", "reduction": "reduction: no step needs old tokens"}


def pictures(results: Results, folder: Path) -> None:
    """Write all three."""
    from matplotlib import rc_context

    from sparse_rl_lightning.report.charts import STYLE

    with rc_context(STYLE):
        for name, draw in (("results", ends), ("results-courses", courses), ("results-budgets", budgets)):
            draw(results).savefig(folder / f"{name}.png", dpi=110)


def _figure(columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


def ends(results: Results) -> Any:
    """A row per arm, accuracy with the full cache and with the compressed one, a dot per seed, a bar for the mean."""
    figure, axes = _figure(len(MAIN), 10.5, 3.9, sharey=True)
    labels = ["before", *(arm.label for arm in ALL)]
    for ax, study in zip(axes, MAIN, strict=True):
        first = list(results.of(study, ALL[0], BUDGET).values())
        _row(ax, len(ALL), [run.dense_before for run in first], [run.sparse_before for run in first], "#1f2937")
        for place, arm in enumerate(ALL):
            own = list(results.of(study, arm, BUDGET).values())
            _row(ax, len(ALL) - 1 - place, [run.dense for run in own], [run.sparse for run in own], COLORS[arm.label])
        ax.set_title(TITLES[study.task], fontsize=10)
        ax.set_xlabel(f"greedy accuracy after training (SnapKV, budget {BUDGET})")
        ax.set_xlim(left=0.0)
    axes[0].set_yticks(range(len(labels)), labels[::-1])
    handles = [
        axes[0].plot([], [], "o", color="#1f2937", label="full cache")[0],
        axes[0].plot([], [], "o", mfc="white", color="#1f2937", label="compressed cache")[0],
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _row(ax: Any, place: float, dense: Sequence[float], sparse: Sequence[float], color: str) -> None:
    for values, offset, face in ((dense, 0.14, color), (sparse, -0.14, "white")):
        if values:
            average = sum(values) / len(values)
            ax.plot([0.0, average], [place + offset] * 2, color=color, lw=3.5, alpha=0.25, solid_capstyle="butt")
            ax.plot(values, [place + offset] * len(values), "o", color=color, mfc=face, ms=5)


Draw = Callable[[Found], tuple[list[float], list[float]]]


def _column(name: str, factor: float = 1.0) -> Draw:
    return lambda found: (found.column("rollout"), [factor * value for value in found.column(name)])


PANELS: dict[str, Draw] = {
    "Reward of samples": _column("reward"),
    "Greedy accuracy, full cache": lambda found: found.curve("dense"),
    "Rejected sequences, %": _column("rejection_rate", 100.0),
}


def courses(results: Results) -> Any:
    """Curves over the rollouts: mean over the seeds, and a band from the least to the largest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.4), layout="constrained", facecolor="white")
    grid = figure.subplots(len(MAIN), len(PANELS), squeeze=False, sharex=True)
    for row, study in zip(grid, MAIN, strict=True):
        for ax, (title, draw) in zip(row, PANELS.items(), strict=True):
            for arm in ALL:
                _band(ax, [draw(one) for one in results.runs(study, arm, BUDGET)], arm)
            ax.set_title(title, fontsize=10)
            ax.set_ylim(bottom=0.0)
        row[0].set_ylabel(study.task, fontweight="bold")
    for ax in grid[-1]:
        ax.set_xlabel("rollout")
    handles = dict(zip(*grid[0][0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return figure


def _band(ax: Any, curves: Sequence[tuple[list[float], list[float]]], arm: Arm) -> None:
    if curves:
        middle, least, largest = curve_band([values for _, values in curves])
        rollouts, color = curves[0][0][: len(middle)], COLORS[arm.label]
        ax.plot(rollouts, middle, color=color, lw=1.8, label=arm.label)
        ax.fill_between(rollouts, least, largest, color=color, alpha=0.12, lw=0)


MEASURES: dict[str, Callable[[Outcome], float]] = {
    "Greedy accuracy, full cache": lambda run: run.dense,
    "Greedy accuracy, compressed cache": lambda run: run.sparse,
    "Rejected sequences, %": lambda run: 100.0 * run.rejected,
}


def budgets(results: Results) -> Any:
    """Three arms over the budgets, a dot per seed, a line through the means."""
    figure, axes = _figure(len(MEASURES), 10.5, 3.2)
    for ax, (title, of) in zip(axes, MEASURES.items(), strict=True):
        for arm in THREE:
            _over_budgets(ax, results, ABLATION, arm, of)
        ax.set_title(title, fontsize=10)
        ax.set_xticks(BUDGETS)
        ax.set_xlabel("budget (sequences of about 47 tokens)")
        ax.set_ylim(bottom=0.0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _over_budgets(ax: Any, results: Results, study: Study, arm: Arm, of: Callable[[Outcome], float]) -> None:
    found = {budget: [of(run) for run in results.of(study, arm, budget).values()] for budget in BUDGETS}
    points = [(budget, value) for budget, values in found.items() for value in values]
    means = [(budget, sum(values) / len(values)) for budget, values in found.items() if values]
    if points:
        ax.plot(*zip(*points, strict=True), "o", color=COLORS[arm.label], ms=4.5, alpha=0.6)
        ax.plot(*zip(*means, strict=True), color=COLORS[arm.label], lw=1.8, label=arm.label)
