"""The steps of every piece. Standard library alone: it is read before anything is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.ledger import Step
from tests.gpu_files import GPU_TESTS

# In the order of the calls of README.md: a quarter of an hour, then what is left.
PIECES = (
    "build", "cells", "profile", "train", "real", "test", "fsdp", "study",
    "whole", "equal", "ops", "invariance", "sanitize", "models", "math",
)  # fmt: skip
AFTER = {"fsdp": "train", "study": "real"}  # who needs what another has made
FIRST, OTHERS = "1.5B", ("Qwen3-1.7B", "Qwen3-4B", "7B", "Qwen3-8B")  # small ones first: they answer most for a minute
MINUTES = {"ops": 3.0, "rollouts": 4.0, "replay": 3.0, "other": 1.5}  # of the groups of tests
SANITIZED = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)  # else what runs over the end of a tensor hits another one
REFUSALS = ("Device not supported", "not supported on this", "LibraryNotLoaded")  # as compute-sanitizer words it


def steps(pieces: Sequence[str], device: str, save: Path, state: Path) -> list[Step]:
    """The steps of these pieces in order; on a CPU in toy sizes."""
    toy, first = (("--quick",), "tiny") if device == "cpu" else ((), FIRST)
    where = ("--device", device, "--save", str(save))
    few = ("--rounds", "1", "--parts", "retrieval", "draw") if device == "cpu" else ()  # the others know no toy sizes
    by_piece = {
        "build": _build(device, state),
        "test": _test(device),
        "whole": [_rollout("whole", first, 4, *where, *toy)],
        "equal": [_rollout("equal", first, 7, *where, *toy)],
        "profile": [_module("profile", "gpu.profile", 1.1, *where, "--model", first)],
        "cells": [_rollout("cells", first, 2.3, *where, *toy)],
        "ops": [_module("ops", "ops", 4, *where, *toy, *few)],
        "train": [_module("train", "gpu.learning", 6, *where, "--state", str(state), *toy)],
        "real": [_module("real", "gpu.real", 4, *where, "--state", str(state), *toy)],
        "fsdp": [_fsdp(device, state)],
        "study": [_study(device, save, state)],
        "math": [_module("math", "gpu.mathematics", 5, *where, "--state", str(state))],
        "invariance": [_module("invariance", "gpu.invariance", 2, *where, "--model", first)],
        "sanitize": _sanitize(device),
        "models": _models(("tiny",) if device == "cpu" else OTHERS, first, *where, *toy),
    }
    return [step for piece in pieces for step in by_piece[piece]]


def _module(name: str, module: str, minutes: float, *arguments: str, is_needed: bool = False) -> Step:
    command = (sys.executable, "-m", f"benchmarks.{module}", *arguments)
    return Step(name, command, minutes, is_needed=is_needed)


def _fsdp(device: str, state: Path) -> Step:
    """One rank on the policy that `train` has warmed up."""
    folder = state / f"learning-{device}"
    options = {
        "config": ROOT / "configs" / "quickstart.yaml", "trainer.accelerator": "gpu" if device == "cuda" else "cpu",
        "trainer.devices": 1, "trainer.strategy": "sparse_rl_fsdp2", "trainer.max_steps": 4, "data.num_val": 8,
        "model.policy": folder / "runs" / "warmup" / "policy", "trainer.default_root_dir": folder / "fsdp2",
    }  # fmt: skip
    command = (sys.executable, "-m", "sparse_rl_lightning", "fit", *(f"--{k}={v}" for k, v in options.items()))
    return Step("fsdp", command, 1.2 if device == "cuda" else 5)


def _study(device: str, save: Path, state: Path) -> Step:
    """The frozen study of the real model, as many runs of a seed as there is time, from the policy of `real`."""
    arguments = (
        "--studies", "main", "--device", "gpu", "--seeds", "20", "--jobs", "3", "--runs", str(state / "study"),
        "--kept", str(save / "gpu-study.jsonl"), "--policy", str(state / f"real-{device}" / "policy"),
        *(["--help"] if device == "cpu" else []),  # as much as can be rehearsed in less than half an hour
    )  # fmt: skip
    return Step("study", (sys.executable, "-m", "experiments.real", *arguments), 2.7)


def _rollout(piece: str, model: str, minutes: float, *arguments: str) -> Step:
    what = ("--parts", piece, "--models", model, "--page", f"gpu-{piece}-{model.lower()}")
    return _module(f"{piece}: {model}", "rollout", minutes, *arguments, *what)


def _models(models: Sequence[str], first: str, *arguments: str) -> list[Step]:
    memory = ("--parts", "memory", "--models", first, "--page", "gpu-memory")
    both = [(piece, model) for model in models for piece in ("whole", "cells")]
    return [
        _module("models: equal memory", "rollout", 3, *arguments, *memory),
        *(_rollout(piece, model, 4, *arguments) for piece, model in both if model != first),
    ]


def _build(device: str, state: Path) -> list[Step]:
    packages = ("--install", str(state / "wheels"), "--into", str(state / "site"))
    kernels = _module("build: kernels", "gpu.kernels", 5, "--place", str(state / "kernels"), is_needed=True)
    return [
        _module("build: packages", "gpu.needs", 2, *packages, is_needed=True),
        *([kernels] if device == "cuda" else []),
        _module("build: every op", "gpu.every_op", 2, "--device", device, is_needed=True),
    ]


def _test(device: str) -> list[Step]:
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    how = ("-n", "4") if device == "cuda" else ("--collect-only",)
    return [Step(f"test: {name}", (*pytest, *how, *paths), MINUTES[name]) for name, paths in GPU_TESTS.items()]


def _sanitize(device: str) -> list[Step]:
    every_op = (sys.executable, "-m", "benchmarks.gpu.every_op", "--device", device)
    if device == "cpu":
        return [Step("sanitize: nothing", every_op, 2)]
    limit = ("--print-limit", "20")
    tools = {
        "memcheck": ("--error-exitcode", "9", *limit),
        # copies that one warp makes for itself look like hazards to it: what it reports is read, not obeyed
        "racecheck": ("--racecheck-report", "analysis", *limit),
    }
    return [
        Step(f"sanitize: {tool}", ("compute-sanitizer", "--tool", tool, *options, *every_op), 4, SANITIZED,
             refusals=REFUSALS)
        for tool, options in tools.items()
    ]  # fmt: skip
