"""Engines as processes that take turns: whoever waits is stopped, so that no thread of it spins."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT

OWN = Path(sys.executable)
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Engine:
    """How an engine is started."""

    worker: str  # a file of workers/
    python: Path
    policy: Path  # in its form
    evicts: bool = False
    only: str | None = None  # type of the policy in this form
    most: int | None = None  # new tokens, of an engine that takes too long for more

    def takes(self, dtype: str, tokens: int) -> bool:
        """Whether it takes part."""
        return self.only in (None, dtype) and (self.most is None or tokens <= self.most)


class Contender:
    """A running engine.

    Args:
        engine: Which.
        settings: What its worker is told besides.
        log: File of all that it prints.

    Raises:
        RuntimeError: If it ends before it has answered.
    """

    def __init__(self, engine: Engine, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        request = {**settings, "policy": str(engine.policy), "evicts": engine.evicts}
        paths = {"PYTHONPATH": str(ROOT)} if engine.python == OWN else {}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [engine.python, WORKERS / engine.worker, json.dumps(request)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env={**os.environ, **paths},
            )  # fmt: skip
        try:
            self._answer()
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds of one call that gives every prompt so many tokens."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        try:
            print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it has ended, as its missing answer tells
        took = float(self._answer()["seconds"])
        self._signal(signal.SIGSTOP)
        return took

    def end(self) -> None:
        """End the process and all that it has started."""
        self._signal(signal.SIGKILL)
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"ended; {self.log} has why: {' '.join(last)[:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, which: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, which)
        except ProcessLookupError:
            pass


class Contest:
    """Engines that run and take turns; a rival that fails is left out from then on, and the page says why.

    Args:
        engines: Those that take part, by their names.
        settings: What all are told.
        prompts: Token ids that all of them go on from.
        work: Folder of their logs.
        remarks: Of the page.
    """

    def __init__(
        self, engines: dict[str, Engine], settings: dict[str, Any], prompts: list[list[int]], work: Path,
        remarks: list[str],
    ) -> None:  # fmt: skip
        self.engines, self.settings, self.prompts, self.work, self.remarks = engines, settings, prompts, work, remarks
        self.running: dict[str, Contender] = {}

    def seconds(self, name: str, count: int) -> float | None:
        """Seconds of one call, None from an engine that does not run; the first call starts it."""
        try:
            if name not in self.running:
                engine, dtype = self.engines[name], self.settings["dtype"]
                log = f"{re.sub(r'[^a-zA-Z0-9]+', '-', name)}-{dtype}.log"
                self.running[name] = Contender(engine, self.settings, self.work / log)
            return self.running[name].seconds(self.prompts, count)
        except RuntimeError as failure:
            if self.engines[name].python == OWN:
                raise
            self.remarks.append(f"{name} is left out in {self.settings['dtype']}: {failure}.")
            del self.engines[name]
            if name in self.running:
                self.running.pop(name).end()
            return None

    def end(self) -> None:
        """End all that run."""
        for contender in self.running.values():
            contender.end()
