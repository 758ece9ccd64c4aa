"""Measurement of a machine: memory bandwidth, matrix products, and the fixed cost of a decode step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer, timer

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
    with torch.accelerator.device_index(None if device.type == "cpu" else device.index):  # for which the clock waits
        numbers = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        copy = torch.empty_like(numbers)  # read and written
        bandwidth = 2 * size / _seconds(lambda: copy.copy_(numbers), repeats)
        left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        flops = 2 * width**3 / _seconds(lambda: left @ right, repeats)
        return Hardware(bandwidth, flops, _step_overhead(device, dtype, num_layers))


def _seconds(work: Callable[[], Tensor], repeats: int) -> float:
    """The seconds of the fastest repetition: other work on the machine can only slow it down."""
    clock = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(clock.timeit(1).mean for _ in range(repeats))


def _step_overhead(device: torch.device, dtype: torch.dtype, num_layers: int) -> float:
    """The seconds of a decode step of one sequence on a model that computes next to nothing."""
    model = tiny_model(num_layers=num_layers, hidden_size=32, eos_token_id=None)
    model.to(device, dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    sampler = RolloutSampler(model, FullKV())
    clock: dict[int, float] = {}

    def note(progress: Progress) -> None:
        clock[progress.step] = timer()

    for _ in range(2):  # graphs are captured the first time
        clock.clear()
        sampler.generate([[5, 6, 7]], SamplingParams(max_completion_length=2 * STEPS), progress=note)
    steps = sorted(clock)
    first, last = steps[len(steps) // 4], steps[-2]
    return (clock[last] - clock[first]) / (last - first)
