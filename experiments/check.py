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
from experiments.arms.runs import Run
from experiments.real import studies as real
from experiments.stability import studies as stability
from experiments.stability.__main__ import warm_up
from experiments.stability.execution import execute
from experiments.stability.outcomes import LAST, interval
from experiments.stability.records import Archive, Record, key_of
from sparse_rl_lightning import __version__

LEAST = 0.02
"""Of reward or accuracy: as far apart are runs of one seed on two machines, whose sums are rounded otherwise."""
RESULTS = ROOT / "benchmarks" / "results"
MODULES = {"again": "stability --studies again", "real": "real"}


def planned(name: str, folder: Path) -> list[Run]:
    """All runs of a comparison."""
    return stability.planned(stability.AGAIN, folder) if name == "again" else real.planned(real.MAIN, folder, REAL)


def drawn(runs: Sequence[Run], archive: Archive, number: int, draw: int) -> list[Run]:
    """Some of the runs that were measured."""
    known = [run for run in runs if archive.of(run) is not None]
    return Random(f"{__version__} {draw}").sample(known, min(number, len(known)))


def band(others: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of further runs end, by two others or more (Student's t)."""
    middle, half = statistics.fmean(others), max(interval(others) * math.sqrt(len(others) + 1), LEAST)
    return middle - half, middle + half


def end(record: Record, cache: str = "dense") -> float:
    """What a run came to with a cache; there may be an evaluation before it."""
    return record.end(cache, min(LAST, max(1, len(record.evaluations) - 1)))


def judged(run: Run, again: Record, archive: Archive, runs: Sequence[Run]) -> bool:
    """Whether a run that was run again is inside, with each cache, which is told."""
    mine = archive.records[key_of(run)]
    found = [archive.of(one) for one in runs if _kind(one) == _kind(run) and one.seed != run.seed]
    others = [record for record in found if record is not None]
    good = True
    for cache in sorted(again.evaluations[-1].keys() - {"rollouts"}):
        before, value = end(mine, cache), end(again, cache)
        low, high = band([end(record, cache) for record in others]) if len(others) > 1 else (before, before)
        inside = abs(value - before) <= LEAST or low <= value <= high
        says = "inside" if inside else "OUTSIDE"
        if low <= 0.0 and high >= 1.0:
            says = "which its arm cannot judge"
        name = "full cache" if cache == "dense" else f"budget {cache}"
        bounds = f"{len(others)} others allow {low:.3f} to {high:.3f}"
        say(f"{key_of(run)}, {name}: {value:.3f} again, {before:.3f} before; {bounds}: {says}")
        good = good and inside
    return good


def _kind(run: Run) -> tuple[object, ...]:
    return run.arm, run.budget, run.settings.method


def check(name: str, archive: Archive, folder: Path, number: int, draw: int, jobs: int) -> bool:
    """Whether the runs that are drawn of a comparison come to what they did."""
    runs = planned(name, folder)
    chosen = drawn(runs, archive, number, draw)
    if not chosen:
        say(f"{name}: no run has a line of today's code: measure first, python -m experiments.{MODULES[name]}")
        return False
    fresh = Archive(folder / "check.jsonl")
    if name == "again":
        warm_up(folder, {"sum"})
    execute(chosen, fresh, jobs)
    found = [(run, fresh.of(run)) for run in chosen]
    lost = [run for run, record in found if record is None]
    for run in lost:
        say(f"{key_of(run)}: stopped, see {run.folder / 'log.txt'}")
    return not lost and all([judged(run, record, archive, runs) for run, record in found if record is not None])


def main() -> None:
    """Check, and fail if a run is outside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=["again", "real"], default=["again", "real"])
    parser.add_argument("--number", type=int, default=2, help="runs of each")
    parser.add_argument("--draw", type=int, default=0, help="another number draws other runs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "check", help="folder of the runs, emptied first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = {"again": RESULTS / "stability.jsonl", "real": RESULTS / "real.jsonl"}
    shutil.rmtree(args.runs, ignore_errors=True)
    good = [
        check(name, Archive(files[name]), args.runs.absolute() / name, args.number, args.draw, args.jobs)
        for name in args.studies
    ]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
