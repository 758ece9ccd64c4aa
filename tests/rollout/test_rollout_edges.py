"""Edges of the rollout engine: reused caches, models and prompts that cannot be served, replay that cannot be exact."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_same_logprobs

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.compressors import H2O, RKV, FullKV, SnapKV, StreamingLLM
from sparse_rl_lightning.records import NEVER
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(max_completion_length=12, seed=1)


def test_the_pool_stays_when_shorter_prompts_are_stored_whole() -> None:
    sampler = RolloutSampler(tiny_model(), RKV(**SMALL, compress_prompt=False))
    caches = set()
    for length in (40, 39, 20):
        sampler.generate([[3] * length], PARAMS)
        caches.add(id(sampler.cache))
    assert len(caches) == 1


def test_another_compressor_gets_its_queries() -> None:
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    swapped = RolloutSampler(model, StreamingLLM(**SMALL))
    swapped.generate([list(range(3, 30))], PARAMS)
    swapped.compressor = SnapKV(**SMALL)
    fresh = RolloutSampler(model, SnapKV(**SMALL))
    a, b = (s.generate([list(range(3, 30))], PARAMS).evictions.death for s in (swapped, fresh))
    assert (a == b).all()


def test_peak_bytes_speak_of_the_same_slots_after_reuse() -> None:
    for compressor, entries, full_entries in ((FullKV(), 52, 52), (RKV(**SMALL), 17, 1 + 4)):
        sampler = RolloutSampler(tiny_model(), compressor)
        sampler.generate([[3] * 40] * 8, PARAMS)
        usage = sampler.generate([[3]], SamplingParams(max_completion_length=4)).kv
        per_entry = 2 * 2 * 2 * 16 * 4  # layers, heads, key and value, head dimension, bytes
        assert usage.peak_bytes == 8 * entries * per_entry
        assert usage.full_peak_bytes == 8 * full_entries * per_entry


@pytest.mark.parametrize("token", [128, -1, 1.5, "a"])
def test_tokens_outside_the_vocabulary_are_refused(token: object) -> None:
    with pytest.raises(
        ValueError, match=r"^prompt 1 holds .*(whole numbers from|the model has embeddings of) 0 to 127"
    ):
        RolloutSampler(tiny_model(), FullKV()).generate([[1], [2, token]], PARAMS)


def test_a_prompt_stored_whole_is_compressed_like_any_other_after_its_first_time() -> None:
    """Limit 12 = prompt 10 + buffer 2 at first, then 8 = budget 6 + buffer 2: every second token evicts two entries."""
    compressor = StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2, compress_prompt=False)
    sampler = RolloutSampler(tiny_model(eos_token_id=None), compressor)
    rollout = sampler.generate([list(range(3, 13))], SamplingParams(max_completion_length=9, seed=1))
    want = [NEVER, *[12] * 6, *[14] * 2, *[16] * 2, *[18] * 2, *[NEVER] * 6]
    assert rollout.evictions.death[0, 0, 0].tolist() == want
    assert rollout.kv.stored.tolist() == [6.0]


@pytest.mark.parametrize("num_generations", [1, 2, 3])
def test_unequal_heads_of_a_single_layer_are_forked(num_generations: int) -> None:
    policy = tiny_model(initializer_range=0.2, eos_token_id=None, num_layers=1)
    prompts = [list(range(3, 30)), [3, 4]]
    params = SamplingParams(num_generations=num_generations, max_completion_length=20, seed=1)
    rollout = RolloutSampler(policy, SnapKV(**SMALL, budget_rule=Adaptive(floor=7))).generate(prompts, params)
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)


@pytest.mark.parametrize("compressor", [H2O(**SMALL), H2O(**SMALL, value_weighted=True, budget_rule=Adaptive(floor=7))])
def test_running_sums_of_a_float64_model(compressor: H2O) -> None:
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    prompts, single = [list(range(3, 30)), [3, 4]], RolloutSampler(policy, compressor)
    want = single.generate(prompts, PARAMS)
    policy = policy.double()
    rollout = RolloutSampler(policy, compressor).generate(prompts, PARAMS)
    assert torch.equal(rollout.sequences, want.sequences)
    assert torch.equal(rollout.evictions.death, want.evictions.death)
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout)
    assert_same_logprobs(replayed.float(), rollout.sampler_logprobs, share=1e-6)
