"""Soak: many calls and five hundred rollouts leave memory and Python's objects as they were after the first ones."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
import torch

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.ops import window_importance
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
ROLLOUTS, WARM_UP, EVERY = 500, 100, 50


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompts_of(index: int) -> list[list[int]]:
    """Six prompts of one to forty tokens."""
    draw = random.Random(index)
    return [draw.choices(range(3, 128), k=draw.randint(1, 40)) for _ in range(6)]


class Interrupted(Exception):
    """As from a callback of the user's."""


def interrupt(progress: Progress) -> None:
    if progress.step == 7:
        raise Interrupted


def one(sampler: RolloutSampler, index: int) -> Rollout:
    """A rollout of 18 sequences in 5 slots; now and then an interrupted one before it."""
    params = SamplingParams(num_generations=3, max_completion_length=16, seed=index)
    if index % 10 == 3:
        with pytest.raises(Interrupted):
            sampler.generate(prompts_of(index + 1), params, progress=interrupt)
    return sampler.generate(prompts_of(index), params)


@needs_proc
def test_an_op_keeps_none_of_the_texts_it_was_given() -> None:
    """The conversion of torch 2.13 loses a copy of every text argument: three times 49 bytes a call."""
    keys, lengths, positions = torch.zeros(1, 1, 4, 8), torch.full((1, 1), 4), torch.arange(4).view(1, 1, 4)
    queries, query_positions = torch.zeros(1, 2, 3, 8), torch.arange(3)[None]

    def many(calls: int) -> int:
        for _ in range(calls):
            window_importance(
                queries, query_positions, keys, lengths, positions, 1.0, window=1, exclude_window=True,
                group_reduction="max", query_reduction="mean", pooling="max", kernel_size=3,
            )  # fmt: skip
        return resident()

    many(2000)
    before = many(2000)
    assert many(20_000) - before < 1_000_000


@pytest.mark.slow
@needs_proc
def test_500_rollouts_leave_nothing_behind() -> None:
    sampler = RolloutSampler(
        tiny_model(initializer_range=0.2), SnapKV(budget=10, buffer=4, num_sinks=1, window=3), num_slots=5,
        end_token_ids=range(1, 9),
    )  # fmt: skip
    memory, objects, finished, evicted = [], [], 0, 0
    for index in range(ROLLOUTS):
        rollout = one(sampler, index)
        finished += int(rollout.finished.sum())
        evicted += int((rollout.evictions.death < NEVER).any(dim=3).sum())
        del rollout
        if index + 1 >= WARM_UP and (index + 1) % EVERY == 0:
            gc.collect()
            memory.append(resident())
            objects.append(len(gc.get_objects()))
    assert 0.2 * 18 * ROLLOUTS < finished < 0.9 * 18 * ROLLOUTS, "sequences should end by tokens and by length"
    assert evicted > ROLLOUTS
    assert max(memory) <= 1.02 * memory[0], memory
    assert max(objects) - objects[0] <= 20, objects
