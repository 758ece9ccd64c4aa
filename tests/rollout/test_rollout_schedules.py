"""Rollouts whose budget follows the length of each sequence: the properties of a fixed budget hold for every step."""

from __future__ import annotations

import warnings
from bisect import bisect_right

import pytest
import torch
from closeness import assert_same_logprobs
from rollout_cases import put_back_midway

from sparse_rl_lightning.budgets import Adaptive, BudgetRule, LengthSchedule, Pyramid
from sparse_rl_lightning.compressors import H2O, RKV, TOVA, Compressor, SnapKV, StreamingLLM
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
PARAMS = SamplingParams(num_generations=2, max_completion_length=44, temperature=0.9, seed=4)
RISING = LengthSchedule([0, 18, 30, 55], [9, 12, 17, 25])
LEAPING = LengthSchedule([0, 24, 40], [8, 30, 34])  # by more than the buffer: a while without eviction
SHRINKING = LengthSchedule([0, 20, 33, 50], [15, 10, 22, 9])
SIZES = {"buffer": 5, "num_sinks": 1, "window": 3}
CASES: dict[str, Compressor] = {
    "rising": RKV(RISING, **SIZES),
    "leaping": SnapKV(LEAPING, **SIZES),
    "rising, pyramid": SnapKV(RISING, **SIZES, budget_rule=Pyramid(beta=2)),
    "rising, adaptive": SnapKV(RISING, **SIZES, budget_rule=Adaptive(floor=4)),
    "leaping, adaptive": TOVA(LEAPING, **SIZES, budget_rule=Adaptive(floor=4)),
    "rising, ada-pyramid": TOVA(RISING, **SIZES, budget_rule=Adaptive(layers=Pyramid(beta=2))),
    "rising, whole prompt": RKV(RISING, **SIZES, compress_prompt=False),
    "leaping, whole prompt, adaptive": SnapKV(LEAPING, **SIZES, compress_prompt=False, budget_rule=Adaptive(floor=5)),
    "rising, h2o": H2O(RISING, **SIZES, budget_rule=Adaptive(floor=4)),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CASES["shrinking"] = RKV(SHRINKING, **SIZES)
    CASES["shrinking, ada-pyramid"] = TOVA(SHRINKING, **SIZES, budget_rule=Adaptive(layers=Pyramid(beta=2)))
    CASES["shrinking, whole prompt"] = H2O(SHRINKING, **SIZES, compress_prompt=False)
MOVED = ("rising, ada-pyramid", "leaping, whole prompt, adaptive", "rising, h2o", "shrinking")  # from slot to slot
each_case = pytest.mark.parametrize("compressor", CASES.values(), ids=CASES.keys())
each_moved = pytest.mark.parametrize("compressor", [CASES[name] for name in MOVED], ids=MOVED)


def model() -> torch.nn.Module:
    return tiny_model(initializer_range=0.2, num_layers=3, eos_token_id=None)


def assert_same(a: Rollout, b: Rollout) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert torch.equal(a.evictions.death, b.evictions.death)
    assert_same_logprobs(a.sampler_logprobs, b.sampler_logprobs)
    torch.testing.assert_close(a.kv.stored_integral, b.kv.stored_integral)


@pytest.mark.thinned(3)
@each_case
def test_replay_is_exact(compressor: Compressor) -> None:
    policy = model()
    rollout = RolloutSampler(policy, compressor, num_slots=4).generate(PROMPTS, PARAMS)
    replayed = replay_logprobs(policy, rollout, temperature=0.9)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)
    dense = rollout
    dense.evictions = EvictionRecord.from_dense(torch.full_like(rollout.evictions.death, NEVER))
    assert (replay_logprobs(policy, dense, temperature=0.9) - replayed).abs().max() > 1e-2, "nothing that matters died"


@each_moved
def test_sequence_is_the_same_in_any_slot_order_and_chunk(compressor: Compressor) -> None:
    policy = model()
    whole = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    sampler = RolloutSampler(policy, compressor, num_slots=3, max_prefill_tokens=7)
    for _ in range(2):  # the second time in slots that others have laid out
        assert_same(whole, sampler.generate(PROMPTS, PARAMS))


@each_moved
def test_slots_that_are_put_back_go_on(compressor: Compressor) -> None:
    policy = model()
    want = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    assert_same(want, put_back_midway(RolloutSampler(policy, compressor, 4), PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("rule", "by_layer"), [(None, [25, 25, 25]), (Pyramid(beta=2), [38, 25, 12]), (Adaptive(floor=4), [25, 25, 25])]
)
def test_memory_is_that_of_the_largest_budget(rule: BudgetRule | None, by_layer: list[int]) -> None:
    sampler = RolloutSampler(model(), SnapKV(RISING, **SIZES, budget_rule=rule), num_slots=4)
    rollout = sampler.generate(PROMPTS, PARAMS)
    heads, bytes_per_entry = 2, 2 * 16 * 4
    assert rollout.kv.peak_bytes == 4 * heads * sum(budget + 5 for budget in by_layer) * bytes_per_entry
    assert rollout.kv.peak_bytes == sampler.cache.key_pool.nbytes + sampler.cache.value_pool.nbytes


def test_a_constant_schedule_is_the_number() -> None:
    policy = model()
    for sizes in (SIZES, {**SIZES, "compress_prompt": False, "budget_rule": Pyramid(beta=2)}):
        number = RolloutSampler(policy, RKV(12, **sizes)).generate(PROMPTS, PARAMS)
        steps = RolloutSampler(policy, RKV(LengthSchedule([0, 20, 33], [12] * 3), **sizes)).generate(PROMPTS, PARAMS)
        assert_same(number, steps)
        assert torch.equal(number.sampler_logprobs, steps.sampler_logprobs)


# ---------------------------------------------------------------- against the rule, token by token


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
    params = SamplingParams(max_completion_length=80, seed=1)
    rollout = RolloutSampler(model(), compressor, num_slots=3).generate(PROMPTS, params)
    for row, prompt in enumerate(PROMPTS):
        fed = len(prompt) + 79
        death = rollout.evictions.death[:, row, :, :fed]
        want = held_by_hand(schedule, 5, len(prompt), fed, whole)
        want = {length: held for length, held in want.items() if length <= fed}
        for length, held in want.items():
            alive = (death > length)[..., :length].sum(dim=-1)
            assert (alive == held).all(), (row, length)
        found = set(death[death != NEVER].tolist())
        lost_any = {length for length, held in want.items() if held < length}
        assert found <= lost_any
        assert len(found) > 2


def test_nothing_is_evicted_while_the_budget_grows_fast_enough() -> None:
    growing = LengthSchedule([0, 20, 40, 60], [20, 40, 60, 80])
    sampler = RolloutSampler(model(), RKV(growing, **SIZES))
    with pytest.warns(UserWarning, match=r"Budget and buffer, 85 tokens, .* nothing will be evicted"):
        rollout = sampler.generate([PROMPTS[1]], PARAMS)
    assert (rollout.evictions.death == NEVER).all()


def test_a_raised_schedule_is_what_the_next_rollout_uses() -> None:
    policy, compressor = model(), RKV(RISING, **SIZES)
    sampler = RolloutSampler(policy, compressor)
    sampler.generate(PROMPTS, PARAMS)
    compressor.schedule = compressor.schedule.raised()
    assert compressor.budget == 33
    raised = sampler.generate(PROMPTS, PARAMS)
    assert_same(raised, RolloutSampler(policy, RKV(RISING.raised(), **SIZES)).generate(PROMPTS, PARAMS))
    assert sampler.cache.size.capacities == (38, 38, 38)
