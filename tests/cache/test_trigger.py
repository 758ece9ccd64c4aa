"""Trigger: the lengths at which slots are compressed, against feeding one token at a time."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import pytest

from sparse_rl_lightning.budgets import LengthSchedule, Pyramid
from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.compressors import KNorm

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
