"""The scheduler: slots for those that wait, checks that are read late, and what a slot goes through past its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rollouts import CHECK_EVERY, assert_same, roll_out, small_model
from torch import Tensor

from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import LayerState, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.finished import FinishCheck, FinishedEvent
from sparse_rl_lightning.rollout.engine.scheduler import Progress, Scheduler, steps_past_end
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

SIZES: dict[str, Any] = {"budget": 16, "buffer": 5, "num_sinks": 2, "window": 4}
PROMPTS = [[30, 31, 32], [40, 41, 42, 43, 44], [7] * 25]
PARAMS = SamplingParams(num_generations=4, max_completion_length=45, seed=3)
EVERY = 8


def policy(*ends: int) -> Any:
    return small_model(eos_token_id=list(ends) or None)


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

    monkeypatch.setattr(CHECK_EVERY, {"cpu": EVERY})
    monkeypatch.setattr(FinishCheck, "read", noted)
    monkeypatch.setattr(Scheduler, "_decode", counted)
    return found


def test_a_check_is_read_behind_the_next_window(readings: list[tuple[int, int]]) -> None:
    RolloutSampler(policy(*ENDS), SnapKV(**SIZES), num_slots=3).generate(PROMPTS, PARAMS)
    assert len(readings) > 10
    *early, _ = readings  # the last one may be waited for, when all sequences have ended by length
    late = [(queued, read) for queued, read in early if queued != read]
    assert all(read == queued + EVERY for queued, read in late)
    assert len(late) > len(early) // 2


@pytest.mark.parametrize("length", [1, 2, 8, 9, 33])
def test_nothing_is_decoded_when_all_sequences_have_ended_by_length(length: int, readings: Any) -> None:
    steps: list[int] = []
    params = SamplingParams(num_generations=2, max_completion_length=length, seed=1)
    sampler = RolloutSampler(policy(), SnapKV(**SIZES))
    rollout = sampler.generate(PROMPTS, params, progress=lambda now: steps.append(now.step))
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
            number, sample = divmod(one.number, self.params.num_generations)
            if sample in self.groups[number].finished.keys() - done[number].keys():
                end = len(self.groups[number].finished[sample].tokens) - 1
                most[0] = max(most[0], one.num_fed - end)
        return closed

    monkeypatch.setattr(Scheduler, "_close_by", measured)
    sampler = RolloutSampler(policy(*ENDS), SnapKV(**SIZES), num_slots=5)
    sampler.generate(PROMPTS, PARAMS)
    bound = steps_past_end(torch.device("cpu"))
    assert bound == 2 * EVERY
    assert EVERY < most[0] < bound
    assert sampler.cache.tokens.shape[1] == 25 + 45 + bound


def test_where_a_check_is_free_nothing_goes_on() -> None:
    assert steps_past_end(torch.device("cpu")) == 0
    sampler = RolloutSampler(policy(*ENDS), SnapKV(**SIZES), num_slots=5)
    sampler.generate(PROMPTS, PARAMS)
    assert sampler.cache.tokens.shape[1] == 25 + 45


def test_a_session_pauses_with_every_ended_sequence_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    want = roll_out(policy(*ENDS), SnapKV(**SIZES), 5, prompts=PROMPTS, params=PARAMS)
    for every in (2, 8):
        monkeypatch.setattr(CHECK_EVERY, {"cpu": every})
        session = RolloutSession(RolloutSampler(policy(*ENDS), SnapKV(**SIZES), num_slots=5), PARAMS, 25)
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
        assert_same(session.take(numbers), want, share=0)


def test_a_session_goes_on_when_it_is_interrupted_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    want = roll_out(policy(*ENDS), SnapKV(**SIZES), 5, prompts=PROMPTS, params=PARAMS)
    monkeypatch.setattr(CHECK_EVERY, {"cpu": EVERY})

    def interrupt(now: Progress) -> None:
        raise KeyboardInterrupt

    session = RolloutSession(RolloutSampler(policy(*ENDS), SnapKV(**SIZES), num_slots=5), PARAMS, 25)
    numbers = session.add(PROMPTS, range(12))
    while session.num_unfinished:
        before = session.scheduler.num_steps
        with pytest.raises(KeyboardInterrupt):
            session.advance(progress=interrupt)
        assert session.scheduler.num_steps <= before + EVERY
    assert_same(session.take(numbers), want, share=0)


# --------------------------------------------------- between the end of a sequence and the next look nothing can fail


TOKENIZER = character_tokenizer()
TWO = [[30, 31, 32], [40, 41, 42, 43, 44]]


def quiet(eos_token_id: int | None) -> Any:
    return tiny_model(initializer_range=0.12, vocab_size=len(TOKENIZER), eos_token_id=eos_token_id, seed=4)


def outcome(check_every: int, seed: int, patch: pytest.MonkeyPatch, stop: bool, session: bool) -> Rollout | str:
    """A rollout with a protected third of the vocabulary, or what it says when more must stay than a head keeps."""
    patch.setattr(CHECK_EVERY, {"cpu": check_every})
    protected = SnapKV(**SIZES, protect_token_ids=list(range(0, len(TOKENIZER), 3)))
    model = quiet(None if stop else [5, 6, 7, 8])
    sampler = RolloutSampler(model, protected, num_slots=3, tokenizer=TOKENIZER)
    params = SamplingParams(
        num_generations=3, max_completion_length=48, seed=seed,
        stop_strings=tuple(TOKENIZER.decode([token]) for token in (5, 6, 7, 8)) if stop else (),
    )  # fmt: skip
    try:
        if not session:
            return sampler.generate(TWO, params)
        own = RolloutSession(sampler, params, 5)
        own.add(TWO, range(6))
        own.advance()
        return own.take(own.complete)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("stop", "session"), [(False, False), (True, False), (True, True)])
def test_looking_seldom_refuses_what_looking_always_refuses(
    stop: bool, session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in range(8):
        always, seldom = (outcome(every, seed, monkeypatch, stop, session) for every in (1, 8))
        assert isinstance(always, str) == isinstance(seldom, str), seed
        if not isinstance(always, str) and not isinstance(seldom, str):
            assert_same(seldom, always, share=0)
        else:
            assert "must stay" in str(always)
            assert "must stay" in str(seldom)
        found.append(isinstance(always, str))
    assert 0 < sum(found) < len(found), "the case is not what it should be"


def test_a_conversation_without_room_is_not_compressed_again() -> None:
    """The first compression is due where the last token by length has been drawn."""

    class PromptsAlone(SnapKV):
        """Refuses all that was drawn."""

        def score(self, layer: LayerState) -> Tensor:
            if bool((layer.positions.masked_fill(~layer.valid, 0) >= 40).any()):
                raise UserError("drawn")
            return super().score(layer)

    sampler, length = RolloutSampler(quiet(None), PromptsAlone(**SIZES), num_slots=1), SIZES["buffer"] + 1
    session = RolloutSession(sampler, SamplingParams(max_completion_length=length), 40, turns=True)
    session.add([[30] * 40], range(1))
    session.advance()
    session.finish(0)
    assert session.take([0]).completion_lengths.tolist() == [length]


class Picky(SnapKV):
    """Bears the end token nowhere."""

    def __init__(self, error: type[Exception], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.error, self.raised = error, 0

    def score(self, layer: LayerState) -> Tensor:
        if bool(((layer.token_ids == 5) & layer.valid).any()):
            self.raised += 1
            raise self.error("token 5")
        return super().score(layer)


def test_a_refusal_of_a_compressor_is_looked_into_first(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(num_generations=8, max_completion_length=60, seed=2)
    rollouts = []
    for every in (1, 8):
        monkeypatch.setattr(CHECK_EVERY, {"cpu": every})
        rollouts.append(RolloutSampler(quiet(5), Picky(UserError, **SIZES)).generate(TWO, params))
    assert bool(rollouts[0].finished.any())
    assert_same(*rollouts)
    with pytest.raises(UserError, match="token 5"):
        RolloutSampler(quiet(None), Picky(UserError, **SIZES)).generate(TWO, params)


@pytest.mark.parametrize("error", [KeyError, TypeError, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("eos_token_id", [5, None])
def test_any_other_error_of_a_score_ends_the_run_at_its_line(
    error: type[Exception], eos_token_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHECK_EVERY, {"cpu": 8})
    picky = Picky(error, **SIZES)
    sampler = RolloutSampler(quiet(eos_token_id), picky)
    with pytest.raises(error, match="token 5") as raised:
        sampler.generate(TWO, SamplingParams(num_generations=8, max_completion_length=60, seed=2))
    assert raised.traceback[-1].path == Path(__file__)
    assert picky.raised == 1


# ---------------------------------------------- slots for waiting sequences cost the same for each, however many wait


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
    params = SamplingParams(num_generations=4, max_completion_length=3)
    whole = RolloutSampler(tiny_model(eos_token_id=None), FullKV()).generate([[5], [6], [7]], params)
    assert torch.equal(session.take([1, 2]).sequences, whole.sequences[4:])
