"""Runs of the command line in processes that begin as a copy of this one, so that nothing is imported again.

A forked run is a process of its own that really gets its signals. It is only safe to fork while this process has one
thread: it must import and wait, and never train anything itself.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import sparse_rl_lightning.cli.training  # noqa: F401  # children have it without importing it
from benchmarks.reliability import faulty
from sparse_rl_lightning.cli import console

FORK = multiprocessing.get_context("fork")
HANGS = 600  # seconds without a sign of life after which a run is given up


class Event(NamedTuple):
    """A stretch of a run begins."""

    stretch: str
    time: float  # seconds of the machine's clock
    step: int  # optimizer steps done


@dataclass(frozen=True)
class Moment:
    """Some time after a stretch of a run has begun."""

    stretch: str
    index: int  # how many of its kind come before
    delay: float  # seconds


class Run:
    """``sparse-rl`` with some arguments, in a folder.

    Args:
        folder: The working directory.
        arguments: Of the command line.
        variables: Further environment variables.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], variables: dict[str, str] | None = None) -> None:
        assert threading.active_count() == 1
        self.events = [Event("start", time.monotonic(), 0)]
        self.output = ""
        self.ended = 0.0
        (self._marks, marks), (self._text, text) = os.pipe(), os.pipe()  # text in no file: the disk may be full
        self._open = {self._marks, self._text}
        self.process = FORK.Process(target=_run, args=(folder, arguments, variables or {}, marks, text))
        self.process.start()
        os.close(marks)
        os.close(text)

    def reaches(self, moment: Moment) -> bool:
        """Wait for a moment; False if the run ended before."""
        while [event.stretch for event in self.events].count(moment.stretch) <= moment.index:
            if not self._read(HANGS):
                return False
        time.sleep(moment.delay)
        return True

    def signal(self, number: int) -> Event:
        """Send a signal, and say where the run was."""
        assert self.process.pid is not None
        while self._read(0):
            pass
        os.kill(self.process.pid, number)
        return self.last

    def wait(self) -> int:
        """The exit status, or minus the signal that ended it; a run that hangs is killed, which shows in the status."""
        while self._read(HANGS):
            pass
        self.process.join(HANGS)
        self.ended = self.ended or time.monotonic()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    @property
    def last(self) -> Event:
        """The stretch that the run is in, or was in at its end."""
        return self.events[-1]

    def _read(self, patience: float) -> bool:
        """Read marks and output of the run; False at its end, or if nothing comes for some time."""
        ready, _, _ = select.select(list(self._open), [], [], patience) if self._open else ([], [], [])
        for descriptor in ready:
            data = os.read(descriptor, faulty.MARK.size if descriptor == self._marks else 65536)
            if not data:
                os.close(descriptor)
                self._open.remove(descriptor)
            elif descriptor == self._text:
                self.output += data.decode(errors="replace")
            else:
                stretch, begin, step = faulty.MARK.unpack(data)
                self.events.append(Event(faulty.STRETCHES[stretch], begin, step))
        return bool(ready)


def rank_variables(count: int) -> list[dict[str, str]]:
    """Environment variables by which a launcher tells each rank its number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "NODE_RANK": "0"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start_ranks(folder: Path, arguments: Sequence[str], count: int) -> list[Run]:
    """One run per rank."""
    return [Run(folder, arguments, variables) for variables in rank_variables(count)]


def _run(folder: Path, arguments: Sequence[str], variables: dict[str, str], marks: int, text: int) -> None:
    os.chdir(folder)
    os.dup2(text, 1)
    os.dup2(text, 2)
    os.environ.update(variables)
    faulty.marks = marks
    sys.argv = ["sparse-rl", *arguments]
    try:
        console()
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
