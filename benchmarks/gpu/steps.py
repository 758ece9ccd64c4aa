"""The steps of every piece, and the ledger of those that have succeeded. Standard library alone: it runs first."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT

PIECES = ("build", "test", "sanitize", "train", "bench")  # the last takes what time is left
MODELS = ("1.5B", "Qwen3-1.7B", "Qwen3-4B", "7B", "Qwen3-8B")  # small ones first: they answer most for a minute
OP_TESTS = tuple(f"tests/ops/test_{name}.py" for name in ("native_attention", "native_pages", "native_scores",
                 "native_evict", "native_device", "native_errors", "float8_ops", "draw"))  # fmt: skip
ROLLOUT_TESTS = ("tests/rollout/test_on_gpu.py", "tests/rollout/test_rollout_memory.py")
OTHER_TESTS = ("tests/benchmarks/test_bench_rollout.py", "tests/callbacks/test_dry_run.py")
SOURCES = ("sparse_rl_lightning", "cuda_ext", "benchmarks", "tests", "configs")
SANITIZED = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)  # else what runs over the end of a tensor hits another one


@dataclass(frozen=True)
class Step:
    """A command that ends well or not, and the minutes after which it is stopped."""

    name: str
    command: tuple[str, ...]
    minutes: float
    environment: tuple[tuple[str, str], ...] = ()


def steps(pieces: Sequence[str], device: str, save: Path, state: Path) -> list[Step]:
    """The steps of these pieces in order; on a CPU in toy sizes."""
    found = {
        "build": _build(device, state),
        "test": _test(device),
        "sanitize": _sanitize(device),
        "train": [_train(device, save, state)],
        "bench": _bench(device, save),
    }
    return [step for piece in pieces for step in found[piece]]


def _module(name: str, module: str, minutes: float, *arguments: str) -> Step:
    return Step(name, (sys.executable, "-m", f"benchmarks.{module}", *arguments), minutes)


def _build(device: str, state: Path) -> list[Step]:
    packages = ("--install", str(state / "wheels"), "--into", str(state / "site"))
    compile_all = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    kernels = Step("build: kernels", compile_all, 5, (("SPARSE_RL_BUILD", "cuda"), ("SPARSE_RL_ARCHS", _capability())))
    return [
        _module("build: packages", "gpu.needs", 2, *packages),
        *([kernels] if device == "cuda" else []),
        _module("build: every op", "gpu.every_op", 2, "--device", device),
    ]


def _test(device: str) -> list[Step]:
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    how = ("-n", "4") if device == "cuda" else ("--collect-only",)
    return [
        Step("test: ops", (*pytest, *how, *OP_TESTS), 4),
        Step("test: rollouts", (*pytest, *how, *ROLLOUT_TESTS), 4),
        Step("test: other", (*pytest, *how, *OTHER_TESTS), 2),
    ]


def _sanitize(device: str) -> list[Step]:
    every_op = (sys.executable, "-m", "benchmarks.gpu.every_op", "--device", device)
    if device == "cpu":
        return [Step("sanitize: nothing", every_op, 2)]
    options = ("--error-exitcode", "9", "--print-limit", "20")
    return [
        Step(f"sanitize: {tool}", ("compute-sanitizer", "--tool", tool, *options, *every_op), 4, SANITIZED)
        for tool in ("memcheck", "racecheck")
    ]


def _train(device: str, save: Path, state: Path) -> Step:
    toy = ("--quick",) if device == "cpu" else ()
    return _module("train", "gpu.learning", 6, "--device", device, "--state", str(state), "--save", str(save), *toy)


def _bench(device: str, save: Path) -> list[Step]:
    where = ("--device", device, "--save", str(save))
    toy, models = (("--quick",), ("tiny",)) if device == "cpu" else ((), MODELS)
    rollouts = [
        (part, model, ("--parts", part, "--models", model, "--page", f"gpu-{part}-{model.lower()}"))
        for model in models
        for part in ("whole", "cells")
    ]
    few = ("--rounds", "1", "--parts", "retrieval", "draw") if device == "cpu" else ()  # the others know no toy sizes
    return [
        _module("bench: ops", "ops", 4, *where, *toy, *few),
        *(_module(f"bench: {part} {model}", "rollout", 4, *where, *toy, *what) for part, model, what in rollouts),
        _module("bench: memory", "rollout", 3, *where, *toy, "--parts", "memory", "--models", models[0], "--page",
                "gpu-memory"),
        _module("bench: profile", "gpu.profile", 2, *where, "--model", models[0]),
    ]  # fmt: skip


def fingerprint() -> str:
    """A hash of all sources that a step could depend on."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".cpp", ".cu", ".cuh", ".h", ".yaml"):
                found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


class Ledger:
    """What has been run on this device with these sources, a file and a log per step.

    Args:
        folder: Folder of the files.
        device: ``cuda``, or ``cpu`` for a rehearsal.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.machine = describe(device)
        self.sources = fingerprint()
        (folder / "steps").mkdir(parents=True, exist_ok=True)

    def _file(self, step: Step, suffix: str) -> Path:
        name = "".join(c if c.isalnum() or c in ".-" else "-" for c in step.name)
        return self.folder / "steps" / f"{name}{suffix}"

    def read(self, step: Step) -> dict[str, object]:
        """How the step ended, empty if it was not run on this machine with these sources."""
        file = self._file(step, ".json")
        found: dict[str, object] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        same = {"machine": self.machine, "sources": self.sources, "command": list(step.command)}
        return found if same.items() <= found.items() else {}

    def is_done(self, step: Step) -> bool:
        """Whether it has succeeded."""
        return self.read(step).get("status") == 0

    def run(self, step: Step) -> bool:
        """Run it, what it prints in its log; whether it succeeded."""
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        paths = [str(ROOT), str(self.folder / "site"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1",
                       **dict(step.environment)}  # fmt: skip
        start, log = time.monotonic(), self._file(step, ".log")
        with log.open("w", encoding="utf-8") as out:
            try:
                status = subprocess.run(
                    step.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                    timeout=60 * step.minutes,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = 124
            except FileNotFoundError as error:
                out.write(f"{error.filename} is not there\n")
                status = 127
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        entry = {
            "machine": self.machine, "sources": self.sources, "command": list(step.command), "status": status,
            "seconds": round(time.monotonic() - start, 1), "last": lines[-1] if lines else "",
            "date": str(datetime.date.today()),
        }  # fmt: skip
        self._file(step, ".json").write_text(json.dumps(entry, indent=1), encoding="utf-8")
        if status:
            print(*lines[-25:], f"{step.name}: FAILED ({status}), all of it in {log}", sep="\n", flush=True)
        return status == 0

    def page(self, wanted: Sequence[Step]) -> str:
        """A table of all steps with how they ended."""
        rows = ["| step | ended | seconds | date | last line |", "|---|---|---|---|---|"]
        for step in wanted:
            found = self.read(step)
            ended = {None: "not run", 0: "well", 124: f"STOPPED after {step.minutes:g} minutes"}
            status = found.get("status")
            last = str(found.get("last", "")).replace("|", "\\|").replace(str(ROOT), ".")[:160]
            rows.append(
                f"| {step.name} | {ended.get(status, f'FAILED ({status})')} | {found.get('seconds', '')} | "  # type: ignore[call-overload]
                f"{found.get('date', '')} | {last} |"
            )
        return f"# benchmarks.gpu\n\n{self.machine}. Sources {self.sources}.\n\n" + "\n".join(rows) + "\n"


def describe(device: str) -> str:
    """The card and its driver, or that there is none."""
    if device == "cpu":
        return "A rehearsal on the CPU in toy sizes: numbers without meaning"
    if shutil.which("nvidia-smi") is None:
        sys.exit("There is no nvidia-smi here, so no GPU: --rehearse runs the steps on the CPU.")
    return _ask("name,memory.total,driver_version")


def _capability() -> str:
    """The architecture to compile for, as nvcc names it; nothing where there is no card."""
    return _ask("compute_cap").replace(".", "") if shutil.which("nvidia-smi") else ""


def _ask(what: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
