"""Where compressed rollouts push the policy: gradients of each correction beside the full cache's, at fixed weights.

    python -m experiments.gradients [--chunks 16] [--jobs 2] [--save docs/measured]

Three runs of `sparse-rl fit` by the recipe of `experiments.stability` leave policies along their way: one with the full
cache (in the middle and at the end), and again two of its main comparison that go wrong, one naive and one that rejects
alone (each at its last evaluation before accuracy falls). At each policy, and at the one before training, rollouts of
the same prompts are drawn with the full cache and under every compressor, and the policy gradient of each variant is
compared with the full cache's. What is measured is a line in --kept, a file of the repository, and is not measured
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import kept
from benchmarks.common.pages import insert, mark, say
from experiments.arms.runs import DENSE, NAIVE, Arm, Run
from experiments.gradients.jobs import CASES, Job
from experiments.gradients.measure import Samples
from experiments.gradients.one_token import explosion_table
from experiments.gradients.page import ORDER, picture, tables
from experiments.gradients.snapshots import exporting
from experiments.stability.__main__ import warm_up
from experiments.stability.outcomes import fall
from experiments.stability.studies import MAIN, REJECTION, warmed

PAGE = "gradients.md"
LAST = MAIN.recipe.rollouts
FALLEN = 0.6  # of the best accuracy so far


@dataclass(frozen=True)
class Source:
    """A run, and the policies that it leaves, by name: after so many rollouts, or before its fall."""

    arm: Arm
    seed: int
    policies: dict[str, int | None]

    def training(self, folder: Path) -> Run:
        """The run, as in ``experiments.stability``, which exports policies besides."""
        (run,) = replace(MAIN, arms=(self.arm,), seeds=(self.seed,)).runs(self.seed, folder)
        return exporting(run, every_n_rollouts=20)

    def left(self, folder: Path) -> dict[str, Path]:
        """The policies, where the run is finished and came to them."""
        run = self.training(folder)
        if not run.is_finished:
            return {}
        rows = json.loads((run.folder / "course.json").read_text(encoding="utf-8"))["evaluations"]
        before, _ = fall(rows, FALLEN) or (None, None)
        places = {name: before if place is None else place for name, place in self.policies.items()}
        return {name: run.folder / "policies" / f"{place:04d}" for name, place in places.items() if place is not None}


SOURCES = (  # the second and the third are the first seeds of their arms that fall in docs/measured/stability.md
    Source(DENSE, 20, {ORDER[1]: LAST // 3, ORDER[2]: LAST}),
    Source(NAIVE, 10, {ORDER[3]: None}),
    Source(REJECTION, 13, {ORDER[4]: None}),
)


def missing(
    names: Iterable[str], lines: list[dict[str, Any]], cases: Sequence[tuple[str, int]] = CASES
) -> dict[str, tuple[tuple[str, int], ...]]:
    """Cases that have no line yet, by the policy's name; policies that have them all are left out."""
    done = {(line["weights"], line["method"], line["budget"]) for line in lines}
    left = {name: tuple(case for case in cases if (name, *case) not in done) for name in names}
    return {name: own for name, own in left.items() if own}


def measure(jobs: Iterable[Job], pool: Executor, lines: list[dict[str, Any]], path: Path) -> None:
    """Add what each job finds to the lines, and keep them."""
    for done in as_completed([pool.submit(job) for job in jobs]):
        lines += done.result()
        kept.write(path, lines)
        say(f"{len(lines)} lines")


def main() -> None:
    """Train, measure, and print or save the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=ORDER, default=ORDER, help="policies to measure at")
    parser.add_argument("--chunks", type=int, default=Samples.chunks, help="of 32 prompts with 8 samples each")
    kept.add_options(parser, "gradients", PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = kept.read(args.kept)
    if not args.finished:
        folder = args.runs.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        warm_up(folder, {"sum"})
        wanted = missing(args.weights, lines)
        needed = [source for source in SOURCES if source.policies.keys() & wanted]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            for ended in as_completed([pool.submit(source.training(folder).execute) for source in needed]):
                say(f"a run ended: {ended.result()}")
            found = {ORDER[0]: warmed(folder, "warmup")}
            for source in needed:
                found |= source.left(folder)
            for name in wanted.keys() - found:
                say(f"{name}: there is no such policy, its run has not ended or did not fall")
            samples = Samples(args.chunks)
            waiting = [Job(name, str(found[name]), samples, wanted[name]) for name in wanted if name in found]
            measure(waiting, pool, lines, args.kept)
    if not lines:
        sys.exit("error: nothing is measured: run without --finished")
    for name, text in {**tables(lines), "one token": explosion_table().untitled}.items():
        print(f"## {name}\n\n{text}\n")
        if args.save:
            insert(args.save / PAGE, text, mark("experiments.gradients", name))
    if args.save:
        picture(lines, args.save / "gradients.png")


if __name__ == "__main__":
    main()
