"""math-verify in isolation: in processes of its own, with a memory limit, killed when a pair takes too long.

The processes run a script that imports math-verify and nothing from this package: they are small and start at once,
never import the user's program, and neither threads nor alarms are used on this side. A process that dies or has to be
killed costs its own pair and is replaced.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Literal, TypeAlias, cast

Outcome: TypeAlias = Literal["same", "different", "unparsed", "timeout", "crash"]

START_SECONDS = 60.0
"""Seconds a process may take to import math-verify on a busy machine."""
MEMORY_LIMIT = 2 * 1024**3
"""Bytes of address space of a process."""

_SCRIPT = Path(__file__).with_name("worker.py")
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_ASKED_FOR = frozenset({"\\sum", "\\prod", "\\int", "\\lim"})
_UNSAFE = frozenset(
    {"\\text", "\\mathrm", "\\mbox", "\\operatorname", "\\{", "\\}", "\\begin", "\\end", "\\pm", "\\in"}
)


def needs_math_verify(first: str, second: str) -> bool:
    """Whether math-verify may decide: there is a sum, product, integral or limit, and nothing it misreads."""
    one, two = set(_COMMAND.findall(first)), set(_COMMAND.findall(second))
    return bool((one | two) & _ASKED_FOR) and not (one | two) & _UNSAFE


class SymbolicPool:
    """Processes that compare pairs of expressions with math-verify.

    Args:
        num_workers: Number of processes.
        timeout: Seconds after which a pair's process is killed.
        memory_limit: Bytes of address space of a process.

    Raises:
        ValueError: If there is no process, or the timeout is no number of seconds.
    """

    def __init__(self, num_workers: int = 1, timeout: float = 3.0, memory_limit: int = MEMORY_LIMIT) -> None:
        is_time = isinstance(cast(object, timeout), Real) and 0 < timeout <= threading.TIMEOUT_MAX
        if num_workers < 1 or not is_time:
            raise ValueError(
                f"num_workers must be at least 1 and timeout above 0 seconds, got num_workers={num_workers}, "
                f"timeout={timeout}."
            )
        self.num_workers, self.timeout, self.memory_limit = num_workers, timeout, memory_limit
        self._begin()

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """The outcome of every pair (answer, gold), in their order."""
        if os.getpid() != self._owner:  # a fork: the processes belong to our parent
            self._begin()
        with self._lock:
            return self._compare(pairs)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        _end(self._workers, self._owner)

    def _begin(self) -> None:
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._workers, self._owner)  # at the latest when Python ends

    def _compare(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        outcomes: list[Outcome] = ["crash"] * len(pairs)
        waiting = list(range(len(pairs)))[::-1]
        busy: dict[_Worker, int] = {}
        while waiting or busy:
            while waiting and len(busy) < self.num_workers:
                index = waiting.pop()
                worker = next((worker for worker in self._workers if worker not in busy), None)
                if worker is None:
                    self._workers.append(worker := _Worker(self.memory_limit, self.timeout))
                if worker.send(pairs[index], self.timeout):
                    busy[worker] = index
                else:
                    self._drop(worker)
            for worker in _ready(busy):
                outcomes[busy.pop(worker)] = outcome = worker.receive()
                if outcome in ("timeout", "crash"):
                    self._drop(worker)
        return outcomes

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)


class _Worker:
    def __init__(self, memory_limit: int, timeout: float) -> None:
        # -P: no file beside the script stands in for a module of this name
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(memory_limit), str(timeout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.deadline = 0.0
        self.is_started = False
        self.line = b""

    def send(self, pair: tuple[str, str], timeout: float) -> bool:
        """Send a pair to the process; False if it is gone."""
        self.deadline = time.monotonic() + timeout + (0.0 if self.is_started else START_SECONDS)
        self.timeout = timeout
        try:
            self.stdin.write(json.dumps(pair).encode() + b"\n")
            self.stdin.flush()
        except OSError:
            return False
        return True

    def is_done(self) -> bool:
        """Whether there is an outcome: an answer, an end, or a deadline that has passed."""
        return self.line.endswith(b"\n") or self.line == b"end" or time.monotonic() > self.deadline

    def read(self) -> None:
        """Read what the process has written."""
        data = os.read(self.stdout.fileno(), 4096)
        self.line = self.line + data if data else b"end"
        if not self.is_started and self.line.startswith(b"ready\n"):
            self.is_started = True
            self.line = self.line.removeprefix(b"ready\n")
            self.deadline = time.monotonic() + self.timeout

    def receive(self) -> Outcome:
        """The outcome of the last pair."""
        line, self.line = self.line, b""
        known: dict[bytes, Outcome] = {b"same\n": "same", b"different\n": "different", b"unparsed\n": "unparsed"}
        return known.get(line, "crash") if line else "timeout"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stdout.close()
        with suppress(OSError):  # unwritten bytes for a dead process
            self.stdin.close()


def _end(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:
        while workers:
            workers.pop().kill()


def _ready(busy: dict[_Worker, int]) -> list[_Worker]:
    """Wait until at least one process has an outcome."""
    while not (done := [worker for worker in busy if worker.is_done()]) and busy:
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
            wait = min(worker.deadline for worker in busy) - time.monotonic()
            for key, _ in selector.select(max(0.0, wait) + 0.001):
                key.data.read()
    return done
