"""Measurements at policies that runs have left: a line for each, and what has one is not measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import kept
from benchmarks.common.pages import say

Lines = list[dict[str, Any]]


def probe(jobs: Iterable[Callable[[], Lines]], lines: Lines, path: Path, workers: int) -> None:
    """Add what each job measures, in a process of its own, to the lines, and keep them."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            lines += done.result()
            kept.write(path, lines)
            say(f"{len(lines)} lines")
