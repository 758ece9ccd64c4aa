"""The tables of docs/measured/stability.md from the kept records of ``experiments.stability``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.tables import Table
from experiments.arms.runs import DENSE, NAIVE, REPLAY, Arm
from experiments.stability.outcomes import Outcome, geometric, mean
from experiments.stability.records import SPIKE, Archive
from experiments.stability.studies import (
    AGAIN,
    CONTROL,
    COUNTDOWN,
    DELTA,
    DRAWN,
    FOUR,
    MAIN,
    QUIET,
    REJECTION,
    REMEDIES,
    REWEIGHTING,
    SPARSE_RL,
    SPIRAL,
    STEPS,
    TIGHT,
    Study,
)

MISSING = "–"
COLUMNS: dict[str, Callable[[Sequence[Outcome]], str]] = {
    "full cache": lambda runs: mean([run.dense for run in runs]),
    "compressed cache": lambda runs: mean([run.sparse for run in runs]),
    "full cache, by seed": lambda runs: " / ".join(f"{run.dense:.2f}" for run in runs),
    "tokens saved": lambda runs: mean([run.record.saved for run in runs], 0, percent=True),
    "sequences rejected": lambda runs: mean([run.record.rejected for run in runs], 1, percent=True),
    "mismatch k3": lambda runs: geometric([run.record.k3 for run in runs]),
    "acceptance P5": lambda runs: mean([run.record.p05 for run in runs]),
    "largest w": lambda runs: geometric([run.record.largest_ratio for run in runs]),
    f"steps with a gradient above {SPIKE:g}": lambda runs: mean([run.record.spikes for run in runs], 1, percent=True),
    "collapsed": lambda runs: f"{sum(run.collapsed for run in runs)} of {len(runs)}",
    "minutes": lambda runs: f"{statistics.fmean(run.record.minutes for run in runs):.1f}",
}
BEFORE: dict[str, Callable[[Outcome], float]] = {
    "full cache": lambda run: run.dense_before,
    "compressed cache": lambda run: run.sparse_before,
}
ENDING: dict[str, Callable[[Outcome], float]] = {
    "full cache": lambda run: run.dense,
    "compressed cache": lambda run: run.sparse,
}
BRIEFLY = ("full cache", "compressed cache", "sequences rejected")
ENDS = ("full cache", "compressed cache", "full cache, by seed", "sequences rejected", "collapsed")
MOST, PARTS = "most rejected in ten rollouts", (0, 5, 11, 17, 23)
"""The largest of a run's parts, of ten rollouts each, and the parts whose course is shown."""
COURSE = [name for name in COLUMNS if name not in ENDS]
Outcomes = dict[int, Outcome]  # by seed


@dataclass(frozen=True)
class Results:
    """All finished runs."""

    archive: Archive
    folder: Path  # of the runs

    def of(self, study: Study, arm: Arm) -> Outcomes:
        """Outcomes of an arm by seed."""
        runs = {seed: run for seed in study.seeds for run in study.runs(seed, self.folder) if run.arm == arm}
        records = {seed: self.archive.of(run) for seed, run in runs.items()}
        return {seed: Outcome(record, study.budget) for seed, record in records.items() if record is not None}


def arms_table(results: Results, study: Study) -> Table:
    """Arms by what came of them, the policy before training first; dense rollouts are those of the main comparison."""
    table = Table("", ["", *ENDS, "dense kept"])
    dense = results.of(MAIN, DENSE)
    started = [run for arm in study.arms for run in results.of(study, arm).values()][:1]  # the same policy for all
    for run in started:
        before = {name: f"{value(run):.2f}" for name, value in BEFORE.items()}
        table.add("before training", *(before.get(name, MISSING) for name in ENDS), MISSING)
    for arm in study.arms:
        own = results.of(study, arm)
        if own:
            table.add(arm.label, *cells(results, study, arm, ENDS), kept(own, dense))
    return table


def again_table(results: Results, studies: Sequence[Study] = AGAIN) -> Table:
    """Arms under both caches with frozen task and rewards, and their leads; dense rollouts know no cache."""
    rivals = (NAIVE, DENSE, SPARSE_RL)
    heads = [f"ahead of {arm.label}, {cache}" for arm in rivals for cache in ENDING]
    table = Table("", ["cache", "", *ENDS, *heads])
    dense = results.of(studies[0], DENSE)
    for study in studies:
        others = [dense if arm is DENSE else results.of(study, arm) for arm in rivals]
        for arm in study.arms:
            own = results.of(study, arm)
            if own:
                leads = [difference(own, other, end) for other in others for end in ENDING.values()]
                if study is not studies[0]:  # dense training was judged under the first compressed cache
                    leads[heads.index(f"ahead of {DENSE.label}, compressed cache")] = MISSING
                table.add(f"{study.budget} + 4", arm.label, *cells(results, study, arm, ENDS), *leads)
    return table


def course_table(results: Results, study: Study) -> Table:
    """Arms by what they went through."""
    table = Table("", ["", *COURSE])
    for arm in study.arms:
        if results.of(study, arm):
            table.add(arm.label, *cells(results, study, arm, COURSE))
    return table


def kept(own: Outcomes, dense: Outcomes) -> str:
    """Mean accuracy with the full cache over that of dense rollouts, of the seeds that both have."""
    seeds = sorted(own.keys() & dense.keys())
    total = sum(dense[seed].dense for seed in seeds)
    return f"{sum(own[seed].dense for seed in seeds) / total:.0%}" if total else MISSING


def difference(own: Outcomes, other: Outcomes, of: Callable[[Outcome], float]) -> str:
    """Points of accuracy by which an arm is ahead of another, paired by seed."""
    return points(paired(*({seed: of(run) for seed, run in arm.items()} for arm in (own, other))))


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Differences by seed, of the seeds that both have."""
    return {seed: own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())}


def points(leads: Mapping[int, float]) -> str:
    """Differences of accuracies in points."""
    return mean([100 * lead for lead in leads.values()], 1, signed=True) if leads else MISSING


def leads(results: Results, study: Study) -> Table:
    """Arms by their lead over three others with the full cache, and over two with the compressed one."""
    others = {DENSE.label: results.of(MAIN, DENSE), **{arm.label: results.of(study, arm) for arm in (NAIVE, SPARSE_RL)}}
    under = [SPARSE_RL.label]
    if study.budget == MAIN.budget:  # dense rollouts were judged under one compressed cache
        under = [DENSE.label, *under]
    table = Table(
        "", ["", *(f"{name}, full cache" for name in others), *(f"{name}, compressed cache" for name in under)]
    )
    for arm in study.arms:
        own = results.of(study, arm)
        if own:
            full = [difference(own, other, lambda run: run.dense) for other in others.values()]
            table.add(arm.label, *full, *(difference(own, others[name], lambda run: run.sparse) for name in under))
    return table


def quiet_table(results: Results, studies: Sequence[Study] = QUIET) -> Table:
    """Recipes by how far the seeds of dense training lie apart."""
    table = Table("", ["recipe", "full cache, by seed", "mean", "largest distance of two seeds", "minutes"])
    for study in studies:
        own = list(results.of(study, DENSE).values())
        if own:
            ends = [run.dense for run in own]
            spread = f"{max(ends) - min(ends):.3f}" if len(ends) > 1 else MISSING
            minutes = f"{statistics.fmean(run.record.minutes for run in own):.1f}"
            each = " / ".join(f"{end:.3f}" for end in ends)
            table.add(str(study.recipe), each, f"{statistics.fmean(ends):.3f}", spread, minutes)
    return table


def steps_table(results: Results, rows: Sequence[Sequence[Study]] = STEPS) -> Table:
    """Optimizer steps per rollout and learning rates: what each arm comes to by seed, and Sparse-RL's lead."""
    far = (NAIVE, DELTA)  # arms whose staleness ratios are shown
    updates = min(studies[0].recipe.steps * studies[0].recipe.rollouts for studies in rows)
    table = Table("", [
        "steps × rate", *(arm.label for arm in FOUR),
        *(f"{SPARSE_RL.label} ahead of {NAIVE.label}, {cache}" for cache in ENDING),
        f"{NAIVE.label} after {updates} updates", *(f"largest w, {arm.label}" for arm in far),
    ])  # fmt: skip
    for studies in rows:
        recipe = studies[0].recipe
        own = {arm.label: of_any(results, studies, arm) for arm in FOUR}
        ends = [COLUMNS["full cache, by seed"](list(outcomes.values())) or MISSING for outcomes in own.values()]
        ours, naive = own[SPARSE_RL.label], own[NAIVE.label]
        early = " / ".join(f"{run.dense_after(updates / recipe.steps):.2f}" for run in naive.values()) or MISSING
        ratios = [COLUMNS["largest w"](list(own[arm.label].values())) if own[arm.label] else MISSING for arm in far]
        table.add(
            f"{recipe.steps} × {recipe.rate_text}",
            *ends,
            *(difference(ours, naive, end) for end in ENDING.values()),
            early,
            *ratios,
        )
    return table


def fewer_table(results: Results, rows: Sequence[Sequence[Study]] = STEPS) -> Table:
    """What fewer optimizer steps per rollout bring an arm, full cache: mean over the rates, paired by seed."""
    by_steps: dict[int, list[Sequence[Study]]] = {}
    for studies in rows:
        by_steps.setdefault(studies[0].recipe.steps, []).append(studies)
    *fewer, most = sorted(by_steps)
    heads = [f"{steps} instead of {most}" for steps in fewer]
    table = Table("", ["", *heads, *(f"{head}, beyond {DENSE.label}" for head in heads)])
    dense: dict[int, dict[int, float]] = {}  # its gains by steps
    for arm in (DENSE, NAIVE, SPARSE_RL):
        ends = {steps: over_rates([of_any(results, one, arm) for one in own]) for steps, own in by_steps.items()}
        gains = {steps: paired(ends[steps], ends[most]) for steps in fewer}
        dense = dense or gains
        beyond = [paired(gains[steps], dense[steps]) for steps in fewer]
        table.add(arm.label, *map(points, (*gains.values(), *beyond)))
    return table


def of_any(results: Results, studies: Sequence[Study], arm: Arm) -> Outcomes:
    """Outcomes of an arm by seed, from whichever of the studies has it."""
    return {seed: run for study in studies for seed, run in results.of(study, arm).items()}


def over_rates(rates: Sequence[Outcomes]) -> dict[int, float]:
    """Mean accuracy with the full cache by seed, of the seeds that were run at every rate."""
    seeds = set.intersection(*(set(own) for own in rates))
    return {seed: statistics.fmean(own[seed].dense for own in rates) for seed in seeds}


def control_table(results: Results, studies: Sequence[Study] = CONTROL) -> Table:
    """Methods by what training under them comes to, chance first."""
    table = Table("", ["", *(f"{arm.label}, {name}" for arm in studies[0].arms for name in BRIEFLY)])
    for study in studies:
        table.add(study.method, *(cell for arm in study.arms for cell in cells(results, study, arm, BRIEFLY)))
    return table


def chance_table(results: Results, studies: Sequence[Study] = CONTROL) -> Table:
    """Points by which training under chance ends ahead of that under SnapKV, with the prompt open and protected."""
    arms, half = studies[0].arms, len(studies) // 2  # those of chance come first
    table = Table("", ["", *(f"{arm.label}, {cache}" for arm in arms for cache in ENDING)])
    for name, chance, rival in zip(("prompt open", "prompt protected"), studies[:half], studies[half:], strict=True):
        own = [(results.of(chance, arm), results.of(rival, arm)) for arm in arms]
        table.add(name, *(difference(*pair, end) for pair in own for end in ENDING.values()))
    return table


def spiral_table(results: Results, study: Study = SPIRAL) -> Table:
    """Arms that reject by what came of them, and by their lead over rejection alone."""
    table = Table("", ["", *ENDS, f"ahead of {REJECTION.label}, full cache"])
    rejection = results.of(study, REJECTION)
    for arm in study.arms:
        lead = difference(results.of(study, arm), rejection, lambda run: run.dense)
        table.add(arm.label, *cells(results, study, arm, ENDS), lead)
    return table


def most_rejected(run: Outcome) -> float:
    """The largest share of sequences that a run rejected in any ten rollouts."""
    return max(run.record.curves["rejection_rate"])


def remedies_table(results: Results, study: Study = REMEDIES) -> Table:
    """What may keep Sparse-RL from rejecting more and more, beside it and weights alone in the same seeds."""
    table = Table("", ["", *ENDS, MOST, f"ahead of {SPARSE_RL.label}, full cache"])
    beside = replace(study, arms=(SPARSE_RL, REWEIGHTING))
    rival = results.of(beside, SPARSE_RL)
    for own_study in (beside, study):
        for arm in own_study.arms:
            own = results.of(own_study, arm)
            most = mean([most_rejected(run) for run in own.values()], 0, percent=True) if own else MISSING
            lead = difference(own, rival, lambda run: run.dense)
            table.add(arm.label, *cells(results, own_study, arm, ENDS), most, lead)
    return table


def rejecting_table(results: Results, studies: Sequence[Study] = AGAIN) -> Table:
    """Rejecting and only reweighting over the rollouts, in parts of ten: rewards, lengths, and what is rejected."""
    table = Table("", ["cache", "", "", *(f"rollouts {10 * part + 1} to {10 * part + 10}" for part in PARTS)])
    forms: dict[str, Callable[[Sequence[float]], str]] = {"reward": mean, "length": lambda own: mean(own, 1)}
    for study in studies:
        for arm in (SPARSE_RL, REWEIGHTING):
            own = results.of(study, arm)
            for name, form in forms.items():
                parts = [[run.record.curves[name][part] for run in own.values()] for part in PARTS if own]
                table.add(
                    f"{study.budget} + 4", arm.label, name, *(map(form, parts) if parts else [MISSING] * len(PARTS))
                )
        for seed, run in results.of(study, SPARSE_RL).items():
            rates = [f"{run.record.curves['rejection_rate'][part]:.0%}" for part in PARTS]
            table.add(f"{study.budget} + 4", SPARSE_RL.label, f"rejected, seed {seed}", *rates)
    return table


def countdown_table(results: Results, studies: Mapping[str, Study] = COUNTDOWN) -> Table:
    """Arms by accuracy under the cache they trained with, and with the full one at the larger; leads there."""
    larger, smaller = studies
    study = studies[larger]
    judged = ((larger, "compressed cache"), (larger, "full cache"), (smaller, "compressed cache"))
    rivals = {rival.label: results.of(study, rival) for rival in (NAIVE, REPLAY, DRAWN)}
    heads = [f"{cache}, {part}" for part, cache in judged]
    table = Table("", ["", *heads, *(f"ahead of {rival}, {heads[0]}" for rival in rivals)])
    before: list[str] = []
    for part, cache in judged:
        own = [run for arm in studies[part].arms for run in results.of(studies[part], arm).values()]
        started = own[:1]  # the same policy for all
        before += [f"{BEFORE[cache](run):.2f}" for run in started] or [MISSING]
    table.add("before training", *before, *[MISSING] * len(rivals))
    for arm in study.arms:
        ends = [cell for part, cache in judged for cell in cells(results, studies[part], arm, [cache])]
        ahead = [difference(results.of(study, arm), rival, lambda run: run.sparse) for rival in rivals.values()]
        table.add(arm.label, *ends, *ahead)
    return table


def overview(results: Results) -> Table:
    """Arms with frozen task and rewards under the tighter cache, beside dense training, in brief."""
    milder, tighter = AGAIN
    table = Table("", ["", *BRIEFLY, "collapsed"])
    for study, arm in ((milder, DENSE), *((tighter, arm) for arm in tighter.arms)):
        full, compressed, *others = cells(results, study, arm, [*BRIEFLY, "collapsed"])
        table.add(arm.label, full, compressed if study is tighter else MISSING, *others)  # dense: judged under another
    return table


def cells(results: Results, study: Study, arm: Arm, names: Sequence[str]) -> list[str]:
    """Columns of an arm by their names."""
    own = list(results.of(study, arm).values())
    return [COLUMNS[name](own) if own else MISSING for name in names]


def rounding(results: Results) -> float:
    """The largest k3 between the sampler and its replay of any run."""
    known = [record.rounding for record in results.archive.records.values() if math.isfinite(record.rounding)]
    return max(known, default=0.0)


def tables(results: Results) -> dict[str, str]:
    """Every block of the page by its name."""
    blocks = {
        "how quiet": quiet_table(results), "main": arms_table(results, MAIN),
        "course": course_table(results, MAIN), "leads": leads(results, MAIN),
        "tight": arms_table(results, TIGHT), "tight leads": leads(results, TIGHT),
        "steps and rates": steps_table(results), "fewer steps": fewer_table(results),
        "countdown": countdown_table(results), "control": control_table(results), "chance": chance_table(results),
        "spiral": spiral_table(results), "again": again_table(results), "rejecting": rejecting_table(results),
        "remedies": remedies_table(results),
    }  # fmt: skip
    return {name: table.untitled for name, table in blocks.items()}
