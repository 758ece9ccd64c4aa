"""The tables of ``experiments.real`` from the kept records of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.tables import Table
from experiments.arms.runs import Arm
from experiments.real.studies import CELL, DENSE, FIVE, HALF, MAIN, NAIVE, REPLAY, SPARSE_RL, Study
from experiments.stability.outcomes import COLLAPSED, ENOUGH, geometric, interval, mean
from experiments.stability.records import Archive, Record
from experiments.stability.results import paired
from experiments.stability.signs import SIGNS, Judged, Sign, behind, shown

MISSING = "–"
QUARTER = "a quarter"
Records = dict[int, Record]  # by seed
COLUMNS: dict[str, Callable[[Sequence[Record]], str]] = {
    "full cache, by seed": lambda runs: " / ".join(f"{run.end('dense', 1):.2f}" for run in runs),
    "sequences rejected": lambda runs: mean([run.rejected for run in runs], 1, percent=True),
    "mismatch k3": lambda runs: geometric([run.k3 for run in runs]),
    "tokens at the end": lambda runs: mean([run.curves["length"][-1] for run in runs], 0),
    "minutes": lambda runs: f"{statistics.fmean(run.minutes for run in runs):.1f}",
}


FAR = Sign("mismatch k3 above 0.05 in the last quarter", lambda record: 0.0 if record.k3 > 0.05 else None)
LEADS = ("ahead of naive, full cache", "ahead of dense, full cache", "ahead of dense, compressed")
BRIEFLY = ("", "full cache", "compressed", *LEADS, "collapsed", "sequences rejected")


@dataclass(frozen=True)
class Results:
    """All finished runs."""

    archive: Archive
    folder: Path  # of the runs
    policy: Path
    device: str
    again: Archive | None = None  # what was run once more

    def of(self, study: Study, arm: Arm) -> Records:
        """Records of an arm by seed."""
        own = [run for s in study.seeds for run in study.runs(s, self.folder, self.policy, self.device)]
        records = {run.seed: self.archive.of(run) for run in own if run.arm == arm}
        return {seed: record for seed, record in records.items() if record is not None}

    def dense(self, studies: Iterable[Study]) -> Records:
        """Those of dense training, which one of the studies has for all."""
        return next((own for study in studies if (own := self.of(study, DENSE))), {})


def before_training(dense: Records) -> dict[str, float]:
    """What the policy came to before training, by cache; empty where no run was judged then."""
    return next((row for run in dense.values() for row in run.evaluations if not row["rollouts"]), {})


def blocks(results: Results, studies: Mapping[str, Sequence[Study]]) -> dict[str, str]:
    """Every block of the page by its name, of what is finished."""
    tables: dict[str, list[Table]] = {}
    if "rates" in studies:
        tables["rates"] = [rates_table(results, studies["rates"])]
    if "main" in studies:
        whole = arms_table(results, studies["main"])
        tables["main"] = [whole]
        tables["overview"] = [overview(whole, size) for size in dict.fromkeys(row[0] for row in whole.rows)]
        tables["readme"] = [against_dense(whole)]
        tables["signs"] = [signs_table(results, studies["main"])]
    if "cell" in studies and results.again is not None:
        tables["cell"] = [cell_table(results, results.again)]
    if "learned" in studies:
        tables["learned"] = [learned_table(results, studies["learned"])]
    texts = {name: "\n\n".join(own.untitled for own in several if own.rows) for name, several in tables.items()}
    return {name: text for name, text in texts.items() if text}


def rates_table(results: Results, studies: Sequence[Study]) -> Table:
    """Steps per rollout and rates of dense training by what they come to."""
    table = Table(
        "", ("steps per rollout", "rate", "full cache", "reward of the last rollouts", "largest w", "minutes")
    )
    for study in studies:
        runs = list(results.of(study, DENSE).values())
        if runs:
            table.add(
                str(study.recipe.steps), study.recipe.rate_text, mean([run.end("dense", 1) for run in runs]),
                mean([run.curves["reward"][-1] for run in runs]), geometric([run.largest_ratio for run in runs]),
                f"{statistics.fmean(run.minutes for run in runs):.1f}",
            )  # fmt: skip
    return table


def arms_table(results: Results, studies: Sequence[Study]) -> Table:
    """Arms by the held-out reward under both caches, and by their lead over three of them."""
    rivals = (NAIVE, DENSE, SPARSE_RL)
    leads = [f"ahead of {arm.label}, {cache}" for arm in rivals for cache in ("full cache", "compressed")]
    table = Table("", ("slot", "", "full cache", "compressed", *leads, "collapsed", *COLUMNS))
    dense = results.dense(studies)
    before = before_training(dense)
    for budget in sorted((int(key) for key in before if key.isdigit()), reverse=True):
        ends = [f"{before[key]:.2f}" for key in ("dense", str(budget))]
        table.add(slot(budget), "before training", *ends, *[MISSING] * (len(table.header) - 4))
    usual = [study for study in studies if _is_snapkv(study)]
    known = {(study.budget, arm.label): results.of(study, arm) for study in usual for arm in study.arms}
    for study in studies:
        for arm in study.arms:
            own = results.of(study, arm)
            for budget in sorted(budgets_of(own) if own else (), reverse=True):
                cache, name = str(budget), arm.label if _is_snapkv(study) else f"{arm.label}, {study.method}"
                ends = {key: [run.end(key, 1) for run in own.values()] for key in ("dense", cache)}
                others = [dense if arm == DENSE else known.get((budget, arm.label), {}) for arm in rivals]
                compared = ("dense", cache if _is_snapkv(study) else "")  # chance is judged under another cache
                collapsed = sum(end < COLLAPSED * before["dense"] for end in ends["dense"]) if before else 0
                table.add(
                    slot(budget), name, mean(ends["dense"]), mean(ends[cache]),
                    *(lead(own, other, key) for other in others for key in compared),
                    f"{collapsed} of {len(own)}" if before else MISSING,
                    *(column(list(own.values())) for column in COLUMNS.values()),
                )  # fmt: skip
    return table


def _is_snapkv(study: Study) -> bool:
    return study.method == "SnapKV"


def overview(whole: Table, size: str) -> Table:
    """The columns of the comparison that its claims rest on, with slots of one size."""
    return columns_of(whole, BRIEFLY, lambda row: row[0] == size, f"With {size} of the KV memory:")


def against_dense(whole: Table) -> Table:
    """What the front page says: points by which arms end ahead of dense training."""
    rows = {(row[0], row[1]): row for row in whole.rows}
    full, compressed = (
        whole.header.index(f"ahead of {DENSE.label}, {cache}") for cache in ("full cache", "compressed")
    )
    table = Table("", ("", "half, full cache", "quarter, full cache", "quarter, compressed"))
    for arm in FIVE[1:]:
        half, quarter = (rows.get((name, arm.label)) for name in (slot(HALF), QUARTER))
        if half and quarter:
            table.add(arm.label, half[full], quarter[full], quarter[compressed])
    return table


def columns_of(whole: Table, names: tuple[str, ...], wanted: Callable[[Sequence[str]], bool], note: str = "") -> Table:
    """Some columns of a table, and those of its rows that are wanted, below a note."""
    columns = [whole.header.index(name) for name in names]
    table = Table("", names, note)
    for row in filter(wanted, whole.rows):
        table.add(*(row[column] for column in columns))
    return table


def signs_table(results: Results, studies: Sequence[Study]) -> Table:
    """Signs by how many runs that show them end behind dense training in the same seed, and how many that do not."""
    table = Table("", ("slot", "sign", "behind with it", "behind without it"))
    dense = results.dense(studies)
    judged: dict[str, list[Judged]] = {}
    for study in studies:
        for arm in study.arms:
            own = results.of(study, arm) if arm.evicts else {}
            judged.setdefault(slot(study.budget), []).extend(
                Judged(own[seed], own[seed].end("dense", 1), dense[seed].end("dense", 1))
                for seed in own.keys() & dense.keys()
            )
    for name, runs in judged.items():
        for sign in (*SIGNS, FAR):
            with_it, without = shown(sign, runs)
            if with_it + without:
                table.add(name, sign.name, behind(with_it), behind(without))
    return table


def learned_table(results: Results, studies: Sequence[Study]) -> Table:
    """Replay under each way to evict by what it comes to under its own cache, and by its lead over three of them."""
    rules = (*studies, replace(studies[0], method="SnapKV", arms=(REPLAY,)))
    own = {(study.method, arm.label): results.of(study, arm) for study in rules for arm in study.arms}
    own = {name: records for name, records in own.items() if records}
    cache, replay = str(rules[0].budget), REPLAY.label
    leads = [f"ahead of {study.method}" for study in rules]
    table = Table("", ("", "compressed", *leads, "full cache", "5th percentile of acceptance", *COLUMNS))
    for (method, arm), records in own.items():
        runs = list(records.values())
        table.add(
            f"{method}, {arm}", mean([run.end(cache, 1) for run in runs]),
            *(lead(records, own.get((study.method, replay), {}), cache) for study in rules),
            mean([run.end("dense", 1) for run in runs]), mean([run.p05 for run in runs], 3),
            *(column(runs) for column in COLUMNS.values()),
        )  # fmt: skip
    return table


def cell_table(results: Results, again: Archive) -> Table:
    """One cell as it was run first and again: its first rollout, its ends, and leads over naive in all seeds."""
    (seed,), cache, leads = CELL.seeds, str(CELL.budget), "ahead of naive, full cache, all seeds"
    first = {arm.label: results.of(MAIN[1], arm) for arm in CELL.arms}
    second = {
        arm.label: replace(results, archive=again, folder=results.folder / "again").of(CELL, arm) for arm in CELL.arms
    }
    table = Table("", ("", "when", "first rollout", "full cache", "compressed", leads))
    for name in second:
        for when, known in (("first", first), ("again", {arm: own | second[arm] for arm, own in first.items()})):
            if second[name] and seed in known[name]:
                run = known[name][seed]
                drawn = f"{run.curves['reward'][0]:.3f}, {run.curves['length'][0]:.1f} tokens"
                ends = (f"{run.end(key, 1):.3f}" for key in ("dense", cache))
                table.add(name, when, drawn, *ends, lead(known[name], known[NAIVE.label], "dense"))
    return table


def budgets_of(records: Records) -> set[int]:
    """The budgets that runs were judged under."""
    return {int(key) for run in records.values() for key in run.evaluations[-1] if key.isdigit()}


def slot(budget: int) -> str:
    """A budget in words."""
    return "a half" if budget == HALF else QUARTER


def lead(own: Records, other: Records, cache: str) -> str:
    """Points of reward by which an arm is ahead of another, paired by seed; a dash where one was not judged."""
    ends = [
        {seed: run.end(cache, 1) for seed, run in runs.items() if cache in run.evaluations[-1]} for runs in (own, other)
    ]
    leads = [100 * lead for lead in paired(*ends).values()]
    if len(leads) < ENOUGH:
        return " / ".join(f"{value:+.1f}" for value in leads) or MISSING
    return f"{statistics.fmean(leads):+.1f} ± {interval(leads):.1f}"
