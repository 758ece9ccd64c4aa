"""Measurement of a machine: memory bandwidth, matrix products, and the fixed cost of a decode step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from sparse_rl_lightning.calibration.shapes import Hardware
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.tiny import tiny_model
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams

SIZES = {"cpu": (2**26, 1024), "cuda": (2**31, 8192)}  # bytes to read, width of the square matrices
STEPS = 64  # decode steps that are timed


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
    size, width = SIZES[device.type]
    numbers = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
    # read and written
    copy = torch.empty_like(numbers)
    bandwidth = 2 * size / _seconds(lambda: copy.copy_(numbers), device, repeats)
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    flops = 2 * width**3 / _seconds(lambda: left @ right, device, repeats)
    return Hardware(bandwidth, flops, _step_overhead(device, dtype, num_layers))


def _seconds(work: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """The seconds of the fastest repetition, after a warm-up: other work on the machine can only slow it down."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))


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
