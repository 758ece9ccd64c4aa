"""Partial rollouts: sequences that wait in their slots while the policy is updated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from closeness import assert_same_logprobs
from rollout_cases import put_back
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
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
    assert_same_logprobs(a.sampler_logprobs, b.sampler_logprobs)


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
    assert_same_logprobs(replay_logprobs(fresh, part), part.sampler_logprobs)


@each_compressor
@pytest.mark.parametrize("num_slots", [3, 10])
def test_slots_that_are_put_back_go_on_as_if_nothing_had_happened(compressor: Compressor, num_slots: int) -> None:
    policy = model()
    session, moved = start(policy, compressor, num_slots), start(policy, compressor, num_slots)
    for each in (session, moved):
        numbers = each.add(PROMPTS, range(10))
        each.advance(max_steps=13)
    put_back(moved)
    for each in (session, moved):
        each.advance()
    assert_same(session.take(numbers), moved.take(numbers))


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


def test_mistakes_are_named() -> None:
    policy = model()
    with pytest.raises(ValueError, match="set num_slots"):
        RolloutSession(RolloutSampler(policy, FullKV()), PARAMS, 10)
    session = RolloutSession(RolloutSampler(policy, FullKV(), 2), PARAMS, 10)
    with pytest.raises(ValueError, match="made for max_prompt_length=10"):
        session.add([[3] * 11], range(2))
    with pytest.raises(ValueError, match="must name 2 sequences, got 3"):
        session.add([[3]], range(3))
