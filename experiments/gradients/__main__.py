"""Where compressed rollouts push the policy: gradients of each correction beside the full cache's, at fixed weights.

    python -m experiments.gradients [--weights warm late] [--chunks 16] [--jobs 2] [--finished]

Runs by the recipe of `experiments.stability` leave policies: one with the full cache in the middle and at its end, and
two of the main comparison that go wrong, one naive and one that rejects alone, each at its last evaluation before
accuracy falls. At each, and at the policy before training, rollouts of the same prompts are drawn with the full cache
and under every compressor, and the policy gradient of each variant is compared with the full cache's. What is measured
is a line in --kept, a file of the repository, and is not measured again; the table goes to where the page has a place
for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import kept
from benchmarks.common.pages import insert_if_marked, mark
from experiments.gradients.measure import Case, Samples, lines_of, table
from experiments.runner.execution import execute
from experiments.runner.probes import probe
from experiments.runner.records import Archive
from experiments.runner.runs import DENSE, NAIVE, Arm, Run, warmed
from experiments.runner.studies import Where
from experiments.stability.studies import MAIN, REJECTION

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measured" / "gradients.md"
CASES: tuple[Case, ...] = (("SnapKV", 34), ("SnapKV", 30), ("SnapKV", 26), ("R-KV", 30), ("R-KV", 26))
SOURCES: Mapping[str, tuple[Arm, int, int]] = {
    "middle": (DENSE, 20, 80),
    "late": (DENSE, 20, 240),
    "before naive training fails": (NAIVE, 10, 100),
    "in the spiral of rejection": (REJECTION, 13, 140),
}
"""Arm, seed and rollouts after which a run leaves its policy: rollouts of the last two are those before their fall."""


def exporting(run: Run) -> Run:
    """The same run, which leaves its policy in its folder."""
    export = {"class_path": "ExportPolicy", "init_args": {"folder": "policy"}}
    return replace(run, settings=replace(run.settings, callbacks=(*run.settings.callbacks, export)))


def sources(folder: Path, names: Sequence[str], jobs: int) -> dict[str, Path]:
    """Policies by name, trained where they are not there yet."""
    where, runs = Where(folder), {}
    MAIN.prepare(where)
    for name in names:
        if name in SOURCES:
            arm, seed, rollouts = SOURCES[name]
            (run,) = replace(MAIN, arms=(arm,), recipe=replace(MAIN.recipe, rollouts=rollouts)).runs(seed, where)
            runs[name] = exporting(run)
    execute(list(runs.values()), Archive(folder / "sources.jsonl"), jobs)
    return {"warm": warmed(folder, MAIN.warmed_by), **{name: run.folder / "policy" for name, run in runs.items()}}


def missing(names: Sequence[str], lines: list[dict[str, object]], cases: Sequence[Case]) -> dict[str, tuple[Case, ...]]:
    """Cases that have no line yet, by the policy's name; policies that have them all are left out."""
    done = {(line["weights"], line["method"], line["budget"]) for line in lines}
    left = {name: tuple(case for case in cases if (name, *case) not in done) for name in names}
    return {name: waiting for name, waiting in left.items() if waiting}


def main(
    about: str | None,
    name: str,
    weights: Sequence[str],
    cases: Sequence[Case],
    samples: Samples,
    trained: Callable[[Path, Sequence[str], int], dict[str, Path]],
) -> None:
    """Train, measure, and print every line."""
    parser = kept.parser_of(about, name)
    parser.add_argument("--weights", nargs="+", choices=weights, default=weights, help="policies to measure at")
    parser.add_argument("--chunks", type=int, default=samples.chunks, help=f"of {samples.prompts} prompts, 8 samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = kept.read(args.kept)
    waiting = {} if args.finished else missing(args.weights, lines, cases)
    if waiting:
        folders = trained(args.runs.absolute(), list(waiting), args.jobs)
        chosen = replace(samples, chunks=args.chunks)
        tasks = [partial(lines_of, at, str(folders[at]), chosen, left) for at, left in waiting.items()]
        probe(tasks, lines, args.kept, args.jobs)
    if not lines:
        sys.exit("error: nothing is measured: run without --finished")
    text = table(lines).untitled
    if args.kept == parser.get_default("kept"):
        insert_if_marked(PAGE, text, mark("experiments.gradients", name))
    print(text)


if __name__ == "__main__":
    main(__doc__, "gradients", ["warm", *SOURCES], CASES, Samples(), sources)
