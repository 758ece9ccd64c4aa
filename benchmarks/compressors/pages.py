"""The tables and the picture of the compressors' quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.common.tables import Table
from benchmarks.compressors.methods import DENSE, FLOOR
from benchmarks.compressors.quality import SHARES, Quality

MARK = "↓"  # behind a number that is not better than that of random eviction
COLORS = ("#c2410c", "#2563eb", "#1f2937")  # by budget, smallest first
HALF = SHARES.index(0.5)
Results = Sequence[Quality]
ByTask = Mapping[str, Results]


@dataclass(frozen=True)
class Measure:
    """A number of quality."""

    value: Callable[[Quality], float]
    digits: int
    sign: int = 1  # -1 where less is better, 0 where it is no matter of quality

    def text(self, quality: Quality | None) -> str:
        """A number."""
        return "–" if quality is None or math.isnan(self.value(quality)) else f"{self.value(quality):,.{self.digits}f}"

    def cell(self, quality: Quality | None, floor: Quality | None) -> str:
        """A number, with the mark where it is not above the floor."""
        loses = quality is not None and floor is not None and self.loses(quality, floor)
        return self.text(quality) + (MARK if loses else "")

    def loses(self, quality: Quality, floor: Quality) -> bool:
        """Whether it is not better than random eviction."""
        ahead = self.sign * (self.value(quality) - self.value(floor))
        return quality.method not in (DENSE, FLOOR) and self.sign != 0 and ahead <= 0


ACCURACY = Measure(lambda q: q.accuracy, 2)
ACCEPTANCE = Measure(lambda q: q.acceptance, 3)
TAIL = Measure(lambda q: q.acceptance_p05, 3)
PERPLEXITY = Measure(lambda q: q.perplexity, 2, sign=-1)
AGREEMENT = Measure(lambda q: q.agreement, 3)  # of both caches' favorite tokens
SPEED = Measure(lambda q: q.events_per_second, 0, sign=0)
JUDGED = (ACCURACY, PERPLEXITY, AGREEMENT, ACCEPTANCE, TAIL)


def has_problems(results: Results) -> bool:
    """Whether the task has problems to solve."""
    return not math.isnan(results[0].accuracy)


def methods(results: Results) -> list[str]:
    """Names in the order they were measured."""
    return list(dict.fromkeys(quality.method for quality in results))


def by_budget(results: Results, method: str, protected: bool) -> list[Quality | None]:
    """One per budget of the task, the smallest first; None where the method needs more."""
    of_method = {
        quality.budget: quality for quality in results if (quality.method, quality.protected) == (method, protected)
    }
    return [of_method.get(budget) for budget in sorted({quality.budget for quality in results})]


def measure_table(results: ByTask, measure: Measure) -> Table:
    """Methods by a measure at half of each task's length, with the prompt open and protected."""
    kinds = {"open": False, "protected": True}
    table = Table("", ["", *(f"{task}, {prompt}" for task in results for prompt in kinds)])
    for name in methods([quality for qualities in results.values() for quality in qualities]):
        cells = [
            measure.cell(
                by_budget(qualities, name, is_protected)[HALF], by_budget(qualities, FLOOR, is_protected)[HALF]
            )
            for qualities in results.values()
            for is_protected in kinds.values()
        ]
        table.add(name, *cells)
    return table


def most_solved(results: ByTask) -> float:
    """The best accuracy of any method under the smallest budget of a task."""
    smallest = [
        quality for task in results.values() if has_problems(task) for name in methods(task) if name != DENSE
        for quality in by_budget(task, name, False)[:1] if quality is not None
    ]  # fmt: skip
    return max((quality.accuracy for quality in smallest), default=math.nan)


def accuracy_table(results: ByTask) -> Table:
    """Of tasks with problems: under less hardly anything is solved, under more nearly everything."""
    return measure_table({task: qualities for task, qualities in results.items() if has_problems(qualities)}, ACCURACY)


def chance_table(results: ByTask) -> Table:
    """Methods by how many of their numbers are not above random eviction's, worst last, and by speed."""
    timed = [task for task in results if not has_problems(results[task])]
    table = Table("", ["", "prompt open", "prompt protected", *(f"events/s, {task}, 50%" for task in timed)])
    names = [
        name for name in methods([q for qualities in results.values() for q in qualities]) if name not in (DENSE, FLOOR)
    ]
    lost = {name: [_lost(results, name, is_protected) for is_protected in (False, True)] for name in names}
    for name in sorted(names, key=lambda name: lost[name][0][0] / max(1, lost[name][0][1])):
        speeds = [by_budget(results[task], name, False)[HALF] for task in timed]
        counts = [f"{count} of {total}" if total else "–" for count, total in lost[name]]
        table.add(name, *counts, *(SPEED.text(speed) for speed in speeds))
    return table


def _lost(results: ByTask, name: str, protected: bool) -> tuple[int, int]:
    """Numbers of quality in which a method does not beat random eviction, and how many there are."""
    judged = [
        measure.loses(quality, floor)
        for qualities in results.values()
        for quality, floor in zip(
            by_budget(qualities, name, protected), by_budget(qualities, FLOOR, protected), strict=True
        )
        if quality is not None and floor is not None
        for measure in JUDGED
        if not math.isnan(measure.value(quality))
    ]
    return sum(judged), len(judged)


def picture(results: ByTask, path: Path) -> None:
    """One panel per task, the acceptance's tail: a row per method, a dot per budget, hollow with a protected prompt."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sparse_rl_lightning.report.charts import STYLE

    names = _best_last(results)
    with rc_context({**STYLE, "axes.grid.axis": "both"}):
        rows_of_two = math.ceil(len(results) / 2)
        figure = Figure(figsize=(6.6, rows_of_two * (0.22 * len(names) + 0.8) + 0.9), layout="constrained")
        axes = figure.subplots(rows_of_two, min(2, len(results)), sharey=True, squeeze=False).flatten()
        for ax, (task, qualities) in zip(axes, results.items(), strict=False):
            for column, share in enumerate(SHARES):
                for is_protected, offset, face in ((False, 0.12, COLORS[column]), (True, -0.12, "white")):
                    rows = [(by_budget(qualities, name, is_protected)[column], row) for row, name in enumerate(names)]
                    shown = [(TAIL.value(quality), row + offset) for quality, row in rows if quality is not None]
                    if shown:
                        label = f"{share:.0%} of the length{', prompt protected' if is_protected else ''}"
                        ax.plot(*zip(*shown, strict=True), "o", color=COLORS[column], mfc=face, ms=5, label=label)
            ax.set_title(task.capitalize(), fontsize=10)
        axes[0].set_yticks(range(len(names)), names)
        for ax in axes[max(0, len(results) - 2) : len(results)]:
            ax.set_xlabel("tail of the acceptance")
        for ax in axes[len(results) :]:
            ax.set_visible(False)
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white")


def _best_last(results: ByTask) -> list[str]:
    """Rows from the bottom up: by the mean acceptance at each task's largest budget, the prompt open to eviction."""
    names = [name for name in methods([q for qualities in results.values() for q in qualities]) if name != DENSE]
    tops = {name: [by_budget(qualities, name, False)[-1] for qualities in results.values()] for name in names}
    score = {name: fmean(top.acceptance for top in qualities if top is not None) for name, qualities in tops.items()}
    return sorted(names, key=score.__getitem__)
