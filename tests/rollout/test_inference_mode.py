"""A sampler serves calls in and out of ``torch.inference_mode`` in any order, with the memory it has."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from rollout_cases import put_back

from sparse_rl_lightning.compressors import H2O, RKV, Compressor
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout
from sparse_rl_lightning.testing import tiny_model

SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
DRAWN = SamplingParams(num_generations=2, max_completion_length=12, seed=1)
GREEDY = SamplingParams(num_generations=2, max_completion_length=12, temperature=0.0)
PROMPTS = [[3, 4, 5], list(range(3, 23))]


@pytest.mark.parametrize("compressor", [RKV(**SMALL), H2O(**SMALL)], ids=lambda c: type(c).__name__)
def test_every_order_of_calls(compressor: Compressor) -> None:
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    want = {p.temperature: RolloutSampler(policy, compressor).generate(PROMPTS, p) for p in (DRAWN, GREEDY)}
    for first, second in product([False, True], repeat=2):
        sampler, memory = RolloutSampler(policy, compressor), set()
        for inside, params in ((first, DRAWN), (second, GREEDY), (first, GREEDY), (second, DRAWN), (first, DRAWN)):
            with torch.inference_mode() if inside else nullcontext():
                rollout = sampler.generate(PROMPTS, params)
            assert torch.equal(rollout.sequences, want[params.temperature].sequences)
            assert not rollout.sampler_logprobs.is_inference()
            memory.add(sampler.cache.key_pool.data_ptr())
        assert len(memory) == 1


def test_sessions_and_forced_texts() -> None:
    policy, method = tiny_model(initializer_range=0.2, eos_token_id=None), H2O(**SMALL)
    sampler = RolloutSampler(policy, method, 3)
    whole = sampler.generate(PROMPTS, DRAWN)
    with torch.inference_mode():
        forced = forced_rollout(policy, whole, method)
        session = RolloutSession(sampler, DRAWN, 30)
        session.add(PROMPTS, range(4))
        session.advance(max_steps=3)
    assert torch.equal(forced.evictions.death, whole.evictions.death)
    session.advance(max_steps=3)
    with torch.inference_mode():
        put_back(session)
    session.advance(max_steps=3)
    with torch.inference_mode():
        session.advance()
    assert torch.equal(session.take(session.complete).sequences, whole.sequences)


def test_weights_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    plain = tiny_model(initializer_range=0.2, eos_token_id=None)
    a, b = (RolloutSampler(model, RKV(**SMALL)).generate(PROMPTS, DRAWN) for model in (policy, plain))
    assert torch.equal(a.sequences, b.sequences)
