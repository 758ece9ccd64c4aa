"""Where the time of a decode step and of a compression goes on the GPU, kernel by kernel.

    python -m benchmarks.gpu.profile [--model 1.5B] [--save benchmarks/results]

16 steps in which no slot is compressed, and 16 in which two or so of 256 are in every step, as in a refilled rollout:
what the second takes longer is the price of compressions. Then the products of a layer alone, by library, and in parts
of their inner dimension, whose float32 results would have to be added up: whether such a kernel is worth writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.common.tables import Table
from benchmarks.ops.timing import Call
from benchmarks.rollout.bound import seconds
from benchmarks.rollout.clock import Clock
from benchmarks.rollout.policies import SHAPES, random_policy, random_prompts
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.rollout.engine.engine import CudaGraphs

STEPS, WARM_UP = 16, 8
NUM_ROWS = 25  # kernels that are named; the others are one row
LARGER_THAN_L2 = 2**27  # bytes of copies of a weight, so that each comes from memory, as in a step
Times = Counter[str]


def measured(sampler: RolloutSampler, prompts: list[list[int]], device: str) -> tuple[Times, Counter[str], float]:
    """Milliseconds and number of launches of every kernel per step, and milliseconds of a step without the profiler."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    params = SamplingParams(max_completion_length=WARM_UP + 3 * STEPS)
    plain = Clock(WARM_UP, WARM_UP + STEPS, device)
    sampler.generate(prompts, params, progress=plain)
    profiled = Clock(WARM_UP, WARM_UP + STEPS, device, profiler=profile(activities=activities))
    sampler.generate(prompts, params, progress=profiled)
    times, launches = Times(), Counter[str]()
    assert profiled.profiler is not None
    for event in profiled.profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue  # an operation on the host has the time of its kernels too, which have rows of their own
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total > 0:
            times[event.key] += 1e-3 * total / profiled.steps
            launches[event.key] += event.count / profiled.steps
    return times, launches, plain.milliseconds


def tables(model: str, num_slots: int, budget: int, device: str) -> Iterator[Table]:
    """A table without and one with compressions, and one of the products of a layer."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = random_policy(SHAPES[model], dtype, device)
    buffer = budget // 4
    graphs: CudaGraphs = "require" if device == "cuda" else True
    compressor = RKV(budget=budget, buffer=buffer, num_sinks=0)
    sampler = RolloutSampler(policy, compressor, num_slots, end_token_ids=[], cuda_graphs=graphs)
    vocab = SHAPES[model].vocab
    still = random_prompts(num_slots, budget // 2, vocab)  # too short to be full within the steps
    whole = random_prompts(num_slots, budget + buffer - WARM_UP, vocab)
    spread = [prompt[: len(prompt) - i % buffer] for i, prompt in enumerate(whole)]
    for title, prompts in {"no compressions": still, "slots compressed in every step": spread}.items():
        times, launches, step = measured(sampler, prompts, device)
        total = max(sum(times.values()), 1e-9)
        table = Table(
            f"{STEPS} steps, {title}",
            ("kernel" if device == "cuda" else "op", "ms per step", "share", "per step"),
            f"{SHAPES[model].name}, {num_slots} slots, R-KV {budget} + {buffer}: {step:.2f} ms per step, of which the "
            f"device works {total:.2f} ms.",
        )
        for name, ms in times.most_common(NUM_ROWS):
            table.add(f"`{name[:90]}`", f"{ms:.3f}", f"{100 * ms / total:.1f} %", f"{launches[name]:.1f}")
        others = times.most_common()[NUM_ROWS:]
        rest = sum(ms for _, ms in others)
        count = sum(launches[name] for name, _ in others)
        table.add(f"{len(others)} others", f"{rest:.3f}", f"{100 * rest / total:.1f} %", f"{count:.1f}")
        yield table
    yield products_table(model, device)


def cycled(product: Callable[[Tensor], object], weights: Tensor) -> Call:
    """A product with another copy of the weight at every call."""
    copies = cycle(weights)
    return lambda: product(next(copies))


def products_table(model: str, device: str) -> Table:
    """Microseconds of each product of a layer, weights and inputs in bfloat16."""
    s = SHAPES[model]
    shapes = {  # rows and columns of the weight, and parts
        "qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, 1), "o": (s.hidden, s.heads * s.head_dim, 3),
        "gate and up": (2 * s.intermediate, s.hidden, 1), "down": (s.hidden, s.intermediate, 5),
    }  # fmt: skip
    can_choose = torch.backends.cuda.is_built() and device == "cuda"
    libraries = ("cublas", "cublaslt") if can_choose else ("default",)
    table = Table("Products of a layer", ("product", "rows", *(f"{name}, us" for name in libraries), "in parts, us"))
    for name, (wide, deep, wanted) in shapes.items():
        parts = next(count for count in range(wanted, 0, -1) if deep % count == 0)
        count = LARGER_THAN_L2 // (2 * wide * deep) + 1 if can_choose else 1
        weights = torch.randn(count, wide, deep, device=device, dtype=torch.bfloat16)
        in_parts = weights.view(count, wide, parts, deep // parts).permute(0, 2, 3, 1)
        for rows in (8, 64, 256):
            x = torch.randn(rows, deep, device=device, dtype=torch.bfloat16)
            times = []
            for library in libraries:
                if can_choose:
                    torch.backends.cuda.preferred_blas_library(library)
                times.append(seconds(cycled(partial(torch.nn.functional.linear, x), weights), device))
            if can_choose:
                torch.backends.cuda.preferred_blas_library("default")
            if parts > 1:
                split_x = x.view(rows, parts, deep // parts).transpose(0, 1)
                out = {"out_dtype": torch.float32} if can_choose else {}
                times.append(seconds(cycled(partial(torch.bmm, split_x, **out), in_parts), device))
            table.add(name, str(rows), *(f"{1e6 * t:.1f}" for t in times), *[""] * (parts == 1))
    return table


def main() -> None:
    """Profile, print and save."""
    parser = options.parser(__doc__, "gpu-profile.md", device="cuda")
    parser.add_argument("--model", default="1.5B", choices=list(SHAPES))
    args = options.parsed(parser)
    num_slots, budget = (8, 64) if args.model == "tiny" else (256, 512)
    text = machine(args.device)
    for table in tables(args.model, num_slots, budget, args.device):
        text += f"\n\n{table}"
        save(args.save, "gpu-profile", "benchmarks.gpu.profile", text)
    print(text)


if __name__ == "__main__":
    main()
