"""Where compressed rollouts push the policy: gradients of each correction beside the full cache's, at fixed weights.

    python -m benchmarks.gradients [--chunks 16] [--jobs 2] [--save docs]

Two runs of `sparse-rl fit` by the recipe of `benchmarks.stability` leave policies along their way: one with the full
cache (warm, in the middle, late), one naive (at its best before accuracy halves, if it does). At each policy rollouts
of the same prompts are drawn with the full cache and under every compressor, and the policy gradient of each variant is
compared with the full cache's. What is measured is a line in --kept, a file of the repository, and is not measured
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms.runs import DENSE, NAIVE, Arm, Run
from benchmarks.common import kept
from benchmarks.common.pages import insert, insert_if_marked, mark, say
from benchmarks.gradients.jobs import CASES, Job
from benchmarks.gradients.measure import Samples
from benchmarks.gradients.one_token import explosion_table
from benchmarks.gradients.page import ORDER, overview, picture, tables
from benchmarks.stability.__main__ import warm_up
from benchmarks.stability.studies import MAIN, warmed

PAGE = "gradients.md"
SNAPSHOTS = {"class_path": "benchmarks.gradients.snapshots.Snapshots", "init_args": {"every_n_rollouts": 20}}
SEED = 20
ALONG_DENSE, ALONG_NAIVE = ORDER[1:3], ORDER[3:]  # policies that the two runs leave; the first is the warm-up's


def training(arm: Arm, folder: Path) -> Run:
    """The run that leaves policies."""
    study = replace(MAIN, arms=(arm,), seeds=(SEED,))
    (run,) = study.runs(SEED, folder)
    return replace(run, settings=replace(run.settings, callbacks=(*run.settings.callbacks, SNAPSHOTS)))


def chosen(folder: Path) -> dict[str, Path]:
    """Policies by what they are; those of runs that are not finished are left out."""
    found: dict[str, Path] = {}
    dense, naive = training(DENSE, folder), training(NAIVE, folder)
    if dense.is_finished:
        last = MAIN.recipe.rollouts
        places = zip(ALONG_DENSE, (last // 3, last), strict=True)
        found |= {name: dense.folder / "policies" / f"{place:04d}" for name, place in places}
    if naive.is_finished:
        rows = json.loads((naive.folder / "course.json").read_text(encoding="utf-8"))["evaluations"]
        for best, later in pairwise(rows):
            if later["dense"] < 0.5 * best["dense"]:
                found[ALONG_NAIVE[0]] = naive.folder / "policies" / f"{best['rollouts']:04d}"
                break
    return found


def jobs(policies: dict[str, Path], samples: Samples, lines: list[dict[str, Any]]) -> list[Job]:
    """One per policy of which a case is missing."""
    done = {(line["weights"], line["method"], line["budget"]) for line in lines}
    missing = {name: tuple(case for case in CASES if (name, *case) not in done) for name in policies}
    return [Job(name, str(policies[name]), samples, cases) for name, cases in missing.items() if cases]


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
        left = ((DENSE, ALONG_DENSE), (NAIVE, ALONG_NAIVE))
        arms = [arm for arm, names in left if set(names) & set(args.weights)]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            for ended in as_completed([pool.submit(training(arm, folder).execute) for arm in arms]):
                say(f"a run ended: {ended.result()}")
            found = {"warm": warmed(folder, "warmup")} | chosen(folder)
            found = {name: path for name, path in found.items() if name in args.weights}
            waiting = jobs(found, Samples(args.chunks), lines)
            for done in as_completed([pool.submit(job) for job in waiting]):
                lines += done.result()
                kept.write(args.kept, lines)
                say(f"{len(lines)} lines")
    if not lines:
        sys.exit("error: nothing is measured: run without --finished")
    for name, text in {**tables(lines), "one token": explosion_table().untitled}.items():
        print(f"## {name}\n\n{text}\n")
        if args.save:
            insert(args.save / PAGE, text, mark("benchmarks.gradients", name))
    if args.save:
        insert_if_marked(
            args.save.parent / "README.md", overview(lines).untitled, mark("benchmarks.gradients", "overview")
        )
        picture(lines, args.save / "gradients.png")


if __name__ == "__main__":
    main()
