"""Giving slots to waiting sequences costs the same for each, however many wait."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.testing import tiny_model

SLOTS = 4


def lines_per_sequence(count: int, session: bool) -> float:
    """Lines of scheduler.py that are executed for each sequence, every one of which ends with its first token."""
    sampler = RolloutSampler(tiny_model(num_layers=1), FullKV(), num_slots=SLOTS)
    params = SamplingParams(num_generations=2, max_completion_length=1)
    prompts, lines = [[3 + i % 50] for i in range(count // 2)], 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != scheduler.__file__:
            return None
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        if session:
            own = RolloutSession(sampler, params, 1)
            own.add(prompts, range(count))
            own.advance()
        else:
            sampler.generate(prompts, params)
    finally:
        sys.settrace(before)
    return lines / count


@pytest.mark.parametrize("session", [False, True])
def test_the_work_for_a_sequence_does_not_grow_with_those_that_wait(session: bool) -> None:
    few, many = (lines_per_sequence(count, session) for count in (40, 160))
    assert few > 10, "nothing was counted"
    assert many < 1.1 * few


def test_prompts_wait_for_their_last_sample_only() -> None:
    """A prompt is read once, kept while samples of it wait, and forgotten after the last."""
    sampler = RolloutSampler(tiny_model(eos_token_id=None), FullKV(), num_slots=3)
    session = RolloutSession(sampler, SamplingParams(num_generations=4, max_completion_length=3), 2)
    session.add([[5], [6]], range(8))
    known = []
    while session.num_unfinished:
        session.advance(max_steps=1)
        own = session.scheduler
        of = {number: group.num_waiting for number, group in own.groups.items() if group.num_waiting}
        known.append((len(own.waiting), sorted(own.cached_prompts), of))
    assert known[0] == (5, [0], {0: 1, 1: 4})
    for waiting, read, of in known:
        assert sum(of.values()) == waiting
        assert set(read) <= set(of)
    first = session.take([0])
    assert first.sequences.shape == (4, 4)
    session.add([[7]], range(8, 12))
    session.advance()
    whole = RolloutSampler(tiny_model(eos_token_id=None), FullKV()).generate(
        [[5], [6], [7]], SamplingParams(num_generations=4, max_completion_length=3)
    )
    assert torch.equal(session.take([1, 2]).sequences, whole.sequences[4:])
