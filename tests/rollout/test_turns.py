"""Turns: tokens that the policy did not write enter live slots, and everything stays exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from rollouts import PROMPTS, SMALL, small_model
from torch import Tensor
from transformers import PreTrainedModel

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.cache import chunks
from sparse_rl_lightning.cache.chunks import Chunk
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.metrics.rollout import repetition_rates
from sparse_rl_lightning.ops import attention
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.engine import turns
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.extend import extend
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout
from sparse_rl_lightning.testing import character_tokenizer
from tests.families import FAMILIES, family

TEMPERATURE, SEED, LONGEST = 1.5, 5, 56
ENDS = list(range(100, 116))  # an eighth of the vocabulary: turns are short and ragged
EVICTING = [
    c.StreamingLLM(**SMALL), c.RandomEviction(**SMALL), c.RandomEviction(**SMALL, redraw=True), c.KNorm(**SMALL),
    c.KeyDiff(**SMALL), c.CUR(**SMALL), c.LagKV(**SMALL, lag_size=4), c.TOVA(**SMALL), c.SnapKV(**SMALL),
    c.RKV(**SMALL), c.ExpectedAttention(**SMALL), c.H2O(**SMALL),
    c.VaSE(**SMALL), c.SnapKV(**SMALL, aggregation="max_clamped"), c.Smoothed(c.SnapKV(**SMALL)),
    c.OldestTurns(**SMALL, protect_prompt=False),
]  # fmt: skip
MORE = [
    c.FullKV(), c.SnapKV(**SMALL, budget_rule=Adaptive()), c.SnapKV(**SMALL, compress_prompt=False),
    c.SnapKV(**{**SMALL, "buffer": 1}), c.H2O(**SMALL, budget_rule=Adaptive()),
]  # fmt: skip


def converse(
    model: PreTrainedModel, compressor: c.Compressor, prompts: Sequence[list[int]] = PROMPTS, num_slots: int = 3,
    ids: Sequence[int] | None = None, most: int = 3, longest: int = 19, length: int = LONGEST, **options: Any,
) -> Rollout:  # fmt: skip
    """Conversations of up to ``most`` + 1 turns; what a sequence is given depends on nothing but its id."""
    ids = range(2 * len(prompts)) if ids is None else ids
    session = new_session(model, compressor, num_slots, length, **options)
    session.add(prompts, ids)
    return talk(session, ids, most, longest)


def talk(session: RolloutSession, ids: Sequence[int], most: int = 3, longest: int = 19) -> Rollout:
    while session.num_unfinished:
        session.advance()
        answer(session, ids, most, longest)
    return session.take(session.complete)


def answer(session: RolloutSession, ids: Sequence[int], most: int, longest: int) -> None:
    """Give every paused sequence some tokens, up to ``longest``, or end it."""
    for paused in list(session.scheduler.paused.values()):
        number, turn = ids[paused.number], len(paused.observations)
        text = [5 + (number * 31 + turn * 17 + i * 7) % 90 for i in range(1 + (number + 5 * turn) % longest)]
        if turn == most or len(text) > session.room(paused.number):
            session.finish(paused.number)
        else:
            session.append(paused.number, text)


def new_session(
    model: PreTrainedModel, compressor: c.Compressor, num_slots: int = 3, length: int = LONGEST, **options: Any
) -> RolloutSession:
    sampler = RolloutSampler(model, compressor, num_slots, end_token_ids=ENDS, **options)
    params = SamplingParams(
        num_generations=2, max_completion_length=length, min_completion_length=2, seed=SEED, temperature=TEMPERATURE
    )
    return RolloutSession(sampler, params, max_prompt_length=40, turns=True)


def check_exact(model: PreTrainedModel, compressor: c.Compressor, rollout: Rollout, tolerance: float = 2e-5) -> None:
    """Replay gives the sampler's log-probs, and token by token the same is evicted as in chunks."""
    assert rollout.turns.max() >= 5
    drawn = rollout.completion_mask
    assert torch.equal(drawn, (rollout.turns % 2 == 1))
    replayed = replay_logprobs(model, rollout, TEMPERATURE)
    assert_same_logprobs(replayed[drawn].float(), rollout.sampler_logprobs[drawn], tolerance)
    assert rollout.sampler_logprobs[~drawn].abs().max() == 0
    forced = forced_rollout(model, rollout, compressor, TEMPERATURE, SEED)
    assert torch.equal(forced.evictions.death, rollout.evictions.death)
    assert_same_logprobs(forced.sampler_logprobs, rollout.sampler_logprobs, tolerance)
    assert torch.equal(forced.kv.stored, rollout.kv.stored)
    assert torch.equal(forced.kv.stored_integral, rollout.kv.stored_integral)


# -------------------------------------------------------------------- exactness


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_of_every_family_are_replayed(name: str) -> None:
    model, compressor = family(name), c.SnapKV(**SMALL)
    check_exact(model, compressor, converse(model, compressor, PROMPTS[1:4]))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compressor", [*EVICTING, *MORE], ids=str)
def test_every_compressor_sees_what_it_would_see_token_by_token(compressor: c.Compressor) -> None:
    model = small_model().double()  # in which rounding decides between no two entries
    check_exact(model, compressor, converse(model, compressor, PROMPTS[1:4]), tolerance=1e-6)


@pytest.mark.parametrize("options", [{"max_prefill_tokens": 7}, {"kv_dtype": "bfloat16"}], ids=str)
def test_long_texts_are_cut_and_stored_as_the_cache_stores(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compressor, counts = small_model(), c.SnapKV(**SMALL), list[int]()

    def read(engine: Engine, texts: list[Chunk]) -> Tensor:
        counts.append(sum(chunk.count for chunk in texts))
        return extend(engine, texts)

    monkeypatch.setattr(turns, "extend", read)
    rollout = converse(model, compressor, **options)
    if "kv_dtype" not in options:
        assert max(counts) == 7
        check_exact(model, compressor, rollout)
        assert torch.equal(rollout.sequences, converse(model, compressor).sequences)
    else:  # replay attends in float32: rounding, and nothing else
        replayed = replay_logprobs(model, rollout, TEMPERATURE)
        assert (replayed - rollout.sampler_logprobs)[rollout.completion_mask].abs().max() < 0.05


def test_texts_are_attended_under_masks_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compressor = small_model(), c.SnapKV(**SMALL)
    want = converse(model, compressor, PROMPTS[1:3], most=1)
    monkeypatch.setattr(attention, "MASK_SIZE", 20)
    monkeypatch.setattr(chunks, "visible_attention", None)  # which takes a mask of all pairs
    got = converse(model, compressor, PROMPTS[1:3], most=1)
    assert torch.equal(got.sequences, want.sequences)
    assert_same_logprobs(got.sampler_logprobs, want.sampler_logprobs)


def test_gradients_are_finite_and_those_of_given_tokens_are_zero() -> None:
    model, compressor = small_model(), c.SnapKV(**SMALL)
    rollout = converse(model, compressor)
    replayed = replay_logprobs(model, rollout, TEMPERATURE)
    (replayed * rollout.completion_mask).sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)
    assert replayed[~rollout.completion_mask].abs().max() == 0


# -------------------------------------------------------------------- slots


@pytest.mark.parametrize("protected", [0, 2])
def test_a_conversation_does_not_depend_on_its_neighbors(protected: int) -> None:
    """Bitwise: with others in slots that are paused, refilled, read at other times, and left by others' texts."""
    model, compressor = small_model(), c.SnapKV(**SMALL | {"budget": 22}, protect_observations=protected)
    together = converse(model, compressor, num_slots=2)
    for number in (0, 3):
        alone = converse(model, compressor, [PROMPTS[number]], 1, ids=[2 * number, 2 * number + 1])
        for sample in (0, 1):
            row, length = 2 * number + sample, int(alone.lengths[sample])
            assert together.lengths[row] == length
            assert torch.equal(together.sequences[row, :length], alone.sequences[sample, :length])
            assert torch.equal(together.sampler_logprobs[row, :length], alone.sampler_logprobs[sample, :length])
            deaths = (one.evictions.death[:, at, :, :length] for one, at in ((together, row), (alone, sample)))
            assert torch.equal(*deaths)


def test_others_go_on_while_one_waits() -> None:
    model = small_model()
    session = new_session(model, c.SnapKV(**SMALL), num_slots=4)
    session.add(PROMPTS[:2], range(4))
    session.advance(until=lambda: bool(session.paused), max_steps=0)
    waiting = set(session.paused)
    before = {one.number: one.num_fed for one in session.scheduler.running.values()}
    session.advance()
    assert waiting <= set(session.paused)
    assert before
    for sequence, fed in before.items():
        own = [one for one in session.scheduler.in_slots.values() if one.number == sequence]
        assert not own or own[0].num_fed > fed
    assert session.num_unfinished == len(session.paused)


def test_memory_does_not_grow_with_turns() -> None:
    model, compressor = small_model(max_position_embeddings=4096), c.SnapKV(**SMALL)
    sampler = RolloutSampler(model, compressor, 2, end_token_ids=ENDS)
    params = SamplingParams(max_completion_length=3000, seed=SEED, temperature=TEMPERATURE)
    session = RolloutSession(sampler, params, max_prompt_length=40, turns=True)
    session.add(PROMPTS[:2], range(2))
    rollout = talk(session, range(2), most=50)
    assert rollout.turns.amax(dim=1).tolist() == [101, 101]
    capacity = SMALL["budget"] + SMALL["buffer"]
    g = session.engine.key.geometry
    assert rollout.kv.peak_bytes == 2 * capacity * g.num_layers * g.num_kv_heads * g.bytes_per_entry
    assert session.engine.cache.pool_bytes == rollout.kv.peak_bytes
    replayed = replay_logprobs(model, rollout, TEMPERATURE)
    drawn = rollout.completion_mask
    assert_same_logprobs(replayed[drawn].float(), rollout.sampler_logprobs[drawn], share=5e-5)


def test_phrases_do_not_reach_over_what_was_given() -> None:
    ids, drawn = torch.tensor([[1, 2, 9, 3] * 4]), torch.tensor([[True, True, False, True] * 4])
    assert repetition_rates(ids, drawn, 4).item() == 0
    assert repetition_rates(ids, torch.ones_like(drawn), 4).item() > 0.5


# -------------------------------------------------------------------- ends of turns


def test_stop_strings_end_turns_and_are_not_found_in_what_was_given() -> None:
    model, tokenizer = small_model(vocab_size=25), character_tokenizer("0123456789+-*/= abcdef")
    stop = tokenizer.decode([7])
    sampler = RolloutSampler(model, c.RandomEviction(**SMALL), 2, end_token_ids=[], tokenizer=tokenizer)
    params = SamplingParams(max_completion_length=400, seed=3, temperature=3.0, stop_strings=(2 * stop, "5"))
    session = RolloutSession(sampler, params, max_prompt_length=4, turns=True)
    session.add([[5, 6], [8, 11]], range(2))
    turns = 0
    for _ in range(4):
        session.advance()
        for sequence, tokens in session.paused.items():
            turns += 1
            text = tokenizer.decode(tokens)
            assert text.endswith((2 * stop, "5"))
            assert 2 * stop not in text[:-1]
            session.append(sequence, [8, 7, 7, 4, 7])  # both strings, and the beginning of one
    assert turns > 4


def test_what_cannot_be_is_refused() -> None:
    model = small_model()
    session = new_session(model, c.SnapKV(**SMALL))
    session.add(PROMPTS[:1], range(2))
    with pytest.raises(UserError, match="sequence 0 is not paused"):
        session.append(0, [5])
    while 0 not in session.paused:
        session.advance()
    for given, said in (([], "empty"), ([500], "500"), ([5] * 100, "more tokens that are not its own, got 100")):
        with pytest.raises(UserError, match=said):
            session.append(0, given)
    session.append(0, [5] * session.room(0))
    with pytest.raises(UserError, match="not paused"):
        session.finish(0)
    talk(session, range(2))
    params = SamplingParams(max_completion_length=9)
    with pytest.raises(UserError, match="made without turns=True"):
        RolloutSession(RolloutSampler(model, c.SnapKV(**SMALL), 3), params, 9).finish(0)
    retrieving = RolloutSampler(model, None, 3, retriever=Quest(budget=64, num_dense_layers=1))
    with pytest.raises(UserError, match="without a retriever"):
        RolloutSession(retrieving, params, 9, turns=True)
