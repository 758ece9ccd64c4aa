"""The decode step as CUDA graphs: captured once per number of rows, replayed without Python in between.

Graphs read weights and memory by address. Everything a step touches is allocated once (the cache, the tracks, the row
numbers here); where a weight has moved, the sampler makes a new step and new graphs.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from typing import Any

import torch

from sparse_rl_lightning.rollout.decoder import ROW_MULTIPLE
from sparse_rl_lightning.rollout.step import Rows, Step

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket(count: int, on_gpu: bool) -> int:
    """Rows that a step of ``count`` slots is padded to: few different numbers where each is a graph."""
    if not on_gpu or count > BUCKETS[-1]:
        return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
    return BUCKETS[bisect_left(BUCKETS, count)]


class GraphedStep:
    """Runs a step from a graph where one can be captured, eagerly where not.

    Args:
        step: What to capture.
        enabled: False runs every step eagerly.
    """

    def __init__(self, step: Step, enabled: bool) -> None:
        self.step = step
        on_gpu, has_state = step.cache.geometry.device.type == "cuda", step.cache.size.has_state
        self.enabled = enabled and on_gpu and not has_state
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Rows]] = {}
        self._pool: Any = None  # memory that all graphs share

    def __call__(self, rows: Rows) -> None:
        """One decode step for these rows."""
        count = len(rows.slots)
        if self.enabled and count not in self._graphs:
            self._capture(count)
        if not self.enabled:
            self.step(rows)
            return
        graph, own = self._graphs[count]
        own.slots.copy_(rows.slots)
        own.places.copy_(rows.places)
        graph.replay()

    def _capture(self, count: int) -> None:
        """Capture a step of ``count`` rows on rows that only pad a batch, so that no slot changes."""
        cache, device = self.step.cache, self.step.cache.geometry.device
        rows = Rows.of([], count, cache.size.num_slots, device)
        caching = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)  # casts of weights must be in the graph
        try:
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self.step(rows)  # libraries allocate and choose kernels now
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.step(rows)
        except RuntimeError as error:
            self.enabled = False
            warnings.warn(f"Decoding without CUDA graphs, because a step cannot be captured: {error}", stacklevel=2)
            return
        finally:
            torch.set_autocast_cache_enabled(caching)
        self._pool = self._pool or graph.pool()
        self._graphs[count] = graph, rows
