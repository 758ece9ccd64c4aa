"""Partial rollouts: sequences that wait in their slots while the policy is updated."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=2, max_completion_length=30, seed=5)
each_compressor = pytest.mark.parametrize("compressor", [FullKV(), SnapKV(**SMALL), RKV(**SMALL)], ids=type)


def model() -> PreTrainedModel:
    return tiny_model(initializer_range=0.2)


def start(policy: PreTrainedModel, compressor: Compressor, num_slots: int = 4) -> RolloutSession:
    return RolloutSession(RolloutSampler(policy, compressor, num_slots), PARAMS, max_prompt_length=40)


def change(policy: PreTrainedModel, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


def assert_same(a: Rollout, b: Rollout) -> None:
    for field in ("sequences", "completion_mask", "finished"):
        assert torch.equal(getattr(a, field), getattr(b, field)), field
    assert torch.equal(a.evictions.death, b.evictions.death)
    torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=2e-5, rtol=0)


@each_compressor
def test_without_an_update_pieces_make_the_whole(compressor: Compressor) -> None:
    policy = model()
    want = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    session = start(policy, compressor)
    numbers = [*session.add(PROMPTS[:2], range(4)), *session.add(PROMPTS[2:], range(4, 10))]
    counts = []
    while session.num_unfinished:
        session.advance(max_steps=6)
        counts.append(len(session.complete))
    assert 0 in counts, "no call stopped in the middle of all groups"
    assert counts == sorted(counts)
    assert_same(want, session.take(numbers))
    assert session.complete == []


def test_the_sampler_tells_the_plan_of_a_session_that_takes_its_slots() -> None:
    sampler = RolloutSampler(model(), SnapKV(**SMALL), memory_limit=100_000)
    session = RolloutSession(sampler, PARAMS, max_prompt_length=40, num_sequences=10)
    plan = session.memory_plan
    assert plan is not None
    assert 1 <= plan.num_slots < 10
    assert sampler.memory_plan is plan
    assert session.scheduler.num_slots == plan.num_slots


def test_versions_begin_anew_in_the_slots_of_an_earlier_session() -> None:
    sampler = RolloutSampler(model(), SnapKV(**SMALL))
    for _ in range(2):
        session = RolloutSession(sampler, PARAMS, max_prompt_length=40, num_sequences=4)
        numbers = session.add(PROMPTS[:2], range(4))
        assert session.version == 0
        session.advance()
        rollout = session.take(numbers)
        assert rollout.policy_versions is not None
        assert rollout.policy_versions[rollout.completion_mask].unique().tolist() == [1]


def test_groups_come_out_when_they_are_complete_and_others_go_on() -> None:
    policy = model()
    session = start(policy, SnapKV(**SMALL))
    session.add(PROMPTS, range(10))
    taken: dict[int, Rollout] = {}
    while session.num_unfinished or session.complete:
        session.advance(max_steps=5)
        for number in session.complete:
            taken[number] = session.take([number])
            assert len(taken[number]) == 2
    whole = RolloutSampler(policy, SnapKV(**SMALL)).generate(PROMPTS, PARAMS)
    for number, rollout in taken.items():
        width = rollout.sequences.shape[1]
        assert torch.equal(rollout.sequences, whole.sequences[2 * number : 2 * number + 2, :width])
    assert sorted(taken) == [0, 1, 2, 3, 4]


def test_every_token_knows_its_version_and_replay_refuses_mixed_sequences() -> None:
    policy = model()
    session = start(policy, SnapKV(**SMALL), num_slots=3)
    numbers = session.add(PROMPTS, range(10))
    while session.num_unfinished:
        session.advance(max_steps=32)  # more than a completion has tokens: the first ones end under the first version
        change(policy, 0.97)
    rollout = session.take(numbers)
    versions = [v[m].tolist() for v, m in zip(rollout.policy_versions, rollout.completion_mask, strict=True)]
    assert all(row == sorted(row) for row in versions)
    assert (rollout.policy_versions[~rollout.completion_mask] == 0).all()
    mixed = [row for row, own in enumerate(versions) if len(set(own)) > 1]
    assert mixed
    with pytest.raises(ValueError, match=rf"Sequences \[{mixed[0]}.*drawn by several versions"):
        replay_logprobs(policy, rollout)
    first = [row for row, own in enumerate(versions) if set(own) == {1}]
    assert first
    fresh = model()  # the weights that drew version 1
    part = rollout[torch.tensor(first)]
    torch.testing.assert_close(replay_logprobs(fresh, part), part.sampler_logprobs, atol=2e-5, rtol=0)


@each_compressor
@pytest.mark.parametrize("num_slots", [3, 10])
def test_a_saved_session_goes_on_as_if_nothing_had_happened(compressor: Compressor, num_slots: int) -> None:
    policy = model()
    session = start(policy, compressor, num_slots)
    numbers = session.add(PROMPTS, range(10))
    session.advance(max_steps=13)
    stored = io.BytesIO()
    torch.save(session.state(), stored)
    stored.seek(0)
    resumed = start(policy, compressor, num_slots)
    resumed.load_state(torch.load(stored, weights_only=True))
    for each in (session, resumed):
        each.advance()
    assert_same(session.take(numbers), resumed.take(numbers))


def test_a_restart_draws_unfinished_sequences_again() -> None:
    policy = model()
    session = start(policy, SnapKV(**SMALL))
    numbers = session.add(PROMPTS, range(10))
    session.advance(max_steps=13)
    whole, small = session.state(), session.state(restart=True)
    assert small["slots"] == {}
    assert size(small) < size(whole) / 3
    resumed = start(policy, SnapKV(**SMALL))
    resumed.load_state(small)
    resumed.advance()
    session.advance()
    assert_same(session.take(numbers), resumed.take(numbers))


def test_a_version_begins_with_new_weights_where_nothing_else_is_said() -> None:
    """Whole rollouts take the weights at every call; conversations keep those they began with."""

    def versions(turns: bool, *new_weights: bool | None) -> list[int]:
        params = replace(PARAMS, max_completion_length=8, num_generations=1)
        session = RolloutSession(RolloutSampler(model(), FullKV(), 2), params, 40, turns=turns)
        session.add([[3, 4, 5]], range(1))
        found = []
        for one in new_weights:
            session.advance(1, new_weights=one)
            found.append(session._logs.version.unique().item())
        return found

    assert versions(False, None, None, False, None) == [1, 2, 2, 3]
    assert versions(True, None, None, True) == [1, 1, 2]


def size(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return (
        sum(map(size, state.values() if isinstance(state, dict) else state)) if isinstance(state, (dict, list)) else 0
    )


def test_mistakes_are_named() -> None:
    policy = model()
    with pytest.raises(ValueError, match="set num_slots"):
        RolloutSession(RolloutSampler(policy, FullKV()), PARAMS, 10)
    session = RolloutSession(RolloutSampler(policy, FullKV(), 2), PARAMS, 10)
    with pytest.raises(ValueError, match="made for max_prompt_length=10"):
        session.add([[3] * 11], range(2))
    with pytest.raises(ValueError, match="must name 2 sequences, got 3"):
        session.add([[3]], range(3))
    larger = RolloutSession(RolloutSampler(policy, FullKV(), 4), PARAMS, 10)
    larger.add([[3], [4]], range(4))
    larger.advance(1)
    with pytest.raises(ValueError, match=r"4 unfinished sequences in slots, .* 2 slots: raise .* or memory_limit"):
        session.load_state(larger.state())


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"kv_dtype": "float8_e4m3fn"}, r"kv_dtype was torch.float32, is torch.float8_e4m3fn\."),
        ({"compressor": SnapKV(**{**SMALL, "buffer": 9})}, r"slot capacities was \[17, 17\], is \[21, 21\]"),
        ({"compressor": SnapKV(**{**SMALL, "window": 2})}, "num_queries was 4, is 2"),
        ({"compressor": SnapKV(**SMALL, budget_rule=Adaptive(8))}, "unequal heads was False, is True"),
        ({"compressor": H2O(**SMALL)}, r"state_fields was \[\], is "),
        ({"params": replace(PARAMS, max_completion_length=31)}, "max_completion_length was 70, is 71"),
        ({"params": replace(PARAMS, top_logprobs=2)}, "top_logprobs was 0, is 2"),
        ({"params": replace(PARAMS, top_k=2)}, "top_k was 0, is 2"),
        ({"params": replace(PARAMS, temperature=0.7)}, r"temperature was 1.0, is 0.7\."),
        ({"compressor": RKV(**SMALL)}, r"compressor was SnapKV\(.*, is RKV\("),
        ({"max_prompt_length": 41}, "max_completion_length was 70, is 71"),
        ({"num_layers": 3}, r"head size was \[2, 4, 2, 16\], is \[3, 4, 2, 16\]"),
    ],
)
def test_a_state_of_other_settings_is_refused(changed: dict[str, Any], complaint: str) -> None:
    session = start(model(), SnapKV(**SMALL))
    session.add(PROMPTS, range(10))
    session.advance(max_steps=13)
    policy = tiny_model(num_layers=changed.get("num_layers", 2))
    sampler = RolloutSampler(
        policy, changed.get("compressor", SnapKV(**SMALL)), 4, kv_dtype=changed.get("kv_dtype", "float32")
    )
    other = RolloutSession(sampler, changed.get("params", PARAMS), changed.get("max_prompt_length", 40))
    with pytest.raises(ValueError, match=rf"drawn under other settings: .*{complaint}"):
        other.load_state(session.state())
    assert other.num_unfinished == 0
    other.load_state(session.state(restart=True))
    assert other.num_unfinished == 10


CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7}, "top_k": {"top_k": 5}, "top_logprobs": {"top_logprobs": 4},
    "length": {"max_completion_length": 26},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("steps", [33, 200], ids=["some have finished", "all have"])
def test_a_restart_draws_all_samples_again_if_a_setting_has_changed(name: str, steps: int) -> None:
    """What has finished under other settings is not mixed with what is drawn now."""
    policy, params = model(), replace(PARAMS, **CHANGES[name])
    session = start(policy, SnapKV(**SMALL))
    numbers = session.add(PROMPTS, range(10))
    session.advance(max_steps=steps)
    state = session.state(restart=True)
    assert sum(len(group["finished"]) for group in state["groups"].values()) == (4 if steps == 33 else 10)
    other = RolloutSession(RolloutSampler(policy, SnapKV(**SMALL), 4), params, max_prompt_length=40)
    other.load_state(state)
    other.advance()
    assert_same(RolloutSampler(policy, SnapKV(**SMALL)).generate(PROMPTS, params), other.take(numbers))


@each_compressor
def test_saved_sequences_go_on_in_other_slots_if_theirs_do_not_exist(compressor: Compressor) -> None:
    policy = model()
    session, other = start(policy, compressor), start(policy, compressor)
    numbers = session.add(PROMPTS, range(10))
    session.advance(max_steps=13)
    state = session.state()
    state["slots"] = {3 * slot + 3: content for slot, content in state["slots"].items()}
    assert sorted(state["slots"]) == [3, 6, 9, 12]
    other.load_state(state)
    for each in (session, other):
        each.advance()
    assert_same(session.take(numbers), other.take(numbers))


def test_a_state_is_of_its_moment_and_that_of_version_0_1_loads_too() -> None:
    """It named what each layer had lost at every compression."""
    policy, compressor = model(), SnapKV(**SMALL)
    session, other = start(policy, compressor), start(policy, compressor)
    numbers = session.add(PROMPTS, range(10))
    session.advance(max_steps=28)  # of some the last compression is behind them
    state = session.state()
    cuts = {slot: list(content["running"]["cuts"]) for slot, content in state["slots"].items()}
    session.advance()
    assert {slot: content["running"]["cuts"] for slot, content in state["slots"].items()} == cuts
    for content in state["slots"].values():
        content["running"]["cuts"] = tuple(
            (fed, (lost // 2, lost - lost // 2)) for fed, lost in content["running"]["cuts"]
        )
    other.load_state(state)
    other.advance()
    assert_same(session.take(numbers), other.take(numbers))


def test_a_restart_needs_as_many_samples_as_before() -> None:
    session = start(model(), SnapKV(**SMALL))
    session.add(PROMPTS, range(10))
    sampler = RolloutSampler(model(), SnapKV(**SMALL), 4)
    other = RolloutSession(sampler, replace(PARAMS, num_generations=5), max_prompt_length=40)
    with pytest.raises(ValueError, match=r"num_generations was 2, is 5\."):
        other.load_state(session.state(restart=True))
