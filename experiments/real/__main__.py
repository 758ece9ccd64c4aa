"""The papers' question on a real instruct model: does training collapse under a compressed cache, and what saves it?

    python -m experiments.real --studies rates                       # dense alone: rates and steps per rollout
    python -m experiments.real --studies main [--seeds 20 21] [--jobs 2] [--save docs/measured]
    python -m experiments.real --studies learned                     # does a learned eviction pass the best rule?
    python -m experiments.real --studies cell                        # four runs of main again, on one machine

The protocol is experiments/real/PROTOCOL.md. The model is SmolLM2-135M-Instruct (`make real-model`), the task a story
with six given words. Every run is `sparse-rl fit` in a process of its own, six to nine minutes on a core. What a
finished one came to is a line in --kept, and it is not run again unless its code has changed: task and reward, which
are files of the study, caches, corrections and losses. Lines of `cell` have a file of their own,
real_again.jsonl, and replace none.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks import REAL
from benchmarks.common import kept
from benchmarks.common.pages import insert, insert_if_marked, mark
from experiments.arms.runs import Run
from experiments.real.pictures import pictures
from experiments.real.results import Results, blocks
from experiments.real.studies import CELL, DEVICES, LEARNING_TO_EVICT, MAIN, RATES, Study, planned
from experiments.real.teacher import teach
from experiments.stability.execution import execute
from experiments.stability.records import Archive

PAGE = "real.md"
GROUPS: dict[str, tuple[Study, ...]] = {"rates": RATES, "main": MAIN, "learned": LEARNING_TO_EVICT, "cell": (CELL,)}


def tidy(run: Run, archive: Archive) -> None:
    """Remove the checkpoints of a finished run, each as large as the model."""
    if archive.of(run) is not None:
        shutil.rmtree(run.checkpoint.parent, ignore_errors=True)


def save(found: Mapping[str, str], folder: Path) -> None:
    """Write all blocks into the folder's page, but the briefer ones into those that everybody reads, outside of it."""
    elsewhere = {"overview": folder.parent / "results.md", "readme": folder.parents[1] / "README.md"}
    for name, text in found.items():
        begin = mark("experiments.real", name)
        if name in elsewhere:
            insert_if_marked(elsewhere[name], text, begin)
        else:
            insert(folder / PAGE, text, begin)


def main() -> None:
    """Run the study and print or save its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--seeds", type=int, nargs="+", help="of the protocol's, default all")
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    kept.add_options(parser, "real", PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not (args.policy / "config.json").is_file():
        sys.exit(f"error: there is no model in {args.policy}: make real-model, or give --policy")
    folder = args.runs.absolute()
    studies = {name: GROUPS[name] for name in args.studies}
    every = [study for name, own in studies.items() if name != "cell" for study in own]
    runs = planned(every, folder, args.policy, args.device, args.seeds)
    cell = planned(studies.get("cell", ()), folder / "again", args.policy, args.device)
    archive, again = Archive(args.kept), Archive(args.kept.with_stem(f"{args.kept.stem}_again"))
    if args.finished:
        for names in (("rates",), ("main", "learned")):  # the last two share a table
            admitted = [study for name in names for study in GROUPS[name]]
            archive.admit(planned(admitted, folder, args.policy, args.device))
        again.admit(cell)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if any(archive.of(run) is None for run in runs if run.settings.method["class_path"] == "LearnedScore"):
            teach(args.policy, folder)
        for own, known in ((runs, archive), (cell, again)):
            execute(own, known, args.jobs, after_each=partial(tidy, archive=known))
    results = Results(archive, folder, args.policy, args.device, again)
    found = blocks(results, studies)
    if not found:
        sys.exit(f"error: no run of {len(runs) + len(cell)} is finished in {folder}: run without --finished")
    print(*(f"## {name}\n\n{text}" for name, text in found.items()), sep="\n\n")
    if args.save:
        save(found, args.save)
        if "main" in found:
            pictures(results, MAIN, args.save)


if __name__ == "__main__":
    main()
