"""The clock of a rollout: time per step between two steps."""

from __future__ import annotations

import time

import torch
from torch.profiler import profile

from sparse_rl_lightning.rollout import Progress


class Clock:
    """Time per step between two steps of a rollout, taken on the device without waiting; give it as ``progress``.

    Args:
        first: Steps done when it starts.
        last: Steps done when it stops.
        device: ``cuda`` for events of the GPU.
        profiler: Runs between the two.
    """

    def __init__(self, first: int, last: int, device: str = "cpu", profiler: profile | None = None) -> None:
        self.first, self.last, self.on_gpu, self.profiler = first, last, device == "cuda", profiler
        self.marks: list[tuple[int, float | torch.cuda.Event]] = []

    def __call__(self, progress: Progress) -> None:
        """Start or stop, after a step or after a few."""
        if not self.marks and progress.step >= self.first:
            if self.profiler is not None:
                self.profiler.start()
            self.marks.append((progress.step, self._now()))
        elif len(self.marks) == 1 and progress.step >= self.last:
            self.marks.append((progress.step, self._now()))
            if self.profiler is not None:
                self.profiler.stop()

    def _now(self) -> float | torch.cuda.Event:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def steps(self) -> int:
        """Number of steps between the marks."""
        return self.marks[1][0] - self.marks[0][0]

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        (_, start), (_, end) = self.marks
        if isinstance(start, float) or isinstance(end, float):
            return (end - start) / self.steps  # type: ignore[operator]  # both are
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / self.steps

    @property
    def milliseconds(self) -> float:
        """Milliseconds of one step."""
        return 1e3 * self.seconds
