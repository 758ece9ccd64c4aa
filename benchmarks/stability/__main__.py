"""The papers' claims at laptop scale: who collapses, what each correction brings, and what replay adds.

    python -m benchmarks.stability [--seeds 0 1 2] [--jobs 2] [--steps 200] [--save docs]

Dense, naive, rejection only, reweighting only, Sparse-RL as in the paper and as in the authors' code, and replay, on a
task that needs old tokens and on one that does not, under SnapKV; naive, Sparse-RL and replay under three budgets, and
under R-KV. Every run is `sparse-rl fit` with a shipped configuration in a process of its own, in a folder below
--runs, from one warm-up per task. What is finished is not run again, what was interrupted goes on from its last
checkpoint. Seeds come one after the other, so that an early end leaves whole ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from benchmarks import ROOT
from benchmarks.arms.curves import ROUNDING, Found
from benchmarks.arms.runs import CONFIGS, Run, run_in
from benchmarks.common.pages import insert, machine, mark, say
from benchmarks.stability.pictures import pictures
from benchmarks.stability.results import Results, overview, tables
from benchmarks.stability.studies import SHORT, STUDIES, TASKS, Scale, Study, planned, warmed

PAGE = "results.md"


def warm_up(folder: Path, tasks: Collection[str]) -> None:
    """Train the policies that all runs start from, one per task, where they are not there yet."""
    for task, config in TASKS.items():
        if task in tasks and not (warmed(folder, config) / "config.json").is_file():
            say(f"warm-up: {config}")
            command = [sys.executable, "-m", "sparse_rl_lightning", "fit", f"--config={CONFIGS / config}.yaml"]
            if run_in(folder, [*command, "--trainer.enable_progress_bar=false", "--num_threads=1"]):
                sys.exit(f"error: the warm-up stopped, see {folder / 'log.txt'}")


def execute(runs: Sequence[Run], jobs: int) -> None:
    """Run what is not finished, ``jobs`` runs at once; print what is left and how long it will take."""
    waiting = [run for run in runs if not run.is_finished]
    say(f"{len(runs) - len(waiting)} of {len(runs)} runs were finished before")
    minutes: list[float] = []

    def one(run: Run) -> tuple[Run, float]:
        start = time.perf_counter()
        run.execute()
        return run, (time.perf_counter() - start) / 60

    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(one, run) for run in waiting]):
            run, took = done.result()
            minutes.append(took)
            left = (len(waiting) - len(minutes)) * statistics.fmean(minutes) / jobs
            name = f"{run.settings.folder.name}/{run.folder.name}"
            end = f"{took:.1f} min" if run.is_finished else f"stopped, see {run.folder / 'log.txt'}"
            say(f"{len(minutes)}/{len(waiting)} {name}: {end}; about {left:.0f} min left")
    finally:  # Ctrl-C too: what waits is not begun
        pool.shutdown(cancel_futures=True)


def collapses(results: Results, studies: Sequence[Study]) -> list[str]:
    """A line per arm and seed: accuracy with the full cache before and after."""
    return [
        f"{arm.label}, {f'budget {study.budgets[0]}, ' if arm.evicts else ''}seed {seed}: accuracy with the full cache "
        f"{run.dense_before:.3f} before and {run.dense:.3f} after training, "
        f"{'collapsed' if run.collapsed else 'not collapsed'}"
        for study in studies
        for arm in study.arms
        for seed, run in results.of(study, arm, study.budgets[0]).items()
    ]


def note(scale: Scale, found: Sequence[Found], planned: int, remark: str) -> str:
    """How to read the tables."""
    seeds = ", ".join(map(str, sorted({one.run.seed for one in found})))
    k3 = [split.get(ROUNDING, math.nan) for one in found for split in one.course["splits"]]
    rounding = [value for value in k3 if math.isfinite(value)]
    rounded = f"at most {max(rounding):.1g} in any rollout measured" if rounding else "not measured"
    return (
        f"{machine('cpu')}. {len(found)} of {planned} runs, seeds {seeds}. {remark}".strip()
        + f"\n\n{scale.steps} optimizer steps, two per rollout of 16 × 8 sequences, from the policies of "
        f"`configs/warmup.yaml` and `configs/warmup_reduction.yaml`. Accuracies are greedy, on {scale.num_problems} "
        "held-out problems at the end (standard error 0.03 from the problems alone). One seed or two stand as they "
        "are; of more, the mean and after ± half the width of its 95 % interval (Student's t). k3, a geometric mean, "
        "and P5 compare the compressed policy with the dense one in the last quarter of the rollouts; the k3 of "
        f"rounding, from the sampler to its replay: {rounded}. Collapsed: less than a quarter of the accuracy with "
        "the full cache is left. Minutes are those of training, on one core each."
    )


def save(results: Results, folder: Path, text: str) -> None:
    """Every block of the page, and the pictures; the overview goes into the README above, where it has a place."""
    insert(folder / PAGE, text, _marker("how it was measured"))
    for name, table in tables(results).items():
        insert(folder / PAGE, table, _marker(name))
    pictures(results, folder)
    readme = folder.parent / "README.md"
    if readme.is_file() and _marker("overview") in readme.read_text(encoding="utf-8"):
        insert(readme, overview(results).untitled, _marker("overview"))


def _marker(name: str) -> str:
    return mark("benchmarks.stability", name)


def main() -> None:
    """Run the study and print or save its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Scale.steps, help="optimizer steps, two per rollout")
    parser.add_argument("--short", action="store_true", help="minutes, not hours: who collapses and who does not")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "stability", help="folder of the runs")
    parser.add_argument("--finished", action="store_true", help="run nothing: write what earlier calls have finished")
    parser.add_argument("--save", type=Path, help=f"folder of {PAGE} and its pictures")
    parser.add_argument("--remark", default="", help="a sentence about the machine for the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.runs.absolute()
    scale = Scale(steps=min(args.steps, 100), every_n_rollouts=50) if args.short else Scale(steps=args.steps)
    runs = planned(args.seeds, scale, folder, SHORT if args.short else STUDIES)
    if not args.finished:
        folder.mkdir(parents=True, exist_ok=True)
        warm_up(folder, {run.settings.options["data.init_args.tasks"] for run in runs})
        execute(runs, args.jobs)
    found = [Found.read(run) for run in runs if run.is_finished]
    if not found:
        sys.exit(f"error: no run of {len(runs)} is finished in {folder}: run without --finished")
    results = Results(found)
    if args.short:
        lines = collapses(results, SHORT)
        print(*lines, sep="\n")
        if args.save:
            insert(args.save / PAGE, "\n".join(f"- {line}" for line in lines), _marker("short"))
        return
    text = note(scale, found, len(runs), args.remark)
    print(text, *(f"## {name}\n\n{table}" for name, table in tables(results).items()), sep="\n\n")
    if args.save:
        save(results, args.save, text)


if __name__ == "__main__":
    main()
