"""Rollouts in which layers and heads keep different numbers of tokens, and compressors with running state."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_same_logprobs
from rollout_cases import put_back_midway

from sparse_rl_lightning.budgets import Adaptive, BudgetRule, Pyramid
from sparse_rl_lightning.compressors import H2O, RKV, TOVA, Compressor, SnapKV
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
SIZES = {"budget": 12, "buffer": 5, "num_sinks": 1, "window": 3}
PARAMS = SamplingParams(num_generations=2, max_completion_length=36, temperature=0.9, seed=4)
CASES: dict[str, Compressor] = {
    "pyramid": SnapKV(**SIZES, budget_rule=Pyramid(beta=2)),
    "adaptive": SnapKV(**SIZES, budget_rule=Adaptive(floor=4)),
    "adaptive, whole prompt": SnapKV(**SIZES, budget_rule=Adaptive(floor=0), compress_prompt=False),
    "ada-pyramid": TOVA(**SIZES, budget_rule=Adaptive(floor=5, layers=Pyramid(beta=2))),
    "pyramid, whole prompt": RKV(**SIZES, budget_rule=Pyramid(beta=1.5), compress_prompt=False),
    "h2o": H2O(**SIZES),
    "h2o, adaptive": H2O(**SIZES, budget_rule=Adaptive(floor=4), age_normalized=True),
    "h2o, whole prompt, pyramid": H2O(**SIZES, budget_rule=Pyramid(beta=2), compress_prompt=False, value_weighted=True),
}
each_case = pytest.mark.parametrize("compressor", CASES.values(), ids=CASES.keys())


def model() -> torch.nn.Module:
    return tiny_model(initializer_range=0.2, num_layers=3, eos_token_id=None)


def assert_same(a: Rollout, b: Rollout) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert torch.equal(a.evictions.death, b.evictions.death)
    assert_same_logprobs(a.sampler_logprobs, b.sampler_logprobs)
    torch.testing.assert_close(a.kv.stored_integral, b.kv.stored_integral)


@each_case
def test_replay_is_exact(compressor: Compressor) -> None:
    policy = model()
    rollout = RolloutSampler(policy, compressor, num_slots=4).generate(PROMPTS, PARAMS)
    replayed = replay_logprobs(policy, rollout, temperature=0.9)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)
    dense = rollout
    dense.evictions = EvictionRecord.from_dense(torch.full_like(rollout.evictions.death, NEVER))
    assert (replay_logprobs(policy, dense, temperature=0.9) - replayed).abs().max() > 1e-2, "nothing that matters died"


@pytest.mark.thinned(3)
@each_case
def test_sequence_is_the_same_in_any_slot_order_and_chunk(compressor: Compressor) -> None:
    policy = model()
    whole = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    assert_same(whole, RolloutSampler(policy, compressor, 1, max_prefill_tokens=1000).generate(PROMPTS, PARAMS))
    sampler = RolloutSampler(policy, compressor, 3, max_prefill_tokens=7)
    for _ in range(2):  # the second time in slots that others have laid out
        assert_same(whole, sampler.generate(PROMPTS, PARAMS))


@each_case
def test_slots_that_are_put_back_go_on(compressor: Compressor) -> None:
    policy = model()
    want = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    assert_same(want, put_back_midway(RolloutSampler(policy, compressor, 4), PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("rule", "by_layer"), [(None, [12, 12, 12]), (Pyramid(beta=2), [18, 12, 6]), (Adaptive(floor=4), [12, 12, 12])]
)
def test_memory_is_the_rules_total(rule: BudgetRule | None, by_layer: list[int]) -> None:
    sampler = RolloutSampler(model(), SnapKV(**SIZES, budget_rule=rule), num_slots=4)
    rollout = sampler.generate(PROMPTS, PARAMS)
    heads, bytes_per_entry = 2, 2 * 16 * 4
    assert rollout.kv.peak_bytes == 4 * heads * sum(budget + 5 for budget in by_layer) * bytes_per_entry
    assert rollout.kv.peak_bytes == sampler.cache.key_pool.nbytes + sampler.cache.value_pool.nbytes
    # held after the last compression and the tokens since: the rule's mean, whatever the heads' shares
    mean = sum(by_layer) / 3
    assert bool(((rollout.kv.stored >= mean) & (rollout.kv.stored < mean + 5)).all())


def test_adaptive_heads_really_differ_and_keep_their_floor() -> None:
    sampler = RolloutSampler(model(), SnapKV(**SIZES, budget_rule=Adaptive(floor=6)))
    sampler.generate(PROMPTS, SamplingParams(max_completion_length=60, seed=1))
    lengths = sampler.cache.lengths
    assert bool((lengths >= 6).all())
    assert bool((lengths.amax(dim=2) > lengths.amin(dim=2)).any()), "all heads are equal: the rule did nothing"
    assert bool((lengths <= sampler.cache.pools.capacities).all())
    ends = sampler.cache.pools.offsets + sampler.cache.pools.capacities
    assert bool((ends[..., 0] <= sampler.cache.pools.offsets[..., 1]).all()), "heads overlap"


def test_h2o_sums_are_the_attention_paid() -> None:
    """Nothing is evicted, so the sums are the columns of the attention matrices of a plain forward pass."""
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    prompts, params = [PROMPTS[1], PROMPTS[3]], SamplingParams(max_completion_length=20, seed=3)
    for max_prefill_tokens in (1000, 8):
        sampler = RolloutSampler(policy, H2O(budget=100, buffer=8), max_prefill_tokens=max_prefill_tokens)
        with pytest.warns(UserWarning, match="nothing will be evicted"):
            rollout = sampler.generate(prompts, params)
        cache = sampler.cache
        for row, prompt in enumerate(prompts):
            fed = len(prompt) + 19
            before, policy.config._attn_implementation = policy.config._attn_implementation, "eager"
            out = policy(rollout.sequences[row : row + 1, :fed], output_attentions=True)
            policy.config._attn_implementation = before
            for layer, attention in enumerate(out.attentions):
                want = attention[0].unflatten(0, (2, -1)).sum(dim=(1, 2))  # KV head, key
                rows, _ = gather_heads(cache.pools.offsets[layer, row], cache.lengths[layer, row], fed)
                torch.testing.assert_close(cache.state_pool[rows, 0], want, atol=1e-4, rtol=0)
