"""Two runs of each comparison again: do they fall into what their arm came to?

    make study-check                                        # before a release; two CPU cores, half an hour
    python -m experiments.check [--studies again real] [--number 2] [--draw 0]

Runs are drawn, others for each version, among those that have a line of today's code and settings. Each is run again in
an empty folder, and what it comes to with each cache is held beside what it came to before and beside the other runs of
its arm: it is inside if it is within 0.02 of the one, or if 95 % of further runs would be as near to the mean of the
others. On the same machine it is often the same to the last digit.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from benchmarks import REAL, ROOT
from benchmarks.common.pages import say
from experiments.real import studies as real
from experiments.runner.execution import execute
from experiments.runner.outcomes import interval
from experiments.runner.records import Archive, Record
from experiments.runner.runs import Run
from experiments.runner.studies import Study, Where, planned
from experiments.stability import studies as stability
from sparse_rl_lightning import __version__

LEAST = 0.02
"""Of reward or accuracy: as far apart are runs of one seed on two machines, whose sums are rounded otherwise."""
RESULTS = ROOT / "benchmarks" / "results"


COMPARISONS: dict[str, tuple[str, Sequence[Study]]] = {
    "again": ("stability", stability.AGAIN),
    "real": ("real", real.MAIN),
}
"""Studies whose runs are drawn, and the module that keeps their lines."""


def band(ends: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of further runs end, by two others or more (Student's t)."""
    middle, half = statistics.fmean(ends), max(interval(ends) * math.sqrt(len(ends) + 1), LEAST)
    return middle - half, middle + half


def end(record: Record, cache: str = "dense") -> float:
    """What a run came to with a cache; there may be an evaluation before it."""
    return record.end(cache, min(Study.last, max(1, len(record.evaluations) - 1)))


def judged(run: Run, again: Record, archive: Archive, runs: Sequence[Run]) -> bool:
    """Whether a run that was run again is inside, with each cache, which is told."""
    arm = (run.arm, run.budget, run.settings.method)
    beside = [r for r in runs if (r.arm, r.budget, r.settings.method) == arm and r.seed != run.seed]
    beside_it = [record for record in map(archive.of, beside) if record is not None]
    first, is_good = archive.of(run), True
    for cache in sorted(again.evaluations[-1].keys() - {"rollouts"}):
        before, value = end(first, cache), end(again, cache)
        low, high = band([end(record, cache) for record in beside_it]) if len(beside_it) > 1 else (before, before)
        is_inside = abs(value - before) <= LEAST or low <= value <= high
        says = "inside" if is_inside else "OUTSIDE"
        if low <= 0.0 and high >= 1.0:
            says = "which its arm cannot judge"
        name = "full cache" if cache == "dense" else f"budget {cache}"
        bounds = f"{len(beside_it)} others allow {low:.3f} to {high:.3f}"
        say(f"{run.key}, {name}: {value:.3f} again, {before:.3f} before; {bounds}: {says}")
        is_good = is_good and is_inside
    return is_good


def check(name: str, archive: Archive, where: Where, number: int, draw: int, jobs: int) -> bool:
    """Whether the runs that are drawn of a comparison come to what they did."""
    module, studies = COMPARISONS[name]
    runs = planned(studies, where)
    measured = [run for run in runs if archive.of(run) is not None]
    chosen = Random(f"{__version__} {draw}").sample(measured, min(number, len(measured)))
    if not chosen:
        say(f"{name}: no run has a line of today's code: measure first, python -m experiments.{module}")
        return False
    fresh = Archive(where.folder / "check.jsonl")
    for study in studies:
        study.prepare(where)
    execute(chosen, fresh, jobs)
    records = [(run, fresh.of(run)) for run in chosen]
    for run in (run for run, record in records if record is None):
        say(f"{run.key}: stopped, see {run.folder / 'log.txt'}")
    return all([record is not None and judged(run, record, archive, runs) for run, record in records])


def main() -> None:
    """Check, and fail if a run is outside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--number", type=int, default=2, help="runs of each")
    parser.add_argument("--draw", type=int, default=0, help="another number draws other runs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "check", help="folder of the runs, emptied first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(args.runs, ignore_errors=True)
    good = [
        check(
            name, Archive(RESULTS / f"{COMPARISONS[name][0]}.jsonl"), Where(args.runs.absolute() / name, REAL),
            args.number, args.draw, args.jobs,
        )
        for name in args.studies
    ]  # fmt: skip
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
