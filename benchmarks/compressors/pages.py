"""The table and the picture of the compressors' quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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

    def cell(self, found: Quality | None, floor: Quality) -> str:
        """A number, with the mark where it is not above the floor."""
        if found is None or math.isnan(self.value(found)):
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
MEASURES = {
    "sums": (ACCURACY, ACCEPTANCE, TAIL, SPEED),
    "stories": (PERPLEXITY, AGREEMENT, ACCEPTANCE, TAIL, SPEED),
}
DRAWN = {"sums": (ACCURACY, TAIL), "stories": (PERPLEXITY, TAIL)}


def methods(results: Results) -> list[str]:
    """Names in the order they were measured."""
    return list(dict.fromkeys(found.method for found in results))


def by_budget(results: Results, method: str) -> list[Quality | None]:
    """One per budget, None where the method needs more."""
    budgets = sorted({found.budget for found in results})
    own = {found.budget: found for found in results if found.method == method}
    return [own.get(budget) for budget in budgets]


def floors(results: Results) -> list[Quality]:
    """Random eviction, one per budget."""
    return [found for found in by_budget(results, FLOOR) if found is not None]


def over_dense(results: Results, place: int) -> Callable[[Quality], float]:
    """Perplexity over the full cache's on the same tokens, which are others at every budget."""
    dense = by_budget(results, DENSE)[place]
    assert dense is not None
    return lambda found: found.perplexity / dense.perplexity


def quality_table(results: dict[str, Results], note: str) -> Table:
    """Methods by measures, three budgets in a cell."""
    columns = [(task, measure) for task in results for measure in MEASURES[task]]
    table = Table("Measured", ["", *(f"{task}: {measure.title}" for task, measure in columns)], note)
    names = list(dict.fromkeys(name for found in results.values() for name in methods(found)))
    for name in names:
        cells = []
        for task, measure in columns:
            pairs = zip(by_budget(results[task], name), floors(results[task]), strict=True)
            cells.append(" / ".join(measure.cell(own, floor) for own, floor in pairs))
        table.add(name, *cells)
    return table


def verdict(results: dict[str, Results]) -> str:
    """Who does not beat random eviction, counted over all measures of quality and budgets."""
    lines = []
    for task, found in results.items():
        counts = {name: _lost(found, name, MEASURES[task]) for name in methods(found) if name not in (DENSE, FLOOR)}
        losers = sorted((item for item in counts.items() if item[1][0]), key=lambda item: -item[1][0] / item[1][1])
        named = ", ".join(f"{name} (in {lost} of {total})" for name, (lost, total) in losers)
        lines.append(f"On {task} these do not beat {FLOOR} in some of their numbers: {named or 'none'}.")
    return " ".join(lines)


def _lost(results: Results, name: str, measures: Sequence[Measure]) -> tuple[int, int]:
    """Numbers in which a method does not beat random eviction, and how many there are."""
    pairs = [(own, floor) for own, floor in zip(by_budget(results, name), floors(results), strict=True) if own]
    judged = [measure for measure in measures if measure.sign and not math.isnan(measure.value(pairs[0][0]))]
    return sum(m.loses(own, floor) for own, floor in pairs for m in judged), len(pairs) * len(judged)


def picture(results: dict[str, Results], path: Path) -> None:
    """One panel per task and measure, a row per method, a dot per budget, random eviction as lines."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sparse_rl_lightning.report.charts import STYLE

    panels = [(task, measure) for task in results for measure in DRAWN[task]]
    names = _best_last(results)
    with rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure = Figure(figsize=(3.1 * len(panels) + 2.2, 0.3 * len(names) + 1.7), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (task, measure) in zip(axes, panels, strict=True):
            for place, share in enumerate(SHARES):
                value = over_dense(results[task], place) if measure is PERPLEXITY else measure.value
                ax.axvline(value(floors(results[task])[place]), color=COLORS[place], lw=1.1, ls="--", alpha=0.7)
                found = [(by_budget(results[task], name)[place], row) for row, name in enumerate(names)]
                shown = [(value(own), row) for own, row in found if own is not None]
                ax.plot(*zip(*shown, strict=True), "o", color=COLORS[place], ms=5.5, label=f"{share:.0%} of the length")
            over = " / full cache's" if measure is PERPLEXITY else ""
            ax.set_title(f"{task.capitalize()}\n{measure.title}{over}", fontsize=10)
        axes[0].set_yticks(range(len(names)), names)
        handles, labels = axes[0].get_legend_handles_labels()
        line = axes[0].plot([], [], color="#6b7280", lw=1.1, ls="--")[0]
        figure.legend([*handles, line], [*labels, "random eviction"], loc="outside lower center", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, facecolor="white")


def _best_last(results: dict[str, Results]) -> list[str]:
    """Rows from the bottom up: by the mean acceptance of the budgets that all methods have, last task first."""
    found = list(results.values())[-1]
    top = max(quality.budget for quality in found)
    shared = {
        b for b in {q.budget for q in found} if len({q.method for q in found if q.budget == b}) == len(methods(found))
    }
    score = {
        name: sum(q.acceptance for q in found if q.method == name and q.budget in (shared or {top}))
        for name in methods(found)
    }
    return sorted((name for name in score if name not in (DENSE, FLOOR)), key=score.__getitem__)
