"""The tables and the picture of the compressors' quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.common.tables import Table
from benchmarks.compressors.methods import DENSE, FLOOR
from benchmarks.compressors.quality import SHARES, Quality

MARK = "↓"  # behind a number that is not better than that of random eviction
COLORS = ("#c2410c", "#2563eb", "#1f2937")  # by budget, smallest first
Results = Sequence[Quality]


@dataclass(frozen=True)
class Measure:
    """A column of the table."""

    title: str
    value: Callable[[Quality], float]
    digits: int
    sign: int = 1  # -1 where less is better, 0 where it is no matter of quality

    def cell(self, found: Quality | None, floor: Quality | None) -> str:
        """A number, with the mark where it is not above the floor."""
        if found is None or floor is None or math.isnan(self.value(found)):
            return "–"
        text = f"{self.value(found):,.{self.digits}f}"
        return text + (MARK if self.loses(found, floor) else "")

    def loses(self, found: Quality, floor: Quality) -> bool:
        """Whether it is not better than random eviction."""
        return found.method not in (DENSE, FLOOR) and self.sign * (self.value(found) - self.value(floor)) <= 0 < abs(
            self.sign
        )


ACCURACY = Measure("greedy accuracy", lambda q: q.accuracy, 2)
ACCEPTANCE = Measure("acceptance", lambda q: q.acceptance, 3)
TAIL = Measure("acceptance, 5th percentile", lambda q: q.acceptance_p05, 3)
PERPLEXITY = Measure("perplexity", lambda q: q.perplexity, 2, sign=-1)
AGREEMENT = Measure("same top token", lambda q: q.agreement, 3)
SPEED = Measure("events/s", lambda q: q.events_per_second, 0, sign=0)
OF_PROBLEMS = (ACCURACY, ACCEPTANCE, TAIL, SPEED)
OF_TEXTS = (PERPLEXITY, AGREEMENT, ACCEPTANCE, TAIL, SPEED)


def measures(results: Results) -> tuple[Measure, ...]:
    """The columns of a task, by whether it has problems to solve."""
    return OF_TEXTS if math.isnan(results[0].accuracy) else OF_PROBLEMS


def only(results: Results, protected: bool) -> Results:
    """Those with the prompt protected, or those without."""
    return [found for found in results if found.protected == protected]


def methods(results: Results) -> list[str]:
    """Names in the order they were measured."""
    return list(dict.fromkeys(found.method for found in results))


def by_budget(results: Results, method: str) -> list[Quality | None]:
    """One per budget, None where the method needs more."""
    budgets = sorted({found.budget for found in results})
    own = {found.budget: found for found in results if found.method == method}
    return [own.get(budget) for budget in budgets]


def quality_table(results: Results) -> Table:
    """Methods of a task by measures, three budgets in a cell, each with and without the prompt protected."""
    kinds = {False: "", True: ", prompt protected"}
    columns = [(m, kind) for m in measures(results) for kind in (kinds if m.sign else (False,))]
    table = Table("", ["", *(f"{measure.title}{kinds[kind]}" for measure, kind in columns)])
    for name in methods(results):
        cells = []
        for measure, kind in columns:
            own = only(results, kind)
            pairs = zip(by_budget(own, name), by_budget(own, FLOOR), strict=True)
            cells.append(" / ".join(measure.cell(found, floor) for found, floor in pairs))
        table.add(name, *cells)
    return table


def verdict(results: Results) -> str:
    """Who does not beat random eviction, counted over measures of quality and budgets, prompt open and protected."""
    open_, protected = (_losers(only(results, kind)) for kind in (False, True))
    return (
        f"Not better than {FLOOR} in some of their numbers: {open_ or 'none'}. With the prompt protected: "
        f"{protected or 'none'}."
    )


def _losers(results: Results) -> str:
    names = [name for name in methods(results) if name not in (DENSE, FLOOR)]
    counts = {name: _lost(results, name, measures(results)) for name in names}
    losers = sorted((item for item in counts.items() if item[1][0]), key=lambda item: -item[1][0] / item[1][1])
    return ", ".join(f"{name} ({lost} of {total})" for name, (lost, total) in losers)


def _lost(results: Results, name: str, columns: Sequence[Measure]) -> tuple[int, int]:
    """Numbers in which a method does not beat random eviction, and how many there are."""
    found = zip(by_budget(results, name), by_budget(results, FLOOR), strict=True)
    pairs = [(own, floor) for own, floor in found if own is not None and floor is not None]
    judged = [measure for measure in columns if measure.sign]
    return sum(m.loses(own, floor) for own, floor in pairs for m in judged), len(pairs) * len(judged)


def picture(results: dict[str, Results], path: Path) -> None:
    """One panel per task, the acceptance's tail: a row per method, a dot per budget, hollow with a protected prompt."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sparse_rl_lightning.report.charts import STYLE

    names = _best_last(results)
    with rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure = Figure(figsize=(3.1 * len(results) + 2.2, 0.3 * len(names) + 1.7), layout="constrained")
        axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
        for ax, (task, found) in zip(axes, results.items(), strict=True):
            for place, share in enumerate(SHARES):
                for kind, offset, face in ((False, 0.12, COLORS[place]), (True, -0.12, "white")):
                    rows = [(by_budget(only(found, kind), name)[place], row) for row, name in enumerate(names)]
                    shown = [(TAIL.value(own), row + offset) for own, row in rows if own is not None]
                    if shown:
                        label = f"{share:.0%} of the length{', prompt protected' if kind else ''}"
                        ax.plot(*zip(*shown, strict=True), "o", color=COLORS[place], mfc=face, ms=5, label=label)
            ax.set_title(f"{task.capitalize()}\n{TAIL.title}", fontsize=10)
        axes[0].set_yticks(range(len(names)), names)
        handles, labels = axes[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, facecolor="white")


def _best_last(results: dict[str, Results]) -> list[str]:
    """Rows from the bottom up: by the mean acceptance at each task's largest budget, the prompt open to eviction."""
    found = [quality for own in results.values() for quality in only(own, False)]
    names = [name for name in methods(found) if name != DENSE]
    top = {task: max(quality.budget for quality in own) for task, own in results.items()}
    tops = [q for task, own in results.items() for q in only(own, False) if q.budget == top[task]]
    score = {name: fmean(q.acceptance for q in tops if q.method == name) for name in names}
    return sorted(names, key=score.__getitem__)
