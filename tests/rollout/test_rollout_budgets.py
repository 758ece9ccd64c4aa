"""Rollouts in which layers, heads and lengths keep different numbers of tokens, and compressors with running state."""

from __future__ import annotations

import warnings
from bisect import bisect_right

import pytest
import torch
from rollouts import PROMPTS, assert_replayed, assert_same, put_back_midway, roll_out, small_model
from transformers import PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive, BudgetRule, LengthSchedule, Pyramid
from sparse_rl_lightning.compressors import H2O, RKV, TOVA, Compressor, SnapKV, StreamingLLM
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.records import NEVER, EvictionRecord
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs

PARAMS = SamplingParams(num_generations=2, max_completion_length=44, temperature=0.9, seed=4)
RISING = LengthSchedule([0, 18, 30, 55], [9, 12, 17, 25])
LEAPING = LengthSchedule([0, 24, 40], [8, 30, 34])  # by more than the buffer: a while without eviction
SHRINKING = LengthSchedule([0, 20, 33, 50], [15, 10, 22, 9])
SIZES = {"buffer": 5, "num_sinks": 1, "window": 3}
BOTH = Adaptive(layers=Pyramid(beta=2))
CASES: dict[str, Compressor] = {
    "pyramid": SnapKV(12, **SIZES, budget_rule=Pyramid(beta=2)),
    "adaptive": SnapKV(12, **SIZES, budget_rule=Adaptive(floor=4)),
    "adaptive, whole prompt": SnapKV(12, **SIZES, budget_rule=Adaptive(floor=0), compress_prompt=False),
    "ada-pyramid": TOVA(12, **SIZES, budget_rule=Adaptive(floor=5, layers=Pyramid(beta=2))),
    "pyramid, whole prompt": RKV(12, **SIZES, budget_rule=Pyramid(beta=1.5), compress_prompt=False),
    "h2o": H2O(12, **SIZES),
    "h2o, adaptive": H2O(12, **SIZES, budget_rule=Adaptive(floor=4), age_normalized=True),
    "h2o, whole prompt, pyramid": H2O(
        12, **SIZES, budget_rule=Pyramid(beta=2), compress_prompt=False, value_weighted=True
    ),
    "rising": RKV(RISING, **SIZES),
    "leaping": SnapKV(LEAPING, **SIZES),
    "rising, pyramid": SnapKV(RISING, **SIZES, budget_rule=Pyramid(beta=2)),
    "rising, adaptive": SnapKV(RISING, **SIZES, budget_rule=Adaptive(floor=4)),
    "leaping, adaptive": TOVA(LEAPING, **SIZES, budget_rule=Adaptive(floor=4)),
    "rising, ada-pyramid": TOVA(RISING, **SIZES, budget_rule=BOTH),
    "rising, whole prompt": RKV(RISING, **SIZES, compress_prompt=False),
    "leaping, whole prompt, adaptive": SnapKV(LEAPING, **SIZES, compress_prompt=False, budget_rule=Adaptive(floor=5)),
    "rising, h2o": H2O(RISING, **SIZES, budget_rule=Adaptive(floor=4)),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CASES["shrinking"] = RKV(SHRINKING, **SIZES)
    CASES["shrinking, ada-pyramid"] = TOVA(SHRINKING, **SIZES, budget_rule=BOTH)
    CASES["shrinking, whole prompt"] = H2O(SHRINKING, **SIZES, compress_prompt=False)


def model() -> PreTrainedModel:
    return small_model(num_layers=3, eos_token_id=None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CASES)
def test_rollouts_are_replayed_and_the_same_in_any_slot_order_and_chunk(name: str) -> None:
    policy, compressor = model(), CASES[name]
    whole = roll_out(policy, compressor, params=PARAMS)
    replayed = assert_replayed(policy, whole, 0.9)
    assert_same(whole, roll_out(policy, compressor, 2, params=PARAMS, max_prefill_tokens=1000))
    sampler = RolloutSampler(policy, compressor, 3, max_prefill_tokens=7)
    for _ in range(2):  # the second time in slots that others have laid out
        assert_same(whole, sampler.generate(PROMPTS, PARAMS))
    assert_same(whole, put_back_midway(policy, compressor, PARAMS))
    whole.evictions = EvictionRecord.from_dense(torch.full_like(whole.evictions.death, NEVER))
    assert (replay_logprobs(policy, whole, 0.9) - replayed).abs().max() > 1e-2, "nothing that matters died"


@pytest.mark.parametrize(
    ("budget", "rule", "by_layer"),
    [
        (12, None, [12, 12, 12]), (12, Pyramid(beta=2), [18, 12, 6]), (12, Adaptive(floor=4), [12, 12, 12]),
        (RISING, None, [25, 25, 25]), (RISING, Pyramid(beta=2), [38, 25, 12]), (RISING, Adaptive(floor=4), [25] * 3),
    ],
)  # fmt: skip
def test_memory_is_the_rules_total_of_the_largest_budget(
    budget: int | LengthSchedule, rule: BudgetRule | None, by_layer: list[int]
) -> None:
    sampler = RolloutSampler(model(), SnapKV(budget, **SIZES, budget_rule=rule), num_slots=4)
    rollout = sampler.generate(PROMPTS, PARAMS)
    heads, bytes_per_entry = 2, 2 * 16 * 4
    assert rollout.kv.peak_bytes == 4 * heads * sum(budget + 5 for budget in by_layer) * bytes_per_entry
    assert rollout.kv.peak_bytes == sampler.cache.key_pool.nbytes + sampler.cache.value_pool.nbytes
    if budget == 12:
        mean = sum(by_layer) / 3  # after the last compression, whatever the shares of heads, and the tokens since
        assert bool(((rollout.kv.stored >= mean) & (rollout.kv.stored < mean + 5)).all())


def test_adaptive_heads_really_differ_and_keep_their_floor() -> None:
    sampler = RolloutSampler(model(), SnapKV(12, **SIZES, budget_rule=Adaptive(floor=6)))
    sampler.generate(PROMPTS, SamplingParams(max_completion_length=60, seed=1))
    lengths = sampler.cache.lengths
    assert bool((lengths >= 6).all())
    assert bool((lengths.amax(dim=2) > lengths.amin(dim=2)).any()), "all heads are equal: the rule did nothing"
    assert bool((lengths <= sampler.cache.pools.capacities).all())
    ends = sampler.cache.pools.offsets + sampler.cache.pools.capacities
    assert bool((ends[..., 0] <= sampler.cache.pools.offsets[..., 1]).all()), "heads overlap"


@pytest.mark.parametrize("num_generations", [1, 2, 3])
def test_unequal_heads_of_a_single_layer_are_forked(num_generations: int) -> None:
    policy = small_model(eos_token_id=None, num_layers=1)
    params = SamplingParams(num_generations=num_generations, max_completion_length=20, seed=1)
    compressor = SnapKV(12, **SIZES, budget_rule=Adaptive(floor=7))
    assert_replayed(policy, roll_out(policy, compressor, prompts=[list(range(3, 30)), [3, 4]], params=params))


def test_h2o_sums_are_the_attention_paid() -> None:
    """Nothing is evicted, so the sums are the columns of the attention matrices of a plain forward pass."""
    policy = small_model(eos_token_id=None)
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


@pytest.mark.parametrize("rule", [None, Adaptive(floor=7)])
def test_running_sums_of_a_float64_model(rule: BudgetRule | None) -> None:
    policy, compressor = small_model(eos_token_id=None), H2O(12, **SIZES, value_weighted=bool(rule), budget_rule=rule)
    given = {"prompts": [list(range(3, 30)), [3, 4]], "params": SamplingParams(max_completion_length=12, seed=1)}
    want = roll_out(policy, compressor, **given)
    rollout = roll_out(policy.double(), compressor, **given)
    assert torch.equal(rollout.sequences, want.sequences)
    assert torch.equal(rollout.evictions.death, want.evictions.death)
    with torch.no_grad():
        error = replay_logprobs(policy, rollout).float() - rollout.sampler_logprobs
    assert float(error.abs().max()) < 1e-5


# ---------------------------------------------------------------- schedules against the rule, token by token


def test_a_constant_schedule_is_the_number() -> None:
    policy = model()
    for sizes in (SIZES, {**SIZES, "compress_prompt": False, "budget_rule": Pyramid(beta=2)}):
        number, steps = (
            roll_out(policy, RKV(budget, **sizes), params=PARAMS)
            for budget in (12, LengthSchedule([0, 20, 33], [12] * 3))
        )
        assert_same(number, steps)
        assert torch.equal(number.sampler_logprobs, steps.sampler_logprobs)


def held_by_hand(schedule: LengthSchedule, buffer: int, prompt: int, last: int, whole: bool) -> dict[int, list[int]]:
    """Entries that are left behind the compression at each length, by the rule as it is written: one layer."""
    budget = lambda t: schedule.budgets[bisect_right(schedule.starts, t) - 1]  # noqa: E731
    held, cut = prompt, {}
    if not whole and held >= budget(prompt) + buffer:
        held = cut[prompt] = budget(prompt)
    first = whole
    for fed in range(prompt + 1, last + 1):
        held += 1
        if held >= max(budget(fed), prompt if first else 0) + buffer:
            held = cut[fed] = min(held, budget(fed))
            first = False
    return cut


@pytest.mark.parametrize("schedule", [RISING, LEAPING, SHRINKING], ids=["rising", "leaping", "shrinking"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore:.*shrinks with length")
def test_compressions_come_when_the_rule_says_and_keep_its_budget(schedule: LengthSchedule, whole: bool) -> None:
    """StreamingLLM keeps the newest: deaths say when and how far a slot was cut."""
    compressor = StreamingLLM(schedule, **SIZES, compress_prompt=not whole)
    rollout = roll_out(model(), compressor, 3, params=SamplingParams(max_completion_length=80, seed=1))
    for row, prompt in enumerate(PROMPTS):
        fed = len(prompt) + 79
        death = rollout.evictions.death[:, row, :, :fed]
        want = held_by_hand(schedule, 5, len(prompt), fed, whole)
        for length, held in want.items():
            alive = (death > length)[..., :length].sum(dim=-1)
            assert (alive == held).all(), (row, length)
        found = set(death[death != NEVER].tolist())
        assert found <= {length for length, held in want.items() if held < length}
        assert len(found) > 2


def test_nothing_is_evicted_while_the_budget_grows_fast_enough() -> None:
    growing = LengthSchedule([0, 20, 40, 60], [20, 40, 60, 80])
    with pytest.warns(UserWarning, match=r"Budget and buffer, 85 tokens, .* nothing will be evicted"):
        rollout = roll_out(model(), RKV(growing, **SIZES), prompts=[PROMPTS[1]], params=PARAMS)
    assert (rollout.evictions.death == NEVER).all()


def test_a_raised_schedule_is_what_the_next_rollout_uses() -> None:
    policy, compressor = model(), RKV(RISING, **SIZES)
    sampler = RolloutSampler(policy, compressor)
    sampler.generate(PROMPTS, PARAMS)
    compressor.schedule = compressor.schedule.raised()
    assert compressor.budget == 33
    raised = sampler.generate(PROMPTS, PARAMS)
    assert_same(raised, roll_out(policy, RKV(RISING.raised(), **SIZES), params=PARAMS))
    assert sampler.cache.size.capacities == (38, 38, 38)
