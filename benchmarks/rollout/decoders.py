"""Both decoders of one policy: the library's own, and transformers' forward pass."""

from __future__ import annotations

import statistics

import torch

from benchmarks.common.tables import Table, median_ratio
from benchmarks.rollout.clock import Clock
from benchmarks.rollout.policies import random_policy, random_prompts
from benchmarks.rollout.speed import Setting
from sparse_rl_lightning import RolloutSampler, SamplingParams

FIRST, STEPS = 8, 112  # steps before the clock starts, and on it


def decoders_table(setting: Setting, rounds: int) -> Table:
    """Milliseconds of a decode step in float32 and bfloat16."""
    s = setting
    note = (
        f"Random Qwen2 ({s.shape.name}), {s.num_sequences} sequences, budget {s.budget} + buffer {s.buffer}, {STEPS} "
        "steps. Both with weights packed for few rows, in turns within every round. Medians over the rounds."
    )
    table = Table("Decoders", ("type", "native ms", "transformers ms", "transformers to native"), note)
    prompts = random_prompts(s.num_sequences, s.prompt_length, s.shape.vocab)
    params = SamplingParams(max_completion_length=FIRST + STEPS + 8, seed=0)
    for dtype in (torch.float32, torch.bfloat16):
        policy = random_policy(s.shape, dtype, "cpu")
        samplers = [
            RolloutSampler(policy, s.compressor(), end_token_ids=[], decoder=way) for way in ("native", "transformers")
        ]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for sampler, seconds in zip(samplers, times, strict=True):
                clock = Clock(FIRST, FIRST + STEPS)
                sampler.generate(prompts, params, progress=clock)
                seconds.append(clock.milliseconds)
        cells = (f"{statistics.median(seconds):.2f}" for seconds in times)
        table.add(str(dtype).removeprefix("torch."), *cells, f"{median_ratio(times[1], times[0]):.2f}")
    return table
