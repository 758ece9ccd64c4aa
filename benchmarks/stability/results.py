"""The tables of docs/results.md from the finished runs of ``benchmarks.stability``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.arms.curves import Found
from benchmarks.arms.runs import DENSE, NAIVE, REPLAY, Arm
from benchmarks.common.tables import Table
from benchmarks.stability.outcomes import Outcome, geometric, mean
from benchmarks.stability.studies import (
    ABLATION,
    ALL,
    BUDGET,
    BUDGETS,
    MAIN,
    OFFICIAL,
    PAPER,
    REJECTION,
    REWEIGHTING,
    RKV,
    THREE,
    Study,
)

MISSING = "–"
COLUMNS: dict[str, Callable[[Sequence[Outcome]], str]] = {
    "full cache": lambda runs: mean([run.dense for run in runs]),
    "compressed cache": lambda runs: mean([run.sparse for run in runs]),
    "tokens saved": lambda runs: mean([run.saved for run in runs], 0, percent=True),
    "sequences rejected": lambda runs: mean([run.rejected for run in runs], 1, percent=True),
    "clip ratio": lambda runs: f"{statistics.fmean(run.clipped for run in runs):.2g}",
    "mismatch k3": lambda runs: geometric([run.k3 for run in runs]),
    "acceptance P5": lambda runs: mean([run.p05 for run in runs]),
    "collapsed": lambda runs: f"{sum(run.collapsed for run in runs)} of {len(runs)}",
    "minutes": lambda runs: f"{statistics.fmean(run.minutes for run in runs):.1f}",
}


BRIEFLY = ("full cache", "compressed cache", "sequences rejected")


def briefly(own: dict[int, Outcome]) -> list[str]:
    """The cells of those three columns, for an arm that may not have been run yet."""
    return [COLUMNS[name](list(own.values())) if own else MISSING for name in BRIEFLY]


@dataclass(frozen=True)
class Results:
    """All finished runs."""

    found: Sequence[Found]

    def of(self, study: Study, arm: Arm, budget: int) -> dict[int, Outcome]:
        """Outcomes of an arm by seed."""
        return {one.run.seed: Outcome.of(one, budget) for one in self.runs(study, arm, budget)}

    def dense(self, task: str, budget: int) -> dict[int, Outcome]:
        """Dense rollouts on a task, which know of no compressor."""
        return next(self.of(study, DENSE, budget) for study in MAIN if study.task == task)

    def runs(self, study: Study, arm: Arm, budget: int) -> list[Found]:
        """The same runs with all they noted."""
        return [
            one
            for one in self.found
            if one.run.arm == arm and budget in one.run.budgets and one.run.settings.folder.name == study.place
        ]


def arms_table(results: Results, study: Study) -> Table:
    """Arms by what came of them, the policy before training first."""
    table = Table("", ["", *COLUMNS, "dense kept"])
    budget = study.budgets[0]
    started = list(results.of(study, study.arms[0], budget).values())
    if started:
        first = [mean([run.dense_before for run in started]), mean([run.sparse_before for run in started])]
        table.add("before training", *first, *[MISSING] * (len(COLUMNS) - 1))
    dense = results.dense(study.task, budget)
    for arm in study.arms:
        own = results.of(study, arm, budget)
        if own:
            table.add(arm.label, *(column(list(own.values())) for column in COLUMNS.values()), kept(own, dense))
    return table


def kept(own: dict[int, Outcome], dense: dict[int, Outcome]) -> str:
    """Mean accuracy with the full cache over that of dense rollouts, of the seeds that both have."""
    seeds = sorted(own.keys() & dense.keys())
    total = sum(dense[seed].dense for seed in seeds)
    return f"{sum(own[seed].dense for seed in seeds) / total:.0%}" if total else MISSING


def budgets_table(results: Results) -> Table:
    """Three arms under three budgets."""
    header = ["", *(f"budget {budget}: {what}" for budget in BUDGETS for what in ("full", "compressed", "rejected"))]
    table = Table("", [*header, "dense kept, by budget", "collapsed, by budget"])
    for arm in THREE:
        cells, shares, collapsed = [], [], []
        for budget in BUDGETS:
            own = results.of(ABLATION, arm, budget)
            cells += briefly(own)
            shares.append(kept(own, results.dense(ABLATION.task, budget)))
            collapsed.append(COLUMNS["collapsed"](list(own.values())) if own else MISSING)
        table.add(arm.label, *cells, " / ".join(shares), " / ".join(collapsed))
    return table


Measure = Callable[[Outcome], float]


def difference(own: dict[int, Outcome], other: dict[int, Outcome], of: Measure) -> str:
    """Points of accuracy by which an arm is ahead of another, paired by seed."""
    points = [100 * (of(own[seed]) - of(other[seed])) for seed in sorted(own.keys() & other.keys())]
    return mean(points, 1, signed=True) if points else MISSING


def against(results: Results, arms: Sequence[Arm], other: Arm) -> Table:
    """Arms by their lead over another, on both tasks and with both caches."""
    caches: dict[str, Measure] = {"full": lambda run: run.dense, "compressed": lambda run: run.sparse}
    table = Table("", ["", *(f"{study.task}, {cache} cache" for study in MAIN for cache in caches)])
    for arm in arms:
        table.add(
            arm.label,
            *(
                difference(results.of(study, arm, BUDGET), results.of(study, other, BUDGET), of)
                for study in MAIN
                for of in caches.values()
            ),
        )
    return table


def overview(results: Results) -> Table:
    """Arms by their accuracies on both tasks: what the README shows."""
    table = Table("", ["", *(f"{study.task}: {name}" for study in MAIN for name in BRIEFLY)])
    for arm in ALL:
        table.add(arm.label, *(cell for study in MAIN for cell in briefly(results.of(study, arm, BUDGET))))
    return table


def tables(results: Results) -> dict[str, str]:
    """Every block of the page by its name."""
    evicting = [arm for arm in ALL if arm.evicts]
    blocks = {
        **{f"main, {study.task}": arms_table(results, study) for study in MAIN},
        "budgets": budgets_table(results),
        "sparse inference": against(results, evicting, DENSE),
        "corrections": against(results, (REJECTION, REWEIGHTING, PAPER, OFFICIAL), NAIVE),
        "replay": against(results, (REPLAY,), PAPER),
        "R-KV": arms_table(results, RKV),
    }
    return {name: table.untitled for name, table in blocks.items()}
