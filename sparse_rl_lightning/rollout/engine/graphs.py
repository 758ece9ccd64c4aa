"""The decode step as CUDA graphs: captured once per number of rows, replayed without Python in between.

Graphs read weights and memory by address. Everything that a step touches is allocated once (the cache, the logs, the
row numbers here); where a weight has moved, the engine makes new graphs.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.rollout.engine.decoder import ROW_MULTIPLE

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCaptureUnsupported and its kin


@dataclass
class Rows:
    """The slot that each row of a batch works on; rows behind those in use pad the batch."""

    slots: Tensor  # (R,) int64, -1 for padding: what the ops take
    places: Tensor  # (R,) int64, the last row of what is kept per slot for padding: what indexing takes
    used: list[int]  # the slots without padding, as the host knows them

    @classmethod
    def of(cls, slots: list[int], count: int, num_slots: int, device: torch.device) -> Rows:
        """Rows for these slots, padded to ``count``."""
        padding = count - len(slots)
        return cls(
            torch.tensor(slots + [-1] * padding, device=device),
            torch.tensor(slots + [num_slots] * padding, device=device),
            slots,
        )


Step: TypeAlias = Callable[[Rows], None]


def bucket(count: int, on_gpu: bool) -> int:
    """Rows that a step of ``count`` slots is padded to: few different numbers where each is a graph."""
    if not on_gpu or count > BUCKETS[-1]:
        return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
    return BUCKETS[bisect_left(BUCKETS, count)]


class StepGraphs:
    """The graphs of one step on one cache; steps that cannot be captured run eagerly.

    Args:
        num_slots: Slots of the cache.
        device: The cache's device.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots, self.device = num_slots, device
        self.enabled = True
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Rows]] = {}
        self._pool: Any = None  # memory that all graphs share

    def run(self, step: Step, rows: Rows) -> None:
        """One decode step for these rows."""
        count = len(rows.slots)
        if self.enabled and count not in self._graphs:
            self._capture(step, count)
        if not self.enabled:
            step(rows)
            return
        graph, own = self._graphs[count]
        own.slots.copy_(rows.slots)
        own.places.copy_(rows.places)
        graph.replay()

    def _capture(self, step: Step, count: int) -> None:
        """Capture a step of ``count`` rows on rows that only pad a batch, so that no slot changes.

        Raises:
            RuntimeError: Whatever the step itself raises, such as a lack of memory. Only what cannot be captured is
                run eagerly from now on.
        """
        device = self.device
        rows = Rows.of([], count, self.num_slots, device)
        with _without_autocast_cache():  # casts of weights must be in the graph
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                step(rows)  # libraries allocate and choose kernels now
            torch.cuda.current_stream(device).wait_stream(side)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph, outside = torch.cuda.CUDAGraph(), sys.exception()
            try:
                with _recovering(device, self._pool):
                    with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                        step(rows)
            except RuntimeError as error:
                first = first_error(error, outside)
                if not is_of_capture(first):
                    raise first from None
                self.enabled = False
                warnings.warn(f"Decoding without CUDA graphs, because a step cannot be captured: {first}", stacklevel=2)
                return
        self._graphs[count] = graph, rows


def first_error(error: BaseException, outside: BaseException | None) -> BaseException:
    """What really went wrong: ending a capture that was spoiled raises an error of its own.

    Args:
        error: What the capture ended with.
        outside: What was being handled before it began, if anything: that is no part of it.
    """
    while error.__context__ is not None and error.__context__ is not outside:
        error = error.__context__
    return error


def is_of_capture(error: BaseException) -> bool:
    """Whether an error says that something cannot be captured, and not that memory is lacking or broken."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) in CAPTURE_ERRORS
    return "captur" in str(error).lower()  # of torch's generators and libraries


@contextlib.contextmanager
def _recovering(device: torch.device, pool: Any) -> Iterator[None]:
    """Where a capture fails at its end, torch leaves its stream current, and generator and allocator captured."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):  # sets the stream back
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        with contextlib.suppress(RuntimeError):  # where the capture was ended properly there is nothing left to end
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    caching = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caching)
