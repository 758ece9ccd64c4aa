"""Step times at given lengths and batches beside what memory and arithmetic need, and caches of equal memory.

A slot is filled by reading one prompt of the wanted length and forking it to all samples, so nothing is generated up to
there. Steps are timed over one whole buffer: one eviction of every slot is part of it. The full cache reserves what a
sequence may become. With sequences of all lengths up to there it reads half of that, which is what a paged cache would.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.common.pages import say
from benchmarks.common.tables import Table, label, met
from benchmarks.rollout.bound import machine
from benchmarks.rollout.clock import Clock
from benchmarks.rollout.policies import SHAPES, random_policy, random_prompts, weight_bytes
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.calibration import Hardware
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan, SlotBytes, plan_slots, slot_bytes
from sparse_rl_lightning.rollout.engine.scheduler import steps_past_end

FLOOR_GOAL, RATIO_GOAL = 0.6, 2.3
GOAL_CELLS = (("1.5B", 16384, 64), ("1.5B", 16384, 256))  # where the ratio has a goal; an H100 has no room for the last
WARM_UP, BUFFER = 16, 32  # steps before the clock runs, and those it counts
NEW_TOKENS = WARM_UP + BUFFER + 2
FULL, PAGED = "FullKV", "FullKV, sequences of all lengths up to there"
LENGTHS = 8  # different ones, of as many prompts, where there are sequences of all lengths
SHARE = 0.9  # of the free memory that slots may take; the rest is for results, activations and logits
HEADER = (
    "model", "batch", "length", "cache", "ms per step", "tokens/s", "floor ms", "share of the floor", "goal", "met",
    "times as fast as FullKV", "goal", "met", "KV GB",
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    models: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    memory_length: int  # prompt of the comparison at equal memory
    memory_bytes: int
    memory_sequences: int
    num_prompts: int  # of the whole rollout
    num_generations: int
    num_slots: int
    prompt_length: int
    mean: float
    longest: int


@dataclass(frozen=True)
class Step:
    """One measured cell."""

    seconds: float
    floor: float
    kv_bytes: int


def compressors(budgets: tuple[int, ...]) -> dict[str, Compressor]:
    """The full cache first, then SnapKV with every budget and R-KV with the smallest."""
    evicting = {f"SnapKV {budget} + {BUFFER}": SnapKV(budget=budget, buffer=BUFFER, num_sinks=0) for budget in budgets}
    redundant = RKV(budget=budgets[0], buffer=BUFFER, num_sinks=0)
    return {FULL: FullKV(), **evicting, f"R-KV {budgets[0]} + {BUFFER}": redundant}


def needed(policy: PreTrainedModel, compressor: Compressor, length: int, params: SamplingParams) -> SlotBytes:
    """What a slot takes that starts with ``length`` tokens."""
    geometry, past = CacheGeometry.of(policy), steps_past_end(policy.device)
    longest = length + params.max_completion_length + past
    size = Compression(compressor, geometry.num_layers).cache_size(geometry, 1, length, longest)
    return slot_bytes(geometry, size, params)


def plan(slot: SlotBytes, limit: int | float, wanted: int, device: str) -> MemoryPlan | None:
    """Slots for that many sequences, None where there is no room for one."""
    try:
        return plan_slots(slot, limit, wanted, device)
    except ValueError:
        return None


def floor_seconds(policy: PreTrainedModel, batch: int, read: float, best: Hardware) -> float:
    """The least time of a step that reads so many bytes of keys and values; products wait for weights or arithmetic."""
    numbers = sum(module.weight.numel() for module in policy.modules() if type(module) is nn.Linear)
    products = max(weight_bytes(policy) / best.bandwidth, 2 * batch * numbers / best.flops)
    return products + read / best.bandwidth


def time_step(
    policy: PreTrainedModel, compressor: Compressor, lengths: Sequence[int], batch: int, best: Hardware
) -> Step:
    """A decode step of ``batch`` sequences, as many of each length, and its floor."""
    device = policy.device.type
    graphs = "require" if device == "cuda" else True  # an eager step is not what is to be measured
    sampler = RolloutSampler(policy, compressor, end_token_ids=[], cuda_graphs=graphs)
    clock = Clock(WARM_UP, WARM_UP + BUFFER, device)
    params = SamplingParams(num_generations=batch // len(lengths), max_completion_length=NEW_TOKENS)
    prompts = [random_prompts(1, length, policy.config.vocab_size)[0] for length in lengths]
    rollout = sampler.generate(prompts, params, progress=clock)
    assert rollout.kv is not None
    read = float(rollout.kv.stored_integral.sum()) * token_bytes(policy) / (NEW_TOKENS - 1)
    return Step(clock.seconds, floor_seconds(policy, batch, read, best), rollout.kv.peak_bytes)


def token_bytes(policy: PreTrainedModel) -> int:
    """Bytes of a token's keys and values in all layers."""
    geometry = CacheGeometry.of(policy)
    return geometry.num_layers * geometry.num_kv_heads * geometry.bytes_per_entry


def free_memory(device: str) -> None:
    """Give back what the last cell held."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def try_step(
    policy: PreTrainedModel, compressor: Compressor, length: int, batch: int, best: Hardware, *, is_spread: bool = False
) -> Step | str:
    """The time, or why there is none.

    Args:
        policy: Policy.
        compressor: Compressor.
        length: Tokens of every sequence when the clock begins.
        batch: Number of sequences.
        best: Hardware of the floor.
        is_spread: Whether the sequences are of all lengths up to that, instead.
    """
    device = policy.device.type
    free_memory(device)
    params = SamplingParams(num_generations=batch, max_completion_length=NEW_TOKENS)
    slot = needed(policy, compressor, length, params)
    room = plan(slot, SHARE, batch, device)
    if room is None or room.num_slots < batch:
        have = "not one slot" if room is None else f"{room.num_slots} slots of {room.limit / 1e9:.1f} GB"
        return f"needs {slot.of(batch) / 1e9:.1f} GB, {have} allowed"
    try:
        lengths = [length * (2 * i + 1) // (2 * LENGTHS) for i in range(LENGTHS)] if is_spread else [length]
        return time_step(policy, compressor, lengths, batch, best)
    except torch.OutOfMemoryError as failure:
        return f"out of memory, slots {slot.of(batch) / 1e9:.1f} GB: {str(failure).split('. ')[0]}"


def cells_table(grid: Grid, dtype: torch.dtype, device: str) -> Iterator[Table]:
    """Every model, batch, length and cache; the table after every row."""
    best = machine(dtype, device)
    note = (
        f"Random weights, {label(dtype)}; {BUFFER} steps each after {WARM_UP}, one eviction of every slot among them, "
        f"no sinks. Floor: weights, keys and values once, at the {best.bandwidth / 1e12:.2f} TB/s of a copy; for "
        f"weights their products at the {best.flops / 1e12:.2f} TFLOP/s of a square one, where those take longer. "
        "FullKV reserves the whole length; with sequences of all lengths up to there it reads what a paged cache would."
    )
    table = Table("Steps at given lengths", HEADER, note)
    for model in grid.models:
        policy = random_policy(SHAPES[model], dtype, device)
        for batch in grid.batches:
            for length in grid.lengths:
                for row in cell_rows(policy, (model, length, batch), grid.budgets, best):
                    table.add(*row)
                    yield table
        del policy
        free_memory(device)


def cell_rows(
    policy: PreTrainedModel, cell: tuple[str, int, int], budgets: tuple[int, ...], best: Hardware
) -> Iterator[tuple[str, ...]]:
    """The full and every evicting cache in one cell of the grid."""
    model, length, batch = cell
    dense: Step | str = ""
    every = compressors(budgets)
    spread = {PAGED: every[FULL]} if batch % LENGTHS == 0 else {}
    for name, compressor in {FULL: every[FULL], **spread, **every}.items():
        step = try_step(policy, compressor, length, batch, best, is_spread=name == PAGED)
        dense = step if name == FULL else dense
        say(f"{model}, batch {batch}, length {length}, {name}: {step}")
        start = (SHAPES[model].name, str(batch), f"{length:,}", name)
        if isinstance(step, str):
            yield (*start, step, *[""] * (len(HEADER) - len(start) - 1))
            continue
        share = step.floor / step.seconds
        ratio = dense.seconds / step.seconds if isinstance(dense, Step) and step is not dense else None
        judged = ratio is not None and cell in GOAL_CELLS and compressor.evicts
        yield (
            *start, f"{1e3 * step.seconds:.2f}", f"{batch / step.seconds:,.0f}", f"{1e3 * step.floor:.2f}",
            f"{100 * share:.0f} %", f">= {100 * FLOOR_GOAL:.0f} %", met(share, FLOOR_GOAL),
            "" if ratio is None else f"{ratio:.2f}",
            f">= {RATIO_GOAL:g}" if judged else "", met(ratio or 0, RATIO_GOAL) if judged else "",
            f"{step.kv_bytes / 1e9:.2f}",
        )  # fmt: skip


def memory_table(grid: Grid, dtype: torch.dtype, device: str) -> Iterator[Table]:
    """The same memory for all caches, as many slots as fit into it; the table after every row."""
    model, length, best = grid.models[0], grid.memory_length, machine(dtype, device)
    policy = random_policy(SHAPES[model], dtype, device)
    title = f"Equal memory: {grid.memory_bytes / 1e9:g} GB, {SHAPES[model].name}, length {length:,}"
    header = ("cache", "slots", "ms per step", "tokens/s", "times as many as FullKV", "KV GB", "plan")
    table = Table(title, header, "No sinks.")
    dense = None
    for name, compressor in compressors(grid.budgets).items():
        params = SamplingParams(num_generations=grid.memory_sequences, max_completion_length=NEW_TOKENS)
        room = plan(needed(policy, compressor, length, params), grid.memory_bytes, grid.memory_sequences, device)
        step = try_step(policy, compressor, length, room.num_slots, best) if room else "not one slot fits"
        if room is None or isinstance(step, str):
            table.add(name, "", str(step), "", "", "", "")
            yield table
            continue
        rate = room.num_slots / step.seconds
        dense = rate if name == FULL else dense
        ratio = f"{rate / dense:.2f}" if dense else ""
        times = (f"{1e3 * step.seconds:.2f}", f"{rate:,.0f}", ratio, f"{step.kv_bytes / 1e9:.2f}")
        table.add(name, str(room.num_slots), *times, room.why)
        yield table
