"""The host reads a check for ends when the next steps are queued: nothing is lost, nothing goes on for long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.finished import FinishCheck, FinishedEvent
from sparse_rl_lightning.rollout.engine.scheduler import Progress, Scheduler, steps_past_end
from sparse_rl_lightning.testing import tiny_model

SMALL: dict[str, Any] = {"budget": 16, "buffer": 5, "num_sinks": 2, "window": 4}
PROMPTS = [[30, 31, 32], [40, 41, 42, 43, 44], [7] * 25]
PARAMS = SamplingParams(num_generations=4, max_completion_length=45, seed=3)
EVERY = 8


def policy(*ends: int) -> Any:
    return tiny_model(initializer_range=0.2, eos_token_id=list(ends) or None)


ENDS = tuple(range(2, 8))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Check for ends after every eight steps, and note of each check the steps when it was queued and when read."""
    found, now, read, decode = [], [0], FinishCheck.read, Scheduler._decode

    def noted(self: FinishCheck) -> Iterator[FinishedEvent]:
        found.append((self.num_steps, now[0]))
        return read(self)

    def counted(self: Scheduler) -> list[int]:
        full = decode(self)
        now[0] = self.num_steps
        return full

    monkeypatch.setattr(scheduler, "CHECK_EVERY", {"cpu": EVERY})
    monkeypatch.setattr(FinishCheck, "read", noted)
    monkeypatch.setattr(Scheduler, "_decode", counted)
    return found


def assert_same(one: Rollout, other: Rollout) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(one.finished, other.finished)
    assert torch.equal(one.sampler_logprobs, other.sampler_logprobs)
    assert torch.equal(one.evictions.death, other.evictions.death)
    assert torch.equal(one.kv.stored_integral, other.kv.stored_integral)


def test_a_check_is_read_behind_the_next_window(readings: list[tuple[int, int]]) -> None:
    RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=3).generate(PROMPTS, PARAMS)
    assert len(readings) > 10
    *early, _ = readings  # the last one may be waited for, when all sequences have ended by length
    late = [(queued, read) for queued, read in early if queued != read]
    assert all(read == queued + EVERY for queued, read in late)
    assert len(late) > len(early) // 2


@pytest.mark.parametrize("length", [1, 2, 8, 9, 33])
def test_nothing_is_decoded_when_all_sequences_have_ended_by_length(length: int, readings: Any) -> None:
    steps: list[int] = []
    params = SamplingParams(num_generations=2, max_completion_length=length, seed=1)
    rollout = RolloutSampler(policy(), SnapKV(**SMALL)).generate(
        PROMPTS, params, progress=lambda now: steps.append(now.step)
    )
    assert rollout.completion_lengths.tolist() == [length] * 6
    assert steps[-1] == length - 1  # the prompt gives the first token
    assert readings[-1] == (length - 1, length - 1)
    assert len(steps) == max(1, -(-(length - 1) // EVERY))
    assert len(readings) == max(1, len(steps) - 1)  # the last check replaces the one before


def test_a_sequence_goes_on_for_at_most_two_windows(readings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most, close = [0], Scheduler._close_by

    def measured(self: Scheduler, check: FinishCheck) -> bool:
        before, done = dict(self.running), {n: dict(group.finished) for n, group in self.groups.items()}
        closed = close(self, check)
        for one in before.values():
            number, sample = divmod(one.sequence, self.params.num_generations)
            if sample in self.groups[number].finished.keys() - done[number].keys():
                end = len(self.groups[number].finished[sample].tokens) - 1
                most[0] = max(most[0], one.num_fed - end)
        return closed

    monkeypatch.setattr(Scheduler, "_close_by", measured)
    sampler = RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=5)
    sampler.generate(PROMPTS, PARAMS)
    bound = steps_past_end(torch.device("cpu"))
    assert bound == 2 * EVERY
    assert EVERY < most[0] < bound
    assert sampler.cache is not None
    assert sampler.cache.tokens.shape[1] == 25 + 45 + bound


def test_where_a_check_is_free_nothing_goes_on() -> None:
    assert steps_past_end(torch.device("cpu")) == 0
    sampler = RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=5)
    sampler.generate(PROMPTS, PARAMS)
    assert sampler.cache is not None
    assert sampler.cache.tokens.shape[1] == 25 + 45


def test_a_session_pauses_with_every_ended_sequence_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    want = RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=5).generate(PROMPTS, PARAMS)
    for every in (2, 8):
        monkeypatch.setattr(scheduler, "CHECK_EVERY", {"cpu": every})
        session = RolloutSession(RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=5), PARAMS, 25)
        numbers = session.add(PROMPTS, range(12))
        pauses = 0
        while session.num_unfinished:
            session.advance(max_steps=3)
            pauses += 1
            for slot, one in session.scheduler.running.items():
                drawn = session.engine.cache.tokens[slot, one.prompt_length : one.num_fed + 1].tolist()
                assert not set(drawn) & set(ENDS)
                assert len(drawn) < PARAMS.max_completion_length
        assert pauses > 5
        assert_same(session.take(numbers), want)


def test_a_session_goes_on_when_it_is_interrupted_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    want = RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=5).generate(PROMPTS, PARAMS)
    monkeypatch.setattr(scheduler, "CHECK_EVERY", {"cpu": EVERY})

    def interrupt(now: Progress) -> None:
        raise KeyboardInterrupt

    session = RolloutSession(RolloutSampler(policy(*ENDS), SnapKV(**SMALL), num_slots=5), PARAMS, 25)
    numbers = session.add(PROMPTS, range(12))
    while session.num_unfinished:
        before = session.scheduler.num_steps
        with pytest.raises(KeyboardInterrupt):
            session.advance(progress=interrupt)
        assert session.scheduler.num_steps <= before + EVERY
    assert_same(session.take(numbers), want)
