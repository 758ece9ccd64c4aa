"""What can be seen in a run before it falls behind: signs that guards warn of, and how often they are right."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.arms.runs import DENSE
from benchmarks.common.tables import Table
from benchmarks.stability.outcomes import Outcome
from benchmarks.stability.records import Record
from benchmarks.stability.results import MISSING, Results
from benchmarks.stability.studies import CONTROL, MAIN, SPIRAL, TIGHT, USUAL, Study

BEHIND = 0.05  # accuracy with the full cache below that of dense training with the same prompts
FALLEN = 0.75  # of the best accuracy so far
STUDIES = (MAIN, TIGHT, SPIRAL, *CONTROL)  # one task, one recipe


@dataclass(frozen=True)
class Sign:
    """What shows in a run, and from which rollout on."""

    name: str
    first: Callable[[Record], float | None]


def above(curve: str, bound: float) -> Callable[[Record], float | None]:
    """The first part of the run in which a curve is above a bound."""
    return lambda record: next((at for at, value in _points(record, curve) if value > bound), None)


def risen(record: Record, times: float = 3.0, least: float = 0.05) -> float | None:
    """The first part of the run in which so many times more sequences are rejected than in any before."""
    lowest = 1.0
    for at, rate in _points(record, "rejection_rate"):
        if rate > max(least, times * lowest):
            return at
        lowest = min(lowest, rate)
    return None


def _points(record: Record, curve: str) -> Iterable[tuple[float, float]]:
    return zip(record.curves["rollout"], record.curves[curve], strict=True)


SIGNS = (
    Sign("a gradient longer than 10", above("largest_norm", 10.0)),
    Sign("a staleness ratio above 100", above("largest_ratio", 100.0)),
    Sign("more than 5 % rejected, three times the least", risen),
)


def fall(record: Record) -> float | None:
    """Rollouts at the first evaluation with the full cache that is below FALLEN of the best before."""
    best = 0.0
    for row in record.evaluations:
        if row["dense"] < FALLEN * best:
            return row["rollouts"]
        best = max(best, row["dense"])
    return None


@dataclass(frozen=True)
class Judged:
    """A run beside dense training with the same prompts."""

    outcome: Outcome
    dense: Outcome

    @property
    def is_behind(self) -> bool:
        """Whether it ends behind."""
        return self.dense.dense - self.outcome.dense > BEHIND

    def lead(self, sign: Sign) -> float | None:
        """Rollouts from a sign to the fall; None without either."""
        first, fallen = sign.first(self.outcome.record), fall(self.outcome.record)
        return None if first is None or fallen is None else fallen - first


def judged(results: Results, studies: Iterable[Study] = STUDIES) -> list[Judged]:
    """Every run with evictions by the usual recipe, once, whose dense counterpart is finished."""
    dense = results.of(MAIN, DENSE)
    found: dict[str, Judged] = {}
    for study in studies:
        assert study.recipe == USUAL
        for arm in study.arms:
            own = results.of(study, arm) if arm.evicts else {}
            found |= {run.record.key: Judged(run, dense[seed]) for seed, run in own.items() if seed in dense}
    return list(found.values())


def signs_table(results: Results) -> Table:
    """Signs by how many runs that show them end behind, and how many that do not, and by how early they come."""
    runs = judged(results)
    table = Table("", ["sign", "ends behind with it", "ends behind without it", "rollouts from it to the fall"])
    for sign in SIGNS:
        shown = [run for run in runs if sign.first(run.outcome.record) is not None]
        others = [run for run in runs if run not in shown]
        leads = [lead for run in shown if run.is_behind and (lead := run.lead(sign)) is not None]
        counts = [f"{sum(run.is_behind for run in part)} of {len(part)}" for part in (shown, others)]
        early = f"{statistics.median(leads):.0f} ({min(leads):.0f} to {max(leads):.0f})" if leads else MISSING
        table.add(sign.name, *counts, early)
    return table
