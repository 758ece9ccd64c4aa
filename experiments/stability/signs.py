"""What can be seen in a run before it falls behind: signs like those of the guards, and how often they are right."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.common.tables import Table
from experiments.arms.runs import DENSE
from experiments.stability.outcomes import fall
from experiments.stability.records import Record
from experiments.stability.results import Results
from experiments.stability.studies import AGAIN, CONTROL, MAIN, SPIRAL, STEPS, TIGHT, Study

BEHIND = 0.05  # accuracy with the full cache below that of dense training with the same prompts
FALLEN = 0.75  # of the best accuracy so far
GROUPS = {
    "main comparison": (MAIN,), "later runs": (TIGHT, *CONTROL), "spiral": (SPIRAL,),
    "steps and rates": tuple(chain(*STEPS)),
}  # fmt: skip
"""Studies to judge; the bounds of the signs were chosen on the first."""
FROZEN_GROUPS = {f"{study.budget} + 4": (study,) for study in AGAIN}
"""Those with task and rewards of their own."""
DENSE_OF = {study.recipe: study for study in (*chain(*STEPS), MAIN) if DENSE in study.arms}
"""Where dense training on sums by the same recipe is found; the last wins: for the usual one main, with six seeds."""


def dense_of(study: Study) -> Study:
    """Where dense training by a study's recipe and rewards is found."""
    return AGAIN[0] if study in AGAIN else DENSE_OF[study.recipe]


@dataclass(frozen=True)
class Sign:
    """What shows in a run, from which rollout on, and the runs that could show it."""

    name: str
    first: Callable[[Record], float | None]
    applies: Callable[[Record], bool] = lambda record: True


def above(curve: str, bound: float) -> Callable[[Record], float | None]:
    """The first part of the run in which a curve is above a bound."""
    return lambda record: next((at for at, value in _points(record, curve) if value > bound), None)


def told_of(record: Record) -> float | None:
    """The rollout of the first step that StepGuard told of."""
    return next((rollout for rollout, _ in record.long_steps or ()), None)


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
    Sign("StepGuard told of a long step", told_of, lambda record: record.long_steps is not None),
    Sign("a gradient longer than 10", above("largest_norm", 10.0)),
    Sign("a staleness ratio above 100", above("largest_ratio", 100.0)),
    Sign("more than 25 % rejected", above("rejection_rate", 0.25), lambda record: record.rejected > 0),
    Sign("more than 5 % rejected, three times the least", risen, lambda record: record.rejected > 0),
)


@dataclass(frozen=True)
class Judged:
    """A run beside what dense training ends at."""

    record: Record
    end: float  # with the full cache
    dense: float

    @property
    def is_behind(self) -> bool:
        """Whether it ends behind."""
        return self.dense - self.end > BEHIND

    def is_seen_before(self, sign: Sign) -> bool:
        """Whether a sign comes before the accuracy falls."""
        first, fallen = sign.first(self.record), fall(self.record.evaluations, FALLEN)
        return first is not None and fallen is not None and first < fallen[1]


def judged(results: Results, studies: Iterable[Study]) -> list[Judged]:
    """Every run with evictions, once, beside dense training by the same recipe with the same prompts, or on others."""
    found: dict[str, Judged] = {}
    for study in studies:
        assert study.task == MAIN.task
        dense = {seed: run.dense for seed, run in results.of(dense_of(study), DENSE).items()}
        if not dense:
            continue
        usual = statistics.fmean(dense.values())
        for arm in study.arms:
            own = results.of(study, arm) if arm.evicts else {}
            found |= {
                run.record.key: Judged(run.record, run.dense, dense.get(seed, usual)) for seed, run in own.items()
            }
    return list(found.values())


def shown(sign: Sign, runs: Sequence[Judged]) -> tuple[list[Judged], list[Judged]]:
    """Of the runs that could show a sign, those that do, and the others."""
    able = [run for run in runs if sign.applies(run.record)]
    seen = [run for run in able if sign.first(run.record) is not None]
    return seen, [run for run in able if run not in seen]


def behind(runs: Sequence[Judged]) -> str:
    """How many of the runs end behind."""
    return f"{sum(run.is_behind for run in runs)} of {len(runs)}"


def signs_table(results: Results, groups: Mapping[str, Sequence[Study]] = GROUPS) -> Table:
    """Signs by how many runs that show them end behind, and how many that do not; a run counts in its first group."""
    table = Table("", ["runs", "sign", "behind with it", "behind without it", "seen before the fall"])
    counted: set[str] = set()
    for name, studies in groups.items():
        runs = [run for run in judged(results, studies) if run.record.key not in counted]
        counted |= {run.record.key for run in runs}
        for sign in SIGNS:
            with_it, without = shown(sign, runs)
            if not with_it + without:
                continue
            seen = [run.is_seen_before(sign) for run in with_it if run.is_behind]
            table.add(name, sign.name, behind(with_it), behind(without), f"{sum(seen)} of {len(seen)}")
    return table
