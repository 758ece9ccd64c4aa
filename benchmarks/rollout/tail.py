"""Rollouts of long-tailed lengths: slots that are refilled against batches that end with their longest sequence."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.pages import say
from benchmarks.common.tables import Table, label, median_ratio, met
from benchmarks.ops.timing import wait
from benchmarks.rollout.policies import Countdown, Shape, spread
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Compressor

GOAL = 1.5
SIGMA = 0.9  # of the logarithm of the lengths, as in long mathematical answers


@dataclass(frozen=True)
class Tail:
    """What is rolled out."""

    shape: Shape
    num_prompts: int
    num_generations: int
    num_slots: int
    prompt_length: int
    mean: float  # tokens of a completion
    longest: int

    def countdown(self, dtype: torch.dtype, device: str) -> Countdown:
        """The policy that draws the lengths."""
        return Countdown.log_normal(self.shape, dtype, device, self.mean, SIGMA, self.longest)


def rollout_lengths(
    sampler: RolloutSampler, prompts: list[list[int]], tail: Tail, prompts_per_call: int
) -> tuple[float, Tensor]:
    """Seconds and lengths of a rollout in calls of ``count`` prompts; the numbering makes the lengths the same."""
    params = SamplingParams(num_generations=tail.num_generations, max_completion_length=tail.longest + 8)
    lengths, start = [], time.perf_counter()
    for first in range(0, len(prompts), prompts_per_call):
        batch = prompts[first : first + prompts_per_call]
        ids = range(first * tail.num_generations, (first + len(batch)) * tail.num_generations)
        lengths.append(sampler.generate(batch, params, sequence_ids=ids).completion_lengths.cpu())
    wait(sampler.model.device.type)
    return time.perf_counter() - start, torch.cat(lengths)


def tail_table(tail: Tail, compressor: Compressor, rounds: int) -> Table:
    """Refill against lock-step, the same sequences in the same order."""
    dtype = torch.float32
    countdown = tail.countdown(dtype, "cpu")
    prompts = countdown.prompts(tail.num_prompts, tail.prompt_length)
    per_batch = tail.num_slots // tail.num_generations
    calls = {"refill": len(prompts), "lock-step": per_batch}
    samplers = {name: RolloutSampler(countdown.policy, compressor, tail.num_slots, [Countdown.END]) for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    lengths: dict[str, Tensor] = {}
    for turn in range(rounds):
        for name, count in calls.items():
            taken, lengths[name] = rollout_lengths(samplers[name], prompts, tail, count)
            times[name].append(taken)
            say(f"long tail, round {turn + 1}: {name} {taken:.1f} s")
    work = {name: int(values.sum()) for name, values in lengths.items()}
    ratio = median_ratio(times["lock-step"], times["refill"])
    note = (
        f"{tail.num_prompts} prompts x {tail.num_generations}, {tail.num_slots} slots, {label(dtype)}, budget "
        f"{compressor.budget} + buffer {compressor.buffer}, "
        f"log-normal lengths with sigma {SIGMA:g} drawn by the policy itself; {spread(lengths['refill'])}. Lock-step: "
        f"calls of {per_batch} prompts x {tail.num_generations}, each as long as its longest sequence, by the same "
        f"engine, which drops the rows of ended sequences. The same lengths in both: "
        f"{'yes' if torch.equal(lengths['refill'], lengths['lock-step']) else 'NO'}."
    )
    table = Table("Long-tailed lengths", ("how", "seconds", "tokens/s", "ratio to lock-step", "goal", "met"), note)
    for name, values in times.items():
        seconds = statistics.median(values)
        verdict = (f"{ratio:.2f}", f">= {GOAL:g}", met(ratio, GOAL)) if name == "refill" else ("1.00", "", "")
        table.add(name, f"{seconds:.2f}", f"{work[name] / seconds:,.0f}", *verdict)
    return table
