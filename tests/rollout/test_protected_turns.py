"""Protected turns: what a conversation was given last is never evicted, and everything stays exact."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_cases import put_back
from rollouts import assert_same
from torch import Tensor

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evictions import NEVER
from sparse_rl_lightning.ops import CachedEntries
from sparse_rl_lightning.records import LayerState, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine.turns import ENDLESS, ObservationBudget
from tests.rollout import test_turns
from tests.rollout.test_turns import PROMPTS, SEED, check_exact, small_model

SIZES: dict[str, Any] = {"budget": 22, "buffer": 5, "num_sinks": 2, "window": 4}
ONE, TWO = SIZES | {"protect_observations": 1}, SIZES | {"protect_observations": 2}
LONGEST = 70  # tokens of a completion
SHORT_TEXTS: dict[str, Any] = {"most": 99, "longest": 8}  # as many turns as there is room for
new_session = partial(test_turns.new_session, length=LONGEST)
answer, talk = partial(test_turns.answer, **SHORT_TEXTS), partial(test_turns.talk, **SHORT_TEXTS)
converse = partial(test_turns.converse, **SHORT_TEXTS, length=LONGEST)
METHODS = [
    c.StreamingLLM(**TWO), c.RandomEviction(**TWO), c.RandomEviction(**TWO, redraw=True), c.KNorm(**TWO),
    c.KeyDiff(**TWO), c.CUR(**TWO), c.LagKV(**TWO, lag_size=4), c.TOVA(**TWO), c.SnapKV(**TWO), c.RKV(**TWO),
    c.ExpectedAttention(**TWO), c.H2O(**TWO),
    c.Combined([c.SnapKV(**TWO), c.KNorm(**TWO)]), c.Combined([c.SnapKV(**TWO)], across_heads="max"),
    c.Smoothed(c.SnapKV(**TWO)),
]  # fmt: skip
SETTINGS = [
    c.SnapKV(**ONE), c.SnapKV(**TWO | {"protect_observations": 100, "budget": 40}), c.SnapKV(**{**TWO, "buffer": 1}),
    c.StreamingLLM(**ONE, compress_prompt=False), c.SnapKV(**TWO, compress_prompt=False),
    c.SnapKV(**{**TWO, "budget": 60}, protect_prompt=True), c.KNorm(**TWO | {"budget": 30}, protect_token_ids=[40, 41]),
    c.SnapKV(**TWO, budget_rule=Adaptive()), c.H2O(**ONE, budget_rule=Adaptive()),
    c.SnapKV(**TWO | {"budget": 33}, budget_rule=Pyramid(2)),
    c.SnapKV(**TWO, budget_rule=Adaptive(layers=Pyramid(1.2))),
    c.RKV(**TWO | {"budget": LengthSchedule([0, 40, 60], [22, 26, 28])}),
]  # fmt: skip


def texts_of(rollout: Rollout, row: int) -> list[list[int]]:
    """The positions of the tokens of every text that a sequence was given, oldest first."""
    turns = rollout.turns[row].tolist()
    return [[at for at, turn in enumerate(turns) if turn == number] for number in range(2, max(turns) + 1, 2)]


def check_protected(rollout: Rollout, count: int) -> tuple[int, int]:
    """No token of the newest ``count`` texts died; returns how many texts lost tokens, and kept all to the end."""
    lost = kept = 0
    for row in range(len(rollout)):
        texts, death = texts_of(rollout, row), rollout.evictions.death[:, row]
        for number, text in enumerate(texts):
            newer = texts[number + count :]
            # the first compression at which a token of the text that takes its place has been fed
            until = newer[0][0] + 1 if newer else NEVER
            own: Tensor = death[..., text]
            assert (own >= until).all(), (row, number)
            lost, kept = lost + bool((own < NEVER).any()), kept + bool((own == NEVER).all())
    return lost, kept


# -------------------------------------------------------------------- what stays


@pytest.mark.thinned(4)
@pytest.mark.parametrize("compressor", [*METHODS, *SETTINGS], ids=str)
def test_the_newest_texts_stay_and_the_record_is_exact(compressor: c.Compressor) -> None:
    model = small_model().double()  # in which rounding decides between no two entries
    rollout = converse(model, compressor, max_prefill_tokens=7)  # texts are cut
    lost, kept = check_protected(rollout, compressor.protect_observations)
    assert kept > 5
    assert (lost > 3) == (compressor.protect_observations < 100)
    check_exact(model, compressor, rollout, tolerance=1e-6)


@pytest.mark.parametrize(
    "compressor",
    [
        c.OldestTurns(46, buffer=5, num_sinks=0, window=4),
        c.OldestTurns(22, buffer=5, num_sinks=1, window=4, protect_prompt=False),
        c.OldestTurns(50, buffer=5, num_sinks=0, window=4, budget_rule=Pyramid(1.1)),
        c.OldestTurns(LengthSchedule([0, 50, 60], [46, 50, 48]), buffer=5, num_sinks=0, window=4),
        c.Combined([c.OldestTurns(46, buffer=5, num_sinks=0, window=4)]),
    ],
    ids=["prompt kept", "prompt open", "pyramid", "schedule", "combined"],
)  # fmt: skip
def test_whole_turns_leave_the_oldest_first(compressor: c.Compressor) -> None:
    """But for turns that reach into the window when the budget does not hold them, from their oldest token on."""
    model = small_model().double()
    rollout = converse(model, compressor, max_prefill_tokens=7)
    whole = torn = 0
    for row in range(len(rollout)):
        turns, death = rollout.turns[row], rollout.evictions.death[:, row]
        assert bool((death == death[:, :1]).all()), "heads keep the same"
        if compressor.protect_prompt:
            assert bool((death[..., turns == 0][..., : rollout.prompt_lengths[row]] == NEVER).all())
        for layer in death[:, 0]:
            order = [layer[turns == turn] for turn in range(1, int(turns.max()) + 1)]
            for older, newer in pairwise(order):
                assert older.max() <= newer.min(), "an older turn outlived a newer one"
            for turn, deaths in enumerate(order, start=1):
                last = int((turns == turn).nonzero().max())
                assert bool((deaths.diff() >= 0).all())
                late = deaths[deaths > last + compressor.window]  # it had left the window, so all that was left of it
                assert len(late.unique()) <= 1, (row, turn)
                whole, torn = whole + (len(late) == len(deaths)), torn + (0 < len(late) < len(deaths))
    assert whole > 10
    assert torn < whole
    check_exact(model, compressor, rollout, tolerance=1e-6)


def test_without_turns_the_most_recent_stay() -> None:
    sizes: dict[str, Any] = {"budget": 24, "buffer": 5, "num_sinks": 2, "window": 4, "protect_prompt": True}
    params = SamplingParams(num_generations=2, max_completion_length=40, seed=3)
    prompts = [list(range(5, 5 + n)) for n in (3, 17)]
    deaths = [
        RolloutSampler(small_model(eos_token_id=None), method).generate(prompts, params).evictions.death
        for method in (c.OldestTurns(**sizes), c.StreamingLLM(**sizes))
    ]
    assert torch.equal(*deaths)


@pytest.mark.parametrize("method", [c.QFilters, c.TriAttention])
def test_calibrated_methods_keep_them_too(method: Any) -> None:
    model = small_model().double()
    statistics = gather_statistics(model, torch.randint(3, 100, (4, 60)), torch.full((4,), 60))
    compressor = method(**TWO, statistics=statistics)
    rollout = converse(model, compressor)
    assert check_protected(rollout, 2)[0] > 5
    check_exact(model, compressor, rollout, tolerance=1e-6)


def test_without_protection_they_go() -> None:
    """Else the tests above would show nothing."""
    model = small_model().double()
    for compressor in (c.SnapKV(**SIZES), c.SnapKV(**ONE)):
        with pytest.raises(AssertionError):
            check_protected(converse(model, compressor), compressor.protect_observations + 1)


def brute_force(length: int, prompt: int, texts: list[list[int]], compressor: c.Compressor) -> list[int]:
    """The death of every token but the last, by StreamingLLM: the oldest that may go is the first to go."""
    live, death = list[int](), [NEVER] * length
    for fed in range(1, length):
        live.append(fed - 1)
        if fed < prompt or len(live) < compressor.budget + compressor.buffer:
            continue
        begun = [text for text in texts if text[0] < fed]
        stay = {at for text in begun[max(0, len(begun) - compressor.protect_observations) :] for at in text}
        stay |= {
            *range(compressor.num_sinks),
            *live[-compressor.window :],
            *(range(prompt) if compressor.protect_prompt else ()),
        }
        gone = [at for at in live if at not in stay][: len(live) - compressor.budget]
        live = [at for at in live if at not in gone]
        for at in gone:
            death[at] = fed
    return death


@pytest.mark.thinned(4)
@pytest.mark.parametrize("options", [{}, {"protect_prompt": True, "budget": 60}, {"num_sinks": 0}], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_every_death_is_that_of_brute_force(count: int, options: dict[str, Any]) -> None:
    compressor = c.StreamingLLM(**{**SIZES, "budget": 30, **options}, protect_observations=count)
    rollout = converse(small_model(), compressor)
    for row in range(len(rollout)):
        length, prompt = int(rollout.lengths[row]), int(rollout.prompt_lengths[row])
        want = torch.tensor(brute_force(length, prompt, texts_of(rollout, row), compressor))
        death = rollout.evictions.death[:, row, :, :length]
        assert torch.equal(death, want.to(death.dtype).expand_as(death)), row


# -------------------------------------------------------------------- what does not change


class Counted(c.SnapKV):
    """Counts the events that were scored by the op."""

    events = 0

    def score_cached(self, entries: CachedEntries) -> Tensor:
        type(self).events += 1
        return super().score_cached(entries)

    def score(self, layer: LayerState) -> Tensor:
        return super().score(layer)


def test_what_has_no_turns_takes_the_short_way_and_more_memory_is_never_needed() -> None:
    model, params = small_model(), SamplingParams(num_generations=2, max_completion_length=40, seed=1)
    rollouts, sizes, events = [], [], []
    for count in (0, 2):
        Counted.events = 0
        sampler = RolloutSampler(model, Counted(**SIZES, protect_observations=count), 3)
        rollouts.append(sampler.generate(PROMPTS, params))
        sizes.append({name: [t.numel() for t in own] for name, own in sampler.cache.parts().items()})
        events.append(Counted.events)
    assert_same(*rollouts, share=0)
    assert sizes[0] == sizes[1]
    assert events[0] == events[1] > 0
    session = new_session(model, c.SnapKV(**TWO))
    plain = new_session(model, c.SnapKV(**SIZES))
    parts, more = plain.engine.cache.parts(), session.engine.cache.parts()
    assert {n: [t.shape for t in own] for n, own in parts.items()} == {
        n: [t.shape for t in own] for n, own in more.items()
    }


def test_conversations_that_are_put_back_go_on() -> None:
    model, compressor = small_model(), c.SnapKV(**TWO)
    whole = converse(model, compressor)
    session = new_session(model, compressor)
    session.add(PROMPTS, range(10))
    while not all(len(one.observations) > 1 for one in session.scheduler.in_slots.values()):
        session.advance(max_steps=1)
        answer(session, range(10))
    put_back(session)
    rest = talk(session, range(10))
    rows = [whole.keys[:, 1].tolist().index(key) for key in rest.keys[:, 1].tolist()]
    assert sorted(rows) == list(range(len(whole)))
    assert torch.equal(rest.sequences, whole.sequences[rows])
    assert torch.equal(rest.sampler_logprobs, whole.sampler_logprobs[rows])
    assert torch.equal(rest.evictions.death, whole[torch.tensor(rows)].evictions.death)


# -------------------------------------------------------------------- how long a text may be


def fill(session: RolloutSession, more: int) -> list[int]:
    """Give every sequence as many tokens as there is room for, or more, and end it after the turn that follows."""
    session.add(PROMPTS, range(10))
    rooms = list[int]()
    while session.num_unfinished:
        session.advance()
        for slot, one in list(session.scheduler.paused.items()):
            if one.observations:
                session.finish(one.number)
            else:
                rooms.append(session.room(one.number))
                session.scheduler.give(slot, [7] * (rooms[-1] + more))  # what append does when it has checked
    return rooms


@pytest.mark.parametrize(
    "options",
    [
        {}, {"protect_observations": 2}, {"protect_prompt": True, "budget": 54}, {"budget_rule": Pyramid(1.2)},
        {"budget_rule": Adaptive()}, {"budget": LengthSchedule([0, 20, 60], [30, 24, 40])},
        {"budget": LengthSchedule([0, 30], [30, 20])}, {"num_sinks": 0}, {"buffer": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*shrinks with length")
def test_a_text_may_be_as_long_as_the_room_and_no_longer(options: dict[str, Any]) -> None:
    model, compressor = small_model(), c.SnapKV(**{**ONE, **options})
    rooms = fill(new_session(model, compressor), 0)
    assert len(rooms) > 5
    assert 5 < max(rooms) < LONGEST - 20
    with pytest.raises(UserError, match=r"entries of a head in layer . must stay"):
        fill(new_session(model, compressor), 1)


def test_what_cannot_be_kept_is_refused_with_the_numbers() -> None:
    session = new_session(small_model(), c.SnapKV(**TWO))
    session.add(PROMPTS[:2], range(4))
    while not session.paused:
        session.advance(max_steps=1)
    sequence = min(session.paused)
    assert session.room(sequence) == 22 - 2 - 4
    session.append(sequence, [7] * 10)
    while sequence not in session.paused:
        session.advance(max_steps=1)
    assert session.room(sequence) == 22 - 2 - 4 - 10
    said = (
        rf"sequence {sequence} was given 7 tokens, which protect_observations=2 keeps from eviction: with 2 first "
        r"tokens .*, window=4 and 10 tokens of texts before them that is 23, more than the 22 that a layer keeps\. "
        r"Give at most 6, finish\(\) it, raise budget or lower protect_observations"
    )
    with pytest.raises(UserError, match=said):
        session.append(sequence, [7] * 7)
    session.append(sequence, [7] * 6)
    talk(session, range(4))


def test_room_is_not_limited_where_nothing_is_evicted_any_more() -> None:
    for compressor in (c.FullKV(), c.SnapKV(**ONE | {"budget": 105}), c.SnapKV(**SIZES)):
        session = new_session(small_model(), compressor)
        session.add(PROMPTS[:2], range(4))
        while not session.paused:
            session.advance(max_steps=1)
        one = next(iter(session.scheduler.paused.values()))
        room = session.room(one.number)
        assert room == one.last - one.num_fed - 1
        session.append(one.number, [7] * room)
        talk(session, range(4))


def test_a_slot_that_cannot_be_cut_is_an_error_though_its_turn_is_over() -> None:
    """It would be longer than its memory when it goes on."""
    compressor = c.SnapKV(**{**SIZES, "buffer": 1}, protect_token_ids=[*range(128)])
    sampler = RolloutSampler(small_model(), compressor, 2, end_token_ids=[*range(2, 128)])
    params = SamplingParams(max_completion_length=20, min_completion_length=1, seed=SEED)
    session = RolloutSession(sampler, params, max_prompt_length=40, turns=True)
    session.add([[*range(22)]], range(1))  # full in the step that draws its last token
    with pytest.raises(UserError, match="23 entries of a head in layer 0 must stay"):
        session.advance()


@pytest.mark.parametrize(("older", "stay"), [([], 0), ([(10, 14)], 4), ([(10, 14), (16, 19), (20, 28)], 8)])
def test_the_next_text_has_what_the_protected_ones_leave(older: list[tuple[int, int]], stay: int) -> None:
    """With two protected texts, the next and the newest so far; endless once no compression can come any more."""
    compression = Compression(c.SnapKV(**TWO), 2)
    sequence = SimpleNamespace(room=5, last=100, num_fed=30, observations=older, prompt_length=3)
    assert ObservationBudget.of(sequence, compression).left == 22 - 2 - 4 - stay
    for room, endless in ((70, False), (71, True)):
        sequence.room = room
        assert (ObservationBudget.of(sequence, compression) == ObservationBudget(ENDLESS)) == endless
