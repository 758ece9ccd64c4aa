"""Running what is not finished, several runs at once."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.common.pages import say
from experiments.runner.records import Archive
from experiments.runner.runs import Run


def execute(runs: Sequence[Run], archive: Archive, jobs: int, tidy: bool = False) -> None:
    """Run what is not finished, ``jobs`` runs at once; print what is left and how long it will take.

    ``tidy`` removes the checkpoints of what has ended, each as large as the model.
    """
    waiting = [run for run in runs if archive.of(run) is None]
    say(f"{len(runs) - len(waiting)} of {len(runs)} runs were finished before")
    if changed := sum(archive.is_of_other_code(run) for run in waiting):
        say(f"{changed} are run anew: their code has changed, or nobody noted which it was")
    if starts := archive.other_starts(waiting):
        say(f"these begin from other weights than {', '.join(sorted(starts))} of kept runs: keep their tables apart")
    minutes: list[float] = []

    def timed(run: Run) -> tuple[Run, float]:
        start = time.perf_counter()
        run.execute()
        return run, (time.perf_counter() - start) / 60

    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(timed, run) for run in waiting]):
            run, took = done.result()
            minutes.append(took)
            left = (len(waiting) - len(minutes)) * statistics.fmean(minutes) / jobs
            has_ended = archive.of(run) is not None
            end = f"{took:.1f} min" if has_ended else f"stopped, see {run.folder / 'log.txt'}"
            say(f"{len(minutes)}/{len(waiting)} {run.key}: {end}; about {left:.0f} min left")
            if tidy and has_ended:
                shutil.rmtree(run.checkpoint.parent, ignore_errors=True)
    finally:  # Ctrl-C too: what waits is not begun
        pool.shutdown(cancel_futures=True)
