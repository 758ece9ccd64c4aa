"""Whole rollouts of log-normal lengths, in which slots are refilled, beside steps without refill and ``generate``.

What a refilled rollout loses against steps alone is prefill, compressions of a few slots at a time, and the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from benchmarks.common.pages import say
from benchmarks.common.tables import Table, met
from benchmarks.ops.timing import wait
from benchmarks.rollout.cells import FULL, SHARE, Grid, Step, compressors, free_memory, needed, plan, try_step
from benchmarks.rollout.policies import SHAPES, Countdown, random_prompts, spread
from benchmarks.rollout.speed import generate_runner
from benchmarks.rollout.tail import SIGMA
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.calibration import Hardware
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import Progress

GOAL = 0.85  # of the speed of steps alone
TOP_P = 0.95  # as the model cards of Qwen recommend: what drawing from a part costs
ANY = Hardware(1, 1)  # of steps whose floor nobody asks for
GENERATED = 64  # tokens that generate is timed over: it copies its cache at every step, whole rollouts would take hours
HEADER = (
    "cache", "seconds", "tokens/s", "times as fast as FullKV", "share of steps alone", "goal", "met", "KV GB",
)  # fmt: skip


def whole_tables(grid: Grid, dtype: torch.dtype, device: str) -> Iterator[Table]:
    """A rollout per model and cache, from the first prompt to the last token; a model's table again after every row."""
    for model in grid.models:
        yield from whole_table(grid, model, dtype, device)
        free_memory(device)


def whole_table(grid: Grid, model: str, dtype: torch.dtype, device: str) -> Iterator[Table]:
    """The rollouts of one model; the table after every row."""
    shape = SHAPES[model]
    countdown = Countdown.log_normal(shape, dtype, device, grid.mean, SIGMA, grid.longest)
    table = Table(f"Whole rollouts, {shape.name}", HEADER)
    dense = None
    cases = [(name, compressor, 1.0) for name, compressor in compressors(grid.budgets).items()]
    smallest, evicting, _ = cases[1]
    for name, compressor, top_p in [*cases, (f"{smallest}, top-p {TOP_P:g}", evicting, TOP_P)]:
        free_memory(device)
        outcome = rollout(countdown, compressor, grid, device, top_p)
        if isinstance(outcome, str):
            table.add(name, outcome, *[""] * (len(HEADER) - 2))
            yield table
            continue
        taken, result, counts = outcome
        assert result.kv is not None
        dense = taken if name == FULL else dense
        rate = int(result.completion_lengths.sum()) / taken
        say(f"{shape.name}, whole rollout, {name}: {taken:.1f} s")
        table.add(
            name, f"{taken:.2f}", f"{rate:,.0f}", f"{dense / taken:.2f}" if dense else "",
            *share_of_steps(countdown, compressor, grid, counts, taken), f"{result.kv.peak_bytes / 1e9:.2f}",
        )  # fmt: skip
        table.note = table.note or note(grid, result)  # of the first row: top-p draws other lengths
        yield table
        del result, outcome, counts
    add_generate(table, countdown, grid, device)
    yield table


def equal_table(grid: Grid, dtype: torch.dtype, device: str) -> Iterator[Table]:
    """Long rollouts, every cache with as many slots as the same memory holds; the table after every row."""
    shape = SHAPES[grid.models[0]]
    mean, longest = grid.memory_length // 4, grid.memory_length - grid.prompt_length
    countdown = Countdown.log_normal(shape, dtype, device, mean, SIGMA, longest)
    title = f"Whole rollouts in {grid.memory_bytes / 1e9:g} GB, {shape.name}"
    table, dense = Table(title, ("cache", "slots", "seconds", "tokens/s", "times as fast as FullKV", "KV GB")), None
    for name, compressor in compressors(grid.budgets[:1]).items():
        free_memory(device)
        params = SamplingParams(num_generations=grid.num_generations, max_completion_length=longest + 8)
        sequences = grid.num_prompts * grid.num_generations
        slot = needed(countdown.policy, compressor, grid.prompt_length, params)
        room = plan(slot, grid.memory_bytes, sequences, device)
        outcome = "not one slot fits"
        if room is not None:
            sizes = replace(grid, num_slots=room.num_slots, mean=mean, longest=longest)
            outcome = rollout(countdown, compressor, sizes, device, 1.0)
        if isinstance(outcome, str):
            table.add(name, outcome, "", "", "", "")
            yield table
            continue
        taken, result, _ = outcome
        dense = taken if name == FULL else dense
        rate = f"{int(result.completion_lengths.sum()) / taken:,.0f}"
        ratio = f"{dense / taken:.2f}" if dense else ""
        table.add(name, str(room.num_slots), f"{taken:.2f}", rate, ratio, f"{result.kv.peak_bytes / 1e9:.2f}")
        table.note = (
            f"{sequences} sequences after prompts of {grid.prompt_length}; {spread(result.completion_lengths.cpu())}."
        )
        yield table


def note(grid: Grid, result: Rollout) -> str:
    """What was rolled out, and what it is compared with."""
    return (
        f"{grid.num_prompts} prompts x {grid.num_generations}, {grid.num_slots} slots, prompt {grid.prompt_length}; "
        f"{spread(result.completion_lengths.cpu())}. No sinks. Steps alone: with as many sequences as were "
        f"in slots, which all compress at the same time; `generate` is timed over the first "
        f"{min(GENERATED, grid.longest)} tokens of as many sequences as there are slots, none of which ends: its best."
    )


def rollout(
    countdown: Countdown, compressor: Compressor, grid: Grid, device: str, top_p: float
) -> tuple[float, Rollout, list[tuple[int, int]]] | str:
    """Seconds, the rollout, and steps done and sequences in slots every few steps; or why there is none."""
    params = SamplingParams(num_generations=grid.num_generations, max_completion_length=grid.longest + 8, top_p=top_p)
    slot = needed(countdown.policy, compressor, grid.prompt_length, params)
    room = plan(slot, SHARE, grid.num_slots, device)
    if room is None or room.num_slots < grid.num_slots:
        return f"needs {slot.of(grid.num_slots) / 1e9:.1f} GB"
    graphs = "require" if device == "cuda" else True
    sampler = RolloutSampler(countdown.policy, compressor, grid.num_slots, [Countdown.END], cuda_graphs=graphs)
    prompts = countdown.prompts(grid.num_prompts, grid.prompt_length)
    with suppress(Begun):  # allocates and captures once and for all, for the same slots and kind of drawing
        sampler.generate(prompts, params, progress=begun)
    wait(device)
    start = time.perf_counter()
    counts = list[tuple[int, int]]()
    result = sampler.generate(prompts, params, progress=lambda now: counts.append((now.step, now.active)))
    wait(device)
    return time.perf_counter() - start, result, counts


class Begun(Exception):
    """The first steps of a rollout have been done."""


def begun(progress: Progress) -> None:
    """Break off a rollout after its first steps."""
    raise Begun


def share_of_steps(
    countdown: Countdown, compressor: Compressor, grid: Grid, counts: list[tuple[int, int]], taken: float
) -> tuple[str, str, str]:
    """The seconds of as many steps alone with as many sequences, over those of a rollout; for evicting caches.

    Args:
        countdown: Policy.
        compressor: Compressor.
        grid: Sizes.
        counts: Steps done and sequences in slots, every few steps of the rollout.
        taken: Seconds of the rollout.
    """
    if not compressor.evicts:
        return "", "", ""
    length = grid.prompt_length + int(grid.mean)
    sizes = sorted({max(1, grid.num_slots // divisor) for divisor in (32, 8, 4, 2, 1)})
    steps = [try_step(countdown.policy, compressor, length, size, ANY) for size in sizes]
    if failed := [step for step in steps if isinstance(step, str)]:
        return failed[0], "", ""
    each = np.interp(
        [active for _, active in counts], sizes, [step.seconds for step in steps if isinstance(step, Step)]
    )
    share = float(each @ np.diff([0, *(step for step, _ in counts)])) / taken
    return f"{100 * share:.0f} %", f">= {100 * GOAL:.0f} %", met(share, GOAL)


def add_generate(table: Table, countdown: Countdown, grid: Grid, device: str) -> None:
    """The row of transformers."""
    free_memory(device)
    prompts = random_prompts(grid.num_slots, grid.prompt_length, countdown.start)
    new_tokens = min(GENERATED, grid.longest)
    try:
        outcome = generate_runner(countdown.policy, prompts)(new_tokens)
    except torch.OutOfMemoryError:
        table.add("generate", "out of memory", *[""] * (len(HEADER) - 2))
        return
    rate = f"{grid.num_slots * new_tokens / outcome.seconds:,.0f}"
    table.add("generate", f"{outcome.seconds:.2f}", rate, "", "", "", "", f"{outcome.kv_bytes / 1e9:.2f}")
