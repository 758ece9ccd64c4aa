"""Tables of arms: what their runs came to, a row per arm and a column per question."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.tables import Table
from experiments.runner.outcomes import MISSING, Outcome, Runs, geometric, lead, mean, paired
from experiments.runner.records import SPIKE, Archive
from experiments.runner.runs import Arm
from experiments.runner.studies import Study, Where

Column = Callable[[Runs], str]
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Results:
    """All finished runs."""

    where: Where
    archive: Archive

    def of(self, study: Study, arm: Arm, budget: int | None = None) -> dict[int, Outcome]:
        """Outcomes of an arm by seed, under the study's budget or another that its runs were judged under."""
        runs = {seed: run for seed in study.seeds for run in study.runs(seed, self.where) if run.arm == arm}
        records = {seed: self.archive.of(run) for seed, run in runs.items()}
        under = study.budget if budget is None else budget
        return {s: Outcome(record, under, study.last) for s, record in records.items() if record is not None}


def of_each(value: Callable[[Outcome], float], digits: int = 2, percent: bool = False) -> Column:
    """A column with the mean over the seeds."""
    return lambda runs: mean([value(run) for run in runs.values()], digits, percent)


def ratio(value: Callable[[Outcome], float]) -> Column:
    """A column with the geometric mean over the seeds."""
    return lambda runs: geometric([value(run) for run in runs.values()])


def ahead_of(rivals: Runs, cache: str) -> Column:
    """A column with the lead over another arm in the same seeds."""
    return lambda runs: lead(runs, rivals, cache)


def collapsed(runs: Runs) -> str:
    """How many have, of those that were judged before training; a dash where none was."""
    judged = [run for run in runs.values() if run.before("dense") is not None]
    return f"{sum(run.collapsed() for run in judged)} of {len(judged)}" if judged else MISSING


T_OF = {8: 1.895, 13: 1.782}  # Student's t at 95 %, by the number of seeds
FULL, COMPRESSED = "full cache", "compressed cache"
COLUMNS: Columns = {
    FULL: of_each(lambda run: run.dense),
    COMPRESSED: lambda runs: mean([run.sparse for run in runs.values() if run.sparse is not None]) or MISSING,
    "full cache, by seed": lambda runs: " / ".join(f"{run.dense:.2f}" for run in runs.values()),
    "tokens saved": of_each(lambda run: run.record.saved, 0, percent=True),
    "sequences rejected": of_each(lambda run: run.record.rejected, 1, percent=True),
    "mismatch k3": ratio(lambda run: run.record.k3),
    "acceptance P5": of_each(lambda run: run.record.p05),
    "largest w": ratio(lambda run: run.record.largest_ratio),
    f"steps with a gradient above {SPIKE:g}": of_each(lambda run: run.record.spikes, 1, percent=True),
    "tokens at the end": of_each(lambda run: run.record.curves["length"][-1], 0),
    "collapsed": collapsed,
    "minutes": lambda runs: f"{statistics.fmean(run.record.minutes for run in runs.values()):.1f}",
}


def named(*names: str) -> dict[str, Column]:
    """Some of the usual columns."""
    return {name: COLUMNS[name] for name in names}


def add_row(table: Table, runs: Runs, columns: Columns, *first: str) -> None:
    """A row of what runs came to behind some first cells; none where nothing is finished."""
    if runs:
        table.add(*first, *(column(runs) for column in columns.values()))


def add_arms(table: Table, results: Results, study: Study, columns: Columns, *first: str) -> None:
    """A row per arm that has finished runs, behind some first cells."""
    for arm in study.arms:
        add_row(table, results.of(study, arm), columns, *first, arm.label)


def started(results: Results, studies: Iterable[Study], cache: str) -> float | None:
    """What the policy came to with a cache before training: the first run of the studies that was judged then."""
    arms = [(study, arm) for study in studies for arm in sorted(study.arms, key=lambda arm: not arm.evicts)]
    values = (run.before(cache) for study, arm in arms for run in results.of(study, arm).values())
    return next((value for value in values if value is not None), None)


def equivalence_table(results: Results, study: Study) -> Table:
    """A dense arm and another, by the end and by the interval of the test."""
    dense, _ = ends = [results.of(study, arm) for arm in study.arms]
    columns: dict[str, Column] = {
        **named(FULL, "full cache, by seed"),
        "ahead of dense": ahead_of(dense, "dense"),
        "90 % interval": lambda runs: ninety(list(paired(fulls(runs), fulls(dense)).values()), len(study.seeds)),
        **named("tokens saved", "sequences rejected", "mismatch k3", "minutes"),
    }
    table = Table("", ["", "seeds", *columns])
    for arm, runs in zip(study.arms, ends, strict=True):
        add_row(table, runs, columns, arm.label, str(len(runs)))
    return table


def fulls(runs: Runs) -> dict[int, float]:
    """Ends with the full cache by seed."""
    return {seed: run.dense for seed, run in runs.items()}


def ninety(leads: Sequence[float], seeds: int) -> str:
    """The 90 % interval of a mean lead in points, which lies within the margin where two one-sided tests at 5 % say so.

    A dash before the last seed of the protocol.
    """
    if len(leads) < seeds:
        return MISSING
    middle, half = 100 * statistics.fmean(leads), 100 * T_OF[seeds] * statistics.stdev(leads) / math.sqrt(seeds)
    return f"{middle - half:+.1f} to {middle + half:+.1f}"


def plain_table(results: Results, studies: Sequence[Study]) -> Table:
    """Studies without tables of their own: every arm under every cache and recipe by the usual columns."""
    table = Table("", ["study", "budget", "", *COLUMNS])
    for study in studies:
        add_arms(table, results, study, COLUMNS, study.place, str(study.budget))
    return table
