"""What one decode step is spent on, by torch's profiler, over whole cycles of a slot: evictions have their share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.tables import Table, label
from benchmarks.rollout.clock import Clock
from benchmarks.rollout.policies import Shape, random_policy, random_prompts
from benchmarks.rollout.speed import FULL, SPARSE, Setting
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Compressor, FullKV, SnapKV

PRODUCTS, ATTENTION, EVICTION = "matrix products", "attention and append", "eviction"
LAYERS, SAMPLING, BOOKKEEPING = "norms, rotation, activation", "sampling", "bookkeeping"
REST = "python and other"
KINDS = (PRODUCTS, ATTENTION, EVICTION, LAYERS, SAMPLING, BOOKKEEPING)
PRODUCT_OPS = ("aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::bmm", "mkldnn::_linear_pointwise")
ATTENTION_OPS = (
    "sparse_rl::append_attend", "sparse_rl::append", "sparse_rl::decode_attention",
    "aten::scaled_dot_product_attention",
)  # fmt: skip
LAYER_OPS = ("sparse_rl::rms_norm", "sparse_rl::silu_mul")
OWN_OPS = "sparse_rl::"
WARM_UP = 8  # steps
ROLLOUTS = 3


@dataclass(frozen=True)
class Split:
    """Milliseconds of a step."""

    times: dict[str, float]
    profiled: float  # their sum
    plain: float  # of the same steps without the profiler


def split(shape: Shape, dtype: torch.dtype, compressor: Compressor, prompts: list[list[int]], steps: int) -> Split:
    """Where the time of a step goes, over ``steps`` steps after these prompts; the quietest of a few rollouts."""
    policy = random_policy(shape, dtype, "cpu")
    sampler = RolloutSampler(policy, compressor, end_token_ids=[])
    params = SamplingParams(max_completion_length=steps + 2 * WARM_UP)
    plain, profiled = [], []
    for _ in range(ROLLOUTS):
        plain.append(Clock(WARM_UP, WARM_UP + steps))
        profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        profiled.append(Clock(WARM_UP, WARM_UP + steps, profiler=profiler))
        for clock in (plain[-1], profiled[-1]):
            sampler.generate(prompts, params, progress=clock)
    best = min(profiled, key=lambda clock: clock.milliseconds)
    assert best.profiler is not None
    times = dict.fromkeys(KINDS, 0.0)
    for work, microseconds in attribute(best.profiler.events(), shape):
        times[work] += 1e-3 * microseconds / best.steps
    times[REST] = best.milliseconds - sum(times.values())
    return Split(times, best.milliseconds, min(clock.milliseconds for clock in plain))


def attribute(events: Any, shape: Shape) -> Iterator[tuple[str, float]]:
    """Kind and microseconds of every op, in order; one whose shapes say nothing goes with the op before."""
    work = BOOKKEEPING
    for event in sorted(outermost(events), key=lambda event: event.time_range.start):
        work = kind_of(event.name, event.input_shapes or [], shape) or work
        yield work, event.time_range.elapsed_us()


def outermost(events: Any) -> Iterator[FunctionEvent]:
    """Ops and ranges of ours that no other one contains; ranges of others are opened."""
    waiting = [event for event in events if event.cpu_parent is None]
    while waiting:
        event = waiting.pop()
        if "::" in event.name:
            yield event
        else:
            waiting += event.cpu_children


def kind_of(name: str, shapes: Sequence[Sequence[int]], shape: Shape) -> str | None:
    """What an op belongs to, by its name and by the width of what it reads; None where both are silent."""
    if name in PRODUCT_OPS:
        return PRODUCTS
    if name in ATTENTION_OPS:
        return ATTENTION
    if name in LAYER_OPS:
        return LAYERS
    if name.startswith(OWN_OPS):
        return SAMPLING if name.endswith("::draw") else EVICTION
    operands = [sizes for sizes in shapes if len(sizes) and not (len(sizes) == 2 and sizes[1] == 1)]
    if not operands:
        return None
    if any(sizes[-1] == shape.vocab for sizes in operands):
        return SAMPLING
    head_dim = shape.head_dim
    narrow = {head_dim, head_dim // 2, shape.kv_heads * head_dim}
    wide = {shape.hidden, (shape.heads + 2 * shape.kv_heads) * head_dim, shape.intermediate, 2 * shape.intermediate}
    return LAYERS if any(len(sizes) >= 2 and sizes[-1] in wide | narrow for sizes in operands) else BOOKKEEPING


def split_table(setting: Setting, middle: int, cycles: int) -> Table:
    """The own engine's steps: sparse over whole cycles of the buffer, the full cache in the middle of its rollout."""
    s, steps = setting, cycles * setting.buffer
    sparse = SnapKV(budget=s.budget, buffer=s.buffer, num_sinks=0)
    cases: dict[str, tuple[Compressor, int]] = {SPARSE: (sparse, s.budget), FULL: (FullKV(), middle)}
    columns = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, (compressor, length) in cases.items():
            prompts = random_prompts(s.num_sequences, length, s.shape.vocab)
            columns[f"{name} {label(dtype)}"] = split(s.shape, dtype, compressor, prompts, steps)
    note = (
        f"Milliseconds per step over {steps} steps, under torch's profiler, which costs what the last two rows differ "
        f"by; the quietest of {ROLLOUTS} rollouts. Slots of {s.budget} to {s.budget + s.buffer} entries, full caches "
        f"of {middle} and more."
    )
    table = Table("A step", ("part", *columns), note)
    for work in (*KINDS, REST):
        table.add(work, *(f"{c.times[work]:.2f} ({100 * c.times[work] / c.profiled:.0f} %)" for c in columns.values()))
    table.add("whole step, profiled", *(f"{c.profiled:.2f}" for c in columns.values()))
    table.add("whole step, not profiled", *(f"{c.plain:.2f}" for c in columns.values()))
    return table
