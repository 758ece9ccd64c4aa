"""Running what is not finished, several runs at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.common.pages import say
from experiments.arms.runs import Run
from experiments.stability.records import Archive, key_of


def execute(
    runs: Sequence[Run], archive: Archive, jobs: int, after_each: Callable[[Run], object] = lambda run: None
) -> None:
    """Run what is not finished, ``jobs`` runs at once; print what is left and how long it will take."""
    waiting = [run for run in runs if archive.of(run) is None]
    say(f"{len(runs) - len(waiting)} of {len(runs)} runs were finished before")
    if changed := sum(archive.is_of_other_code(run) for run in waiting):
        say(
            f"{changed} are run anew: their rewards, tasks or compressors have changed, or nobody noted which they were"
        )
    if others := archive.other_starts(waiting):
        say(f"these begin from other weights than {', '.join(sorted(others))} of kept runs: keep their tables apart")
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
            end = f"stopped, see {run.folder / 'log.txt'}" if archive.of(run) is None else f"{took:.1f} min"
            say(f"{len(minutes)}/{len(waiting)} {key_of(run)}: {end}; about {left:.0f} min left")
            after_each(run)
    finally:  # Ctrl-C too: what waits is not begun
        pool.shutdown(cancel_futures=True)
