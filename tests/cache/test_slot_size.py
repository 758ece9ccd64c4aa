"""A slot is never larger than the longest possible sequence, and nothing but its size depends on that."""

from __future__ import annotations

import itertools
import warnings
from bisect import bisect_right
from dataclasses import replace

import pytest
import torch
from rollout_cases import put_back

from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.calibration import H200, CostModel, ModelShape
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV, KNorm, SnapKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, forced_rollout
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [list(range(3, 33)), [40, 41], [50, 51, 52, 53, 54, 55, 56]]
PARAMS = SamplingParams(num_generations=2, max_completion_length=40, seed=5)
LONGEST = 30 + 40
ENTRY = 2 * 2 * 16 * 4  # KV heads, key and value, head dimension, bytes: of one layer
EACH = {"num_sinks": 2, "window": 4}

# entries of the two layers without a bound
COMPRESSORS: dict[str, tuple[Compressor, tuple[int, int]]] = {
    "far too large": (SnapKV(4000, buffer=128, **EACH), (4128, 4128)),
    "one layer is bounded": (SnapKV(50, buffer=6, **EACH, budget_rule=Pyramid(4)), (94, 18)),
    "its heads share": (SnapKV(50, buffer=6, **EACH, budget_rule=Adaptive(layers=Pyramid(4))), (94, 18)),
    "running numbers": (H2O(50, buffer=7, **EACH, budget_rule=Adaptive(layers=Pyramid(4))), (95, 19)),
    "prompts stored whole": (RKV(38, buffer=6, **EACH, budget_rule=Pyramid(3), compress_prompt=False), (69, 36)),
    "a schedule": (SnapKV(LengthSchedule([0, 40, 60], [16, 24, 90]), buffer=5, **EACH), (95, 95)),
    "a schedule of shares": (
        SnapKV(LengthSchedule([0, 40, 60], [16, 24, 90]), buffer=5, **EACH, budget_rule=Adaptive()), (95, 95)
    ),
    "nothing is bounded": (SnapKV(12, buffer=5, **EACH), (17, 17)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_warning() -> None:
    warnings.filterwarnings("ignore", message="Budget and buffer")


def unbounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheSize, "entries", property(lambda self: self.capacities))


def model() -> torch.nn.Module:
    return tiny_model(initializer_range=0.2, eos_token_id=7)


def assert_same(one: Rollout, other: Rollout) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(one.sampler_logprobs, other.sampler_logprobs)
    assert (one.evictions is None) == (other.evictions is None)
    assert one.evictions is None or torch.equal(one.evictions.death, other.evictions.death)
    for name in ("stored", "stored_integral", "full_peak_bytes"):
        assert torch.equal(torch.as_tensor(getattr(one.kv, name)), torch.as_tensor(getattr(other.kv, name))), name


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_only_the_memory_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (compressor, entries), policy = COMPRESSORS[name], model()
    rollout = RolloutSampler(policy, compressor, num_slots=4).generate(PROMPTS, PARAMS)
    forced = forced_rollout(policy, rollout, compressor, seed=5)
    with monkeypatch.context() as patch:
        unbounded(patch)
        large = RolloutSampler(policy, compressor, num_slots=4).generate(PROMPTS, PARAMS)
        large_forced = forced_rollout(policy, rollout, compressor, seed=5)
    assert_same(rollout, large)
    assert_same(forced, large_forced)
    assert large.kv.peak_bytes == 4 * sum(entries) * ENTRY
    assert rollout.kv.peak_bytes == 4 * sum(min(own, LONGEST) for own in entries) * ENTRY
    assert rollout.kv.peak_bytes <= rollout.kv.full_peak_bytes


@pytest.mark.parametrize("name", ["its heads share", "running numbers", "a schedule"])
def test_sessions_and_slots_that_are_looked_at_seldom(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compressor, policy = COMPRESSORS[name][0], model()
    whole = RolloutSampler(policy, compressor, num_slots=3).generate(PROMPTS, PARAMS)

    def pieces() -> Rollout:
        session = RolloutSession(RolloutSampler(policy, compressor, num_slots=3), PARAMS, max_prompt_length=30)
        session.add(PROMPTS, sequence_ids=range(6))
        session.advance(max_steps=21)
        put_back(session)
        session.advance()
        return session.take(session.complete)

    assert_same(pieces(), whole)
    monkeypatch.setattr("sparse_rl_lightning.rollout.engine.scheduler.CHECK_EVERY", {"cpu": 8})
    assert_same(pieces(), whole)


def test_the_memory_plan_knows_the_bound() -> None:
    params = SamplingParams(max_completion_length=40)
    policy, prompts = model(), [[3] * 30] * 20
    plans = []
    for compressor in (SnapKV(4000, **EACH), FullKV()):
        sampler = RolloutSampler(policy, compressor, memory_limit=2**20)
        sampler.generate(prompts, params)
        plans.append(sampler.memory_plan)
    assert plans[0].pool_bytes // plans[0].num_slots == plans[1].pool_bytes // plans[1].num_slots == 2 * LONGEST * ENTRY
    assert plans[0].num_slots > 1


def test_a_kept_pool_serves_shorter_calls_and_grows_for_longer_ones() -> None:
    sampler = RolloutSampler(model(), SnapKV(100, buffer=20, **EACH), num_slots=2)

    def cache_after(length: int) -> int:
        sampler.generate([[3] * 10], SamplingParams(num_generations=2, max_completion_length=length, temperature=0))
        return id(sampler.cache)

    first = cache_after(40)
    assert sampler.cache.pool_bytes == 2 * 2 * 50 * ENTRY
    assert cache_after(20) == cache_after(40) == first
    longer = cache_after(70)
    assert sampler.cache.pool_bytes == 2 * 2 * 80 * ENTRY
    assert cache_after(40) == cache_after(70) == longer
    cache_after(200)
    assert sampler.cache.pool_bytes == 2 * 2 * 120 * ENTRY  # from here on it is the compressor's


def test_a_pool_serves_what_fits_in_every_layer() -> None:
    own = CacheSize(2, (20, 10), 1, 40)
    assert [own.covers(replace(own, capacities=other)) for other in ((20, 10), (9, 9), (9, 11), (21, 9))] == [
        True, True, False, False,
    ]  # fmt: skip


def test_pages_of_a_bounded_slot() -> None:
    policy, retriever = model(), Quest(32, page_size=8, num_dense_layers=1)
    rollouts = [
        RolloutSampler(policy, SnapKV(budget, buffer=6, **EACH), 3, retriever=retriever).generate(PROMPTS, PARAMS)
        for budget in (4000, 8000)
    ]
    assert torch.equal(rollouts[0].sampler_logprobs, rollouts[1].sampler_logprobs)
    assert rollouts[0].kv.peak_bytes == rollouts[1].kv.peak_bytes


def test_the_cost_model_asks_for_no_more_than_a_full_cache() -> None:
    cost = CostModel(ModelShape.of("qwen2.5-1.5b"), H200)
    assert cost.bytes_per_sequence(SnapKV(4000), 100, 200) == cost.bytes_per_sequence(FullKV(), 100, 200)
    assert cost.bytes_per_sequence(SnapKV(4000), 100, 9000) < cost.bytes_per_sequence(FullKV(), 100, 9000)


RISING = LengthSchedule([0, 18, 30, 55], [9, 12, 17, 25])
LEAPING = LengthSchedule([0, 24, 40], [8, 30, 34])  # by more than the buffer: a while without eviction
SHRINKING = LengthSchedule([0, 20, 33, 50], [15, 10, 22, 9])
SIZES = {"buffer": 5, "num_sinks": 1, "window": 3}


@pytest.mark.filterwarnings("ignore:.*shrinks with length")
def test_trigger_and_a_walk_token_by_token_agree() -> None:
    """Layers of different budgets, from any start: the closed form against feeding one token at a time."""
    for schedule, beta, prompt in itertools.product((RISING, LEAPING, SHRINKING), (1, 2), (1, 8, 13, 14, 29, 60)):
        rule = Pyramid(beta)
        trigger = Trigger(KNorm(schedule, **SIZES, budget_rule=rule), 3)
        layers = [rule.layer_budgets(budget, 3, 4) for budget in schedule.budgets]
        at = lambda t, layers=layers, s=schedule: layers[bisect_right(s.starts, t) - 1]  # noqa: E731
        evicted, first_room = trigger.after_prompt(prompt)
        held = [b if prompt >= b + 5 else prompt for b in at(prompt)]
        assert [prompt - lost for lost in evicted] == held
        fed = prompt
        assert first_room == trigger.room(prompt, evicted)  # which the walk below follows step by step
        for _ in range(8):
            room = trigger.room(fed, evicted)
            for step in range(1, room + 1):
                full = any(h + step >= b + 5 for h, b in zip(held, at(fed + step), strict=True))
                assert full == (step == room)
                assert all(h + step <= c for h, c in zip(held, trigger.capacities(prompt, 0), strict=True))
            fed += room
            held = [min(h + room, b) for h, b in zip(held, at(fed), strict=True)]
            before, evicted = evicted, trigger.evicted(fed, evicted)
            assert sum(evicted) > sum(before)  # so every compression has deaths to record
            assert [fed - lost for lost in evicted] == held


@pytest.mark.filterwarnings("ignore:.*shrinks with length")
def test_the_smallest_budget_is_of_these_lengths_alone() -> None:
    trigger = Trigger(KNorm(SHRINKING, **SIZES), 2)
    assert [trigger.smallest_budget(5, last) for last in (19, 20, 49, 50)] == [15, 10, 10, 9]
    assert trigger.smallest_budget(33, 49) == 22


@pytest.mark.filterwarnings("ignore:.*shrinks with length")
@pytest.mark.parametrize("whole", [False, True])
def test_no_sequence_is_compressed_more_often_than_expected(whole: bool) -> None:
    """And one of a constant budget as often, weak pyramids too, whose prompts may fill some layers alone."""
    for schedule, beta in itertools.product((RISING, LEAPING, SHRINKING, 12), (1, 1.1, 1.2, 1.5, 2)):
        c = KNorm(schedule, **SIZES, budget_rule=Pyramid(beta), compress_prompt=not whole)
        trigger, most = Trigger(c, 3), [0] * 120  # of up to so many tokens
        for prompt in range(1, 90):
            evicted, room = trigger.after_prompt(prompt)
            events, fed = [prompt] * any(evicted), prompt
            while (fed := fed + room) < 120:
                events.append(fed)
                evicted = trigger.evicted(fed, evicted)
                room = trigger.room(fed, evicted)
            most = [max(before, bisect_right(events, length)) for length, before in enumerate(most)]
        expected = [trigger.most_events(length) for length in range(120)]
        assert all(found <= allowed for found, allowed in zip(most, expected, strict=True))
        assert most == expected or schedule != 12
