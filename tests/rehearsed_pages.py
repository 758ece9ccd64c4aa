"""Writes every page that ``make gpu`` measures, on the pretend GPU: ``python -m tests.rehearsed_pages FOLDER``.

What is rehearsed is the way to the page: the device's name and memory, graphs, events, types, in toy sizes. The times
are those of this CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import invariance, profile
from benchmarks.gpu.steps import PIECES, steps
from benchmarks.ops import __main__ as ops
from benchmarks.rollout import __main__ as rollout
from benchmarks.rollout import bound
from tests.pretend_gpu import PretendEvent, PretendGPU

COMMANDS = {"benchmarks.ops": ops, "benchmarks.rollout": rollout, "benchmarks.gpu.profile": profile,
            "benchmarks.gpu.invariance": invariance}  # fmt: skip


class TimedEvent(PretendEvent):
    """An event that knows when it was recorded."""

    def __init__(self, gpu: PretendGPU, enable_timing: bool = False) -> None:
        super().__init__(gpu)

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.time = time.perf_counter()

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1e3 * (end.time - self.time)


@contextmanager
def a_card() -> Iterator[PretendGPU]:
    """The pretend GPU with a name, memory and a clock."""
    with ExitStack() as stack, PretendGPU() as gpu:
        known: dict[str, Any] = {
            "Event": lambda enable_timing=False: TimedEvent(gpu, enable_timing),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "_sleep": lambda cycles: None,
            "get_device_name": lambda device=None: "pretend GPU",
            "mem_get_info": lambda device=None: (2**30, 2**30),  # counting what is there takes long
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
        }
        for name, pretended in known.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, pretended))
        yield gpu


def commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Module and arguments of every step that measures, as they are run on a GPU but in toy sizes."""
    for step in steps(PIECES, "cpu", folder, folder):
        if step.command[1] == "-m" and step.command[2] in COMMANDS:
            arguments = ["cuda" if word == "cpu" else word for word in step.command[3:]]
            yield step.command[2], arguments


def main() -> None:
    folder, grid = Path(sys.argv[1]), rollout.QUICK.grid
    few = replace(grid, lengths=grid.lengths[:1], batches=(8,), memory_sequences=4, num_prompts=2, mean=6, longest=16)
    for module, arguments in commands(folder):
        with (
            a_card(),
            mock.patch.object(sys, "argv", [module, *arguments]),
            mock.patch.object(rollout, "QUICK", replace(rollout.QUICK, grid=few)),
            mock.patch.object(profile, "STEPS", 4),
            mock.patch.object(invariance, "NUM_COMPARED", 2),
            mock.patch.dict(bound.WIDTHS, cuda=64),
        ):
            COMMANDS[module].main()


if __name__ == "__main__":
    main()
