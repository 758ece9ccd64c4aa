"""The tables of ``experiments.stability`` that the front pages rest on, from its kept lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common.tables import Table
from experiments.runner.outcomes import MISSING
from experiments.runner.runs import DENSE, NAIVE, SPARSE_RL, Arm
from experiments.runner.studies import Study, planned
from experiments.runner.tables import COMPRESSED, FULL, Results, add_arms, ahead_of, named
from experiments.stability.studies import AGAIN, CENTERED, REWEIGHTING

ENDS = named(FULL, COMPRESSED, "full cache, by seed", "sequences rejected", "collapsed")
BRIEFLY = named(FULL, COMPRESSED, "sequences rejected", "collapsed")


def again_table(results: Results) -> Table:
    """Arms under both caches with frozen task and rewards, and their leads."""
    return leads_table(results, AGAIN, (NAIVE, DENSE, SPARSE_RL))


def centered_table(results: Results) -> Table:
    """Arms with score centering by their leads over the kept arms, whose training has not changed since."""
    results.archive.admit(planned(AGAIN, results.where))
    return leads_table(results, CENTERED, (NAIVE, DENSE, REWEIGHTING))


def leads_table(results: Results, studies: Sequence[Study], rivals: Sequence[Arm]) -> Table:
    """Arms of studies under both caches, and their leads over some arms of AGAIN; dense rollouts know no cache."""
    dense, table = results.of(AGAIN[0], DENSE), Table("", [])
    for study, kept in zip(studies, AGAIN, strict=True):
        columns = dict(ENDS)
        for rival in rivals:
            runs = dense if rival is DENSE else results.of(kept, rival)
            columns[f"ahead of {rival.label}, {FULL}"] = ahead_of(runs, "dense")
            columns[f"ahead of {rival.label}, {COMPRESSED}"] = ahead_of(runs, str(study.budget))
        table.header = ["cache", "", *columns]
        add_arms(table, results, study, columns, f"{study.budget} + 4")
    return table


def overview(results: Results) -> Table:
    """The same under the tighter cache, beside dense training, in brief."""
    milder, tighter = AGAIN
    table = Table("", ["", *BRIEFLY])
    add_arms(table, results, replace(milder, arms=(DENSE,)), {**BRIEFLY, COMPRESSED: lambda _: MISSING})
    add_arms(table, results, tighter, BRIEFLY)  # dense training was judged under the other cache
    return table
