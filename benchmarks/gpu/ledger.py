"""The ledger of steps: how each ended on this card with these sources. Standard library alone: it runs first."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT

SOURCES = (
    "sparse_rl_lightning",
    "exact_answers",
    "cuda_ext",
    "benchmarks",
    "experiments",
    "tests",
    "configs",
    "examples",
)
STOPPED, ABSENT, REFUSED = 124, 127, 77  # as timeout, shells and automake say it


@dataclass(frozen=True)
class Step:
    """A command that ends well or not, and the minutes after which it is stopped.

    Args:
        name: The piece that it belongs to, a colon, and what it does.
        command: Program and arguments.
        minutes: After so many it is stopped.
        environment: Further variables.
        is_needed: Nothing that follows makes sense if it fails, and a fresh machine must do it again.
        refusals: Texts by which a machine says that it does not let the program run; that is no failure.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    environment: tuple[tuple[str, str], ...] = ()
    is_needed: bool = False
    refusals: tuple[str, ...] = ()


class Ledger:
    """What has been run on this device with these sources, a file and a log per step.

    Args:
        folder: Folder of the files.
        device: ``cuda``, or ``cpu`` for a rehearsal.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.machine = describe(device)
        self.sources = fingerprint(SOURCES)
        self.variables = {name: text for name, text in os.environ.items() if name.startswith("SPARSE_RL_")}
        self._running = set[int]()  # leaders of groups of processes
        (folder / "steps").mkdir(parents=True, exist_ok=True)

    def _file(self, step: Step, suffix: str) -> Path:
        name = "".join(c if c.isalnum() or c in ".-" else "-" for c in step.name)
        return self.folder / "steps" / f"{name}{suffix}"

    def read(self, step: Step) -> dict[str, object]:
        """How the step ended, empty if it was not run on this machine with these sources."""
        file = self._file(step, ".json")
        facts: dict[str, object] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        same = self._facts(step)
        return facts if all(facts.get(name) == fact for name, fact in same.items()) else {}

    def _facts(self, step: Step) -> dict[str, object]:
        """What a result is of."""
        facts = {"machine": self.machine, "sources": self.sources, "variables": self.variables}
        return {**facts, "command": list(step.command)}

    def is_done(self, step: Step) -> bool:
        """Whether it need not be run again; what the others need is always asked anew, for the machine may be."""
        return not step.is_needed and self.read(step).get("status") in (0, REFUSED)

    def run(self, step: Step) -> bool:
        """Run it, what it prints in its log; whether it succeeded, or the machine does not let it run."""
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        start, log = time.monotonic(), self._file(step, ".log")
        with log.open("w", encoding="utf-8") as out:
            status = self._wait_for(step, out.fileno())
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        refusal = next((line for line in lines if any(words in line for words in step.refusals)), None)
        if status and refusal is not None:
            status = REFUSED
        last = f"{step.command[0]} is not there" if status == ABSENT else refusal or (lines[-1] if lines else "")
        seconds, date = round(time.monotonic() - start, 1), str(datetime.date.today())
        entry = {**self._facts(step), "status": status, "seconds": seconds, "last": last, "date": date}
        new = self._file(step, ".new")  # another thread may be reading
        new.write_text(json.dumps(entry, indent=1), encoding="utf-8")
        new.replace(self._file(step, ".json"))
        if status == REFUSED:
            print(f"{step.name}: left out, this machine does not let it run: {last}", flush=True)
        elif status:
            print(*lines[-25:], f"{step.name}: FAILED ({status}), all of it in {log}", sep="\n", flush=True)
        return status in (0, REFUSED)

    def _wait_for(self, step: Step, out: int) -> int:
        """The exit status of its program; at the end of its time it is stopped with all that it has started."""
        paths = [str(ROOT), str(self.folder / "site"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1",
                       **dict(step.environment)}  # fmt: skip
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except FileNotFoundError:
            return ABSENT
        self._running.add(process.pid)
        try:
            return process.wait(60 * step.minutes)
        except subprocess.TimeoutExpired:
            return STOPPED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._running.discard(process.pid)

    def stop(self) -> None:
        """Stop what runs in other threads."""
        for leader in list(self._running):
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)

    def page(self, wanted: Sequence[Step]) -> str:
        """A table of all steps with how they ended."""
        rows = ["| step | ended | seconds | date | last line |", "|---|---|---|---|---|"]
        for step in wanted:
            facts = self.read(step)
            last = str(facts.get("last", "")).replace("|", "\\|").replace(str(ROOT), ".")[:160]
            ended = in_words(facts.get("status"))
            rows.append(f"| {step.name} | {ended} | {facts.get('seconds', '')} | {facts.get('date', '')} | {last} |")
        return f"# benchmarks.gpu\n\n{self.machine}. Sources {self.sources}.\n\n" + "\n".join(rows) + "\n"

    def pack(self, file: Path, pages: Path) -> None:
        """One archive of the pages, logs and entries so far, complete at any moment."""
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}")
        with tarfile.open(new, "w:gz") as archive:
            for path in sorted(pages.glob("gpu-*")):
                archive.add(path, f"pages/{path.name}")
            archive.add(self.folder / "steps", "steps")
        new.replace(file)


def in_words(status: object) -> str:
    """How a step ended."""
    if status is None:
        return "not run"
    words = {0: "well", STOPPED: "STOPPED", REFUSED: "left out: the machine refuses it"}
    return words.get(int(str(status)), f"FAILED ({status})")


def fingerprint(folders: Sequence[str]) -> str:
    """A hash of all sources in these folders of the repository."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".cpp", ".cu", ".cuh", ".h", ".yaml"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def describe(device: str) -> str:
    """The card and its driver, or that there is none."""
    if device == "cpu":
        return "A rehearsal on the CPU in toy sizes: numbers without meaning"
    if shutil.which("nvidia-smi") is None:
        sys.exit("There is no nvidia-smi here, so no GPU: --rehearse runs the steps on the CPU.")
    return ask_card("name,memory.total,driver_version")


def ask_card(what: str) -> str:
    """A property of the first card, as nvidia-smi names it."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
