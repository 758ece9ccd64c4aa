"""The pictures of docs/measured/stability.md: what the arms came to, and how they got there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from experiments.arms.runs import DENSE, Arm
from experiments.stability.outcomes import Outcome, curve_band
from experiments.stability.records import Record
from experiments.stability.results import Results
from experiments.stability.studies import AGAIN, ALL, MAIN, TIGHT, Study

WIDTH = 5.8  # inches of a picture whose letters can be read on a phone
COLORS = {
    "dense": "#6b7280", "naive": "#c2410c", "naive, δ = 2": "#f59e0b", "rejection only": "#a16207",
    "reweighting only": "#a21caf", "Sparse-RL": "#2563eb", "Sparse-RL (official)": "#0891b2", "replay": "#047857",
}  # fmt: skip


def pictures(results: Results, folder: Path, studies: Collection[str]) -> None:
    """Write what the arms of these studies came to under both caches, and their courses."""
    if "again" not in studies and not {"main", "tight"} <= set(studies):
        return
    from matplotlib import rc_context

    from sparse_rl_lightning.report.charts import STYLE

    with rc_context(STYLE):
        drawn: dict[str, Any] = {}
        if {"main", "tight"} <= set(studies):
            drawn |= {"results": ends(results, (TIGHT, MAIN)), "results-courses": courses(results, MAIN, MAIN)}
            drawn |= {"results-tight": courses(results, TIGHT, MAIN)}
        if "again" in studies:
            milder, tighter = AGAIN
            drawn |= {"again": ends(results, (tighter, milder)), "again-tight": courses(results, tighter, milder)}
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.png", dpi=110)


def of_arm(results: Results, study: Study, arm: Arm, dense: Study) -> list[Outcome]:
    """Its runs in a study; rollouts with the full cache know no budget, and are another's of the same seeds."""
    return list(results.of(study if arm.evicts else dense, arm).values())


def new_figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).ravel()


def ends(results: Results, studies: Sequence[Study]) -> Any:
    """A panel per cache, a row per arm: accuracy with the full cache and the compressed one, a bar for the mean."""
    arms = [arm for arm in ALL if any(arm in study.arms for study in studies)]
    with_dense = next(study for study in studies if DENSE in study.arms)
    labels = ["before", *(arm.label for arm in arms)]
    figure, axes = new_figure(
        len(studies), 1, WIDTH, (0.6 + 0.4 * len(labels)) * len(studies), sharex=True, sharey=True
    )
    for ax, study in zip(axes, studies, strict=True):
        first = [run for arm in study.arms for run in results.of(study, arm).values() if arm.evicts][:1]
        draw_ends(ax, len(arms), [run.dense_before for run in first], [run.sparse_before for run in first], "#1f2937")
        for place, arm in enumerate(arms):
            own = of_arm(results, study, arm, with_dense)
            judged = own if arm in study.arms else []  # else under another compressed cache
            sparse = [run.sparse for run in judged]
            draw_ends(ax, len(arms) - 1 - place, [run.dense for run in own], sparse, COLORS[arm.label])
        ax.set_title(f"{study.method}, {study.budget} + 4 tokens", fontsize=10)
        ax.set_xlim(left=0.0)
    axes[-1].set_xlabel("greedy accuracy after training")
    axes[0].set_yticks(range(len(labels)), labels[::-1])
    tell_caches(figure, axes[0])
    return figure


def tell_caches(figure: Any, ax: Any) -> None:
    """The legend of ``draw_ends``, below."""
    handles = [
        ax.plot([], [], "o", color="#1f2937", label="full cache")[0],
        ax.plot([], [], "o", mfc="white", color="#1f2937", label="compressed cache")[0],
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def draw_ends(ax: Any, place: float, dense: Sequence[float], sparse: Sequence[float], color: str) -> None:
    """A row of dots: what runs end at with the full cache and, hollow, with the compressed one; a bar for each mean."""
    for values, offset, face in ((dense, 0.14, color), (sparse, -0.14, "white")):
        if values:
            average = sum(values) / len(values)
            ax.plot([0.0, average], [place + offset] * 2, color=color, lw=3.5, alpha=0.25, solid_capstyle="butt")
            ax.plot(values, [place + offset] * len(values), "o", color=color, mfc=face, ms=5)


Draw = Callable[[Record], tuple[list[float], list[float]]]


def _curve(name: str, factor: float = 1.0) -> Draw:
    return lambda record: (record.curves["rollout"], [factor * value for value in record.curves[name]])


PANELS: dict[str, tuple[Draw, str]] = {
    "Greedy accuracy, full cache": (lambda record: record.curve("dense"), "linear"),
    "Rejected sequences, %": (_curve("rejection_rate", 100.0), "linear"),
    "Largest staleness ratio": (_curve("largest_ratio"), "log"),
    "Largest gradient norm": (_curve("largest_norm"), "log"),
}


def courses(results: Results, study: Study, dense: Study) -> Any:
    """Curves over the rollouts of a study, two panels a row: means over the seeds, bands from least to largest."""
    figure, axes = new_figure(len(PANELS) // 2, 2, 7.6, 0.8 + 1.25 * len(PANELS), sharex=True)
    for ax, (title, (draw, scale)) in zip(axes, PANELS.items(), strict=True):
        for arm in ALL:
            draw_band(ax, [draw(run.record) for run in of_arm(results, study, arm, dense)], arm)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("rollout")
        if scale == "log":
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+0", "e"))
        else:
            ax.set_ylim(bottom=0.0)
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def draw_band(ax: Any, curves: Sequence[tuple[list[float], list[float]]], arm: Arm) -> None:
    """An arm's curves as their mean and a band from the least to the largest."""
    if curves:
        middle, least, largest = curve_band([values for _, values in curves])
        rollouts, color = curves[0][0][: len(middle)], COLORS[arm.label]
        ax.plot(rollouts, middle, color=color, lw=1.8, label=arm.label)
        ax.fill_between(rollouts, least, largest, color=color, alpha=0.12, lw=0)
