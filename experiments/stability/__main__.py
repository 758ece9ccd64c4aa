"""The papers' claims at laptop scale: who collapses, what each correction brings, and what replay adds.

    python -m experiments.stability [--studies quiet main] [--seeds 10 11] [--jobs 2] [--save docs/measured]

The protocol stands in docs/measured/stability.md. Every run is `sparse-rl fit` with a shipped configuration in a
process of its own, in a folder below --runs, from one warm-up per task. What an interrupted run has is kept: it goes
on from its last checkpoint. What a finished run came to is a line in --kept, a file of the repository, and a run that
has one is not run again, unless its rewards, task or compressor have other code now: delete the line to have it anew.
Seeds come one after the other, so that an early end leaves whole ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from benchmarks.common import kept
from benchmarks.common.pages import insert, insert_if_marked, mark, say
from experiments.arms.runs import CONFIGS, Run, run_in
from experiments.stability.execution import execute
from experiments.stability.pictures import pictures
from experiments.stability.records import Archive
from experiments.stability.results import Results, overview, rounding, tables
from experiments.stability.signs import FROZEN_GROUPS, signs_table
from experiments.stability.studies import GROUPS, SHORT, TASKS, Study, planned, warmed

PAGE = "stability.md"


def warm_up(folder: Path, tasks: Collection[str]) -> None:
    """Train the policies that all runs start from, one per task, where they are not there yet."""
    for task, config in TASKS.items():
        if task in tasks and not (warmed(folder, config) / "config.json").is_file():
            say(f"warm-up: {config}")
            command = [sys.executable, "-m", "sparse_rl_lightning", "fit", f"--config={CONFIGS / config}.yaml"]
            if run_in(folder, [*command, "--trainer.enable_progress_bar=false", "--num_threads=1"]):
                sys.exit(f"error: the warm-up stopped, see {folder / 'log.txt'}")


def collapses(results: Results, studies: Sequence[Study]) -> list[str]:
    """A line per arm and seed: accuracy with the full cache before and after."""
    return [
        f"{arm.label}, {f'budget {study.budget}, ' if arm.evicts else ''}seed {seed}: accuracy with the full cache "
        f"{run.dense_before:.3f} before and {run.record.evaluations[-1]['dense']:.3f} after training, "
        f"{'collapsed' if run.collapsed else 'not collapsed'}"
        for study in studies
        for arm in study.arms
        for seed, run in results.of(study, arm).items()
    ]


def note(results: Results, runs: Sequence[Run]) -> str:
    """Which runs there are, and where they ran."""
    found = [record for run in runs if (record := results.archive.of(run)) is not None]
    other = sum(results.archive.is_of_other_code(run) for run in runs)
    changed = f" {other} of them ran with a configuration or code that has changed since, or was not noted."
    changed *= bool(other)
    machines: dict[str, list[str]] = {}
    for day, name in sorted({tuple(record.machine.split(", ", 1)) for record in found}):
        machines.setdefault(name, []).append(day)
    where = "; ".join(f"{name} ({' and '.join(days)})" for name, days in machines.items())
    return (
        f"{len(found)} of {len(runs)} planned runs are finished.{changed} The k3 of rounding, from the sampler to its "
        f"replay, is at most {rounding(results):.1g} in any of them. Machines: {where or 'none yet'}."
    )


STUDY_OF = {
    "how quiet": "quiet", "course": "main", "leads": "main", "signs": "main", "tight leads": "tight",
    "steps and rates": "steps", "fewer steps": "steps", "chance": "control", "rejecting": "again",
    "again signs": "again",
}  # fmt: skip
"""Studies whose names are not those of their blocks."""
BESIDE_EACH_OTHER = (
    ("quiet", "main", "tight", "steps", "control", "spiral"), ("countdown",), ("again", "remedies"),
)  # fmt: skip
"""Studies that share tables, which must not mix runs of today's code with others."""


def blocks(results: Results, studies: Collection[str] = tuple(GROUPS)) -> dict[str, str]:
    """What is written into the page, of these studies."""
    signs = {"signs": signs_table(results), "again signs": signs_table(results, FROZEN_GROUPS)}
    found = {**tables(results), **{name: table.untitled for name, table in signs.items()}}
    return {name: text for name, text in found.items() if STUDY_OF.get(name, name) in studies}


def save(results: Results, folder: Path, text: str, studies: Collection[str] = tuple(GROUPS)) -> None:
    """The blocks of these studies, their pictures, and an overview for the page above that has a place for it."""
    for name, table in blocks(results, studies).items():
        insert(folder / PAGE, table, _marker(name))
    if {"main", "tight"} <= set(studies):
        insert(folder / PAGE, text, _marker("how it was measured"))
    pictures(results, folder, studies)
    if "again" in studies:
        insert_if_marked(folder.parent / "results.md", overview(results).untitled, _marker("overview"))


def _marker(name: str) -> str:
    return mark("experiments.stability", name)


def main() -> None:
    """Run the study and print or save its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--seeds", type=int, nargs="+", help="of the protocol's, default all")
    parser.add_argument("--short", action="store_true", help="minutes, not hours: who collapses and who does not")
    kept.add_options(parser, "stability", PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.runs.absolute()
    studies = SHORT if args.short else [study for name in args.studies for study in GROUPS[name]]
    unknown = set(args.seeds or ()) - {seed for study in studies for seed in study.seeds}
    if unknown:
        parser.error(f"--seeds: no study chosen has the seeds {sorted(unknown)}")
    runs = planned(studies, folder, args.seeds)
    file = folder / "short.jsonl" if args.short else args.kept
    results = Results(Archive(file), folder)
    if args.finished:
        for names in BESIDE_EACH_OTHER:
            results.archive.admit(planned([study for name in names for study in GROUPS[name]], folder))
        results.archive.admit(planned(SHORT, folder))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        warm_up(folder, {run.settings.options["data.init_args.tasks"] for run in runs})
        execute(runs, results.archive, args.jobs)
    if not any(results.archive.of(run) for run in runs):
        sys.exit(f"error: no run of {len(runs)} is finished in {folder}: run without --finished")
    if args.short:
        lines = collapses(results, SHORT)
        print(*lines, sep="\n")
        if args.save:
            insert(args.save / PAGE, "\n".join(f"- {line}" for line in lines), _marker("short"))
        return
    text = note(results, runs)
    found = blocks(results, args.studies)
    print(text, *(f"## {name}\n\n{table}" for name, table in found.items()), sep="\n\n")
    if args.save:
        without = [name for name in args.studies if not any(map(results.archive.of, planned(GROUPS[name], folder)))]
        if without:
            sys.exit(f"error: no run of {', '.join(without)} is finished with today's code: see --studies, --finished")
        save(results, args.save, text, args.studies)


if __name__ == "__main__":
    main()
