"""The GPUs that a test runs on: the pretend one, and the machine's if it has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from tests.native_cases import EMULATED, no_kernels
from tests.pretend_gpu import IDLE, PretendGPU


class RealGPU(AbstractContextManager[None]):
    """The GPU of this machine."""

    is_real = True

    def __exit__(self, *error: object) -> None:
        """Nothing to do: it is always there."""

    def copy_of(self, model: PreTrainedModel) -> PreTrainedModel:
        """A copy of a model on it."""
        return deepcopy(model).to("cuda")

    @contextmanager
    def unwaited(self) -> Iterator[None]:
        """Make every wait for the device an error."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def check_replayed(self, num_steps: int) -> None:
        """That steps come from graphs is what ``cuda_graphs="require"`` says."""


class Pretended(RealGPU):
    """A pretend GPU: the CPU's kernels, so its very numbers."""

    is_real = False

    def __init__(self) -> None:
        self.gpu = PretendGPU()

    def __enter__(self) -> None:
        self.gpu.__enter__()

    def __exit__(self, *error: object) -> None:
        self.gpu.__exit__(*error)

    def copy_of(self, model: PreTrainedModel) -> PreTrainedModel:
        moved: PreTrainedModel = self.gpu.copy_of(model)
        return moved

    def num_waits(self) -> int:
        """Waits so far; for an event nothing is reported by a real GPU."""
        return sum(count for (_, what), count in self.gpu.waits.items() if what != IDLE)

    @contextmanager
    def unwaited(self) -> Iterator[None]:
        before = self.num_waits()
        yield
        assert self.num_waits() == before, self.gpu.waits

    def check_replayed(self, num_steps: int) -> None:
        assert self.gpu.captures.refused == []
        assert sum(graph.replays for graph in self.gpu.captures.graphs) == num_steps


def close_on(gpu: RealGPU, close: float = 2e-4) -> float:
    """How close log-probs are to those of a CPU; with CUDA's kernels no closer (tests/rollout/test_pretend_gpu.py)."""
    return close if gpu.is_real or EMULATED else 2e-5


def on_the_cpu() -> AbstractContextManager[None]:
    """Where a GPU's numbers are compared with others: an emulation of its kernels with the references."""
    return no_kernels() if EMULATED else nullcontext()
