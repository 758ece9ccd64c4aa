"""The tables of docs/measured/real.md from the kept lines of ``experiments.real``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.tables import Table
from experiments.real.studies import (
    CELL,
    CENTERED,
    DENSE,
    FIVE,
    HALF,
    MAIN,
    NAIVE,
    QUARTER,
    REWEIGHTING,
    SPARSE_RL,
)
from experiments.runner.outcomes import MISSING, lead
from experiments.runner.runs import Arm
from experiments.runner.studies import planned
from experiments.runner.tables import (
    COLUMNS,
    COMPRESSED,
    FULL,
    Column,
    Columns,
    Results,
    add_row,
    ahead_of,
    named,
    started,
)

ENDING = named("full cache, by seed", "sequences rejected", "mismatch k3", "tokens at the end", "minutes")
LEADS = ("ahead of naive, full cache", "ahead of dense, full cache", "ahead of dense, compressed")
BRIEFLY = ("", FULL, "compressed", *LEADS, "collapsed", "sequences rejected")


def slot(budget: int) -> str:
    """A budget in words."""
    return "a half" if budget == HALF else "a quarter"


def arms_table(results: Results) -> Table:
    """Arms by the held-out reward under both caches, and by their lead over three of them."""
    before, budgets = started(results, MAIN, "dense"), (HALF, QUARTER)
    columns = {budget: arms_columns(results, budget, before) for budget in budgets}
    table = Table("", ["slot", "", *columns[HALF]])
    for budget in budgets if before is not None else ():
        ends = [f"{value:.2f}" for value in (before, started(results, MAIN, str(budget))) if value is not None]
        table.add(slot(budget), "before training", *ends, *[MISSING] * (len(columns[HALF]) - len(ends)))
    for study in MAIN:
        for arm in study.arms:
            for budget in budgets if arm == DENSE else (study.budget,):
                shown = columns[budget] if study.method == "SnapKV" else without_leads(columns[budget])
                name = arm.label if study.method == "SnapKV" else f"{arm.label}, {study.method}"
                add_row(table, results.of(study, arm, budget), shown, slot(budget), name)
    return table


def arms_columns(
    results: Results, budget: int, before: float | None, rivals: Sequence[Arm] = (NAIVE, DENSE, SPARSE_RL)
) -> dict[str, Column]:
    """The columns of arms under a budget, whose rivals had the same slots under SnapKV."""
    (source,) = (study for study in MAIN if study.method == "SnapKV" and study.budget == budget)
    columns: dict[str, Column] = {FULL: COLUMNS[FULL], "compressed": COLUMNS[COMPRESSED]}
    for rival in rivals:
        runs = results.of(source if rival != DENSE else MAIN[0], rival, budget)
        columns[f"ahead of {rival.label}, full cache"] = ahead_of(runs, "dense")
        columns[f"ahead of {rival.label}, compressed"] = ahead_of(runs, str(budget))
    columns["collapsed"] = lambda runs: f"{sum(run.collapsed(before) for run in runs.values())} of {len(runs)}"
    return columns | ENDING


def without_leads(columns: Columns) -> Columns:
    """The same for arms that are judged under another compressed cache than the rivals."""
    return {name: (lambda _: MISSING) if name.endswith(", compressed") else column for name, column in columns.items()}


def overview(results: Results) -> list[Table]:
    """The columns of the comparison that its claims rest on, a table for slots of each size."""
    whole = arms_table(results)
    places = [whole.header.index(name, 1) for name in BRIEFLY]
    tables = []
    for size in dict.fromkeys(row[0] for row in whole.rows):
        rows = [[row[index] for index in places] for row in whole.rows if row[0] == size]
        tables.append(Table("", BRIEFLY, f"With {size} of the KV memory:", rows))
    return tables


def against_dense(results: Results) -> Table:
    """What the front page says: points by which arms end ahead of dense training."""
    columns = {budget: ahead_of(results.of(MAIN[0], DENSE, budget), "dense") for budget in (HALF, QUARTER)}
    under = ahead_of(results.of(MAIN[0], DENSE, QUARTER), str(QUARTER))
    table = Table("", ("", "half, full cache", "quarter, full cache", "quarter, compressed"))
    for arm in FIVE[1:]:
        half, quarter = (results.of(study, arm) for study in MAIN[:2])
        if half and quarter:
            table.add(arm.label, columns[HALF](half), columns[QUARTER](quarter), under(quarter))
    return table


def centered_table(results: Results) -> Table:
    """Centering with weights under a quarter, by its leads over kept arms, whose training has not changed since."""
    results.archive.admit(planned(MAIN, results.where))
    columns = arms_columns(results, QUARTER, started(results, MAIN, "dense"), (NAIVE, DENSE, REWEIGHTING))
    table = Table("", ["", *columns])
    for arm in CENTERED.arms:
        add_row(table, results.of(CENTERED, arm), columns, arm.label)
    return table


def cell_table(results: Results) -> Table:
    """One cell as it was run first and again: its first rollout, its ends, and leads over naive in all seeds."""
    (seed,) = CELL.seeds
    table = Table("", ("", "when", "first rollout", FULL, "compressed", "ahead of naive, full cache, all seeds"))
    first = {arm.label: results.of(MAIN[1], arm) for arm in CELL.arms}
    second = {arm.label: results.of(CELL, arm) for arm in CELL.arms}
    for name in second:
        for when, runs in (("first", first), ("again", {arm: runs | second[arm] for arm, runs in first.items()})):
            if second[name] and seed in runs[name]:
                run = runs[name][seed]
                curves = run.record.curves
                drawn = f"{curves['reward'][0]:.3f}, {curves['length'][0]:.1f} tokens"
                ahead = lead(runs[name], runs[NAIVE.label], "dense")
                table.add(name, when, drawn, f"{run.dense:.3f}", f"{run.sparse:.3f}", ahead)
    return table
