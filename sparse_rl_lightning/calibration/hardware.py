"""Measurement of a machine: memory bandwidth, matrix products, and the fixed cost of a decode step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sparse_rl_lightning.calibration.shapes import Hardware
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.tiny import tiny_model
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams

SIZES = {"cpu": (2**26, 1024), "cuda": (2**31, 8192)}  # bytes to read, width of the square matrices
STEPS = 64  # decode steps that are timed


@dataclass(frozen=True)
class _Stopwatch:
    device: torch.device
    repeats: int

    def best(self, work: Callable[[], object]) -> float:
        """The seconds of the fastest repetition, after a warm-up: other work on the machine can only slow it down."""
        work()
        seconds = []
        for _ in range(self.repeats):
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_hardware(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, num_layers: int = 28, repeats: int = 10
) -> Hardware:
    """Bandwidth of a large read, speed of a large matrix product, and the time of a decode step without work.

    The last is measured with this library's own decode step on a model with ``num_layers`` layers, too small to cost
    anything else, with CUDA graphs if available.

    Args:
        device: Device to measure.
        dtype: Type of the matrices.
        num_layers: Layers of the model that rollouts will be of.
        repeats: Number of repetitions, of which the fastest counts.
    """
    device = torch.device(device)
    watch, (size, width) = _Stopwatch(device, repeats), SIZES[device.type]
    bandwidth = 2 * size / _copy_seconds(watch, size, dtype)  # read and written
    flops = 2 * width**3 / _product_seconds(watch, width, dtype)
    hardware = Hardware(bandwidth, flops)
    return replace(hardware, step_overhead=_step_overhead(device, dtype, num_layers))


def _copy_seconds(watch: _Stopwatch, size: int, dtype: torch.dtype) -> float:
    numbers = torch.zeros(size // dtype.itemsize, dtype=dtype, device=watch.device)
    copy = torch.empty_like(numbers)
    return watch.best(lambda: copy.copy_(numbers))


def _product_seconds(watch: _Stopwatch, width: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(width, width, device=watch.device).to(dtype) for _ in range(2))
    return watch.best(lambda: left @ right)


def _step_overhead(device: torch.device, dtype: torch.dtype, num_layers: int) -> float:
    """The seconds of a decode step of one sequence on a model that computes next to nothing."""
    model = tiny_model(num_layers=num_layers, hidden_size=32, eos_token_id=None)
    model.to(device, dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    sampler = RolloutSampler(model, FullKV())
    clock: dict[int, float] = {}

    def note(now: Progress) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock[now.step] = time.perf_counter()

    for _ in range(2):  # graphs are captured the first time
        clock.clear()
        sampler.generate([[5, 6, 7]], SamplingParams(max_completion_length=2 * STEPS), progress=note)
    steps = sorted(clock)
    first, last = steps[len(steps) // 4], steps[-2]
    return (clock[last] - clock[first]) / (last - first)
