"""Advantages: numbers of TRL and verl, numbers worked by hand, missing rewards, float noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl_lightning.advantages import group_advantages, informative_groups, nan_deviation

NAN = float("nan")
REWARDS = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1])


def expect(actual: torch.Tensor, numbers: list[float], tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(numbers, dtype=torch.float64), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("eps", "even", "loser", "winner"),
    [(1e-6, 0.8660239, -0.499999, 1.499997), (1e-4, 0.8658754, -0.4999, 1.4997)],  # verl's and TRL's own output
)
def test_group_scale_gives_the_published_numbers(eps: float, even: float, loser: float, winner: float) -> None:
    expected = [even, -even, -even, even, 0, 0, 0, 0, loser, loser, loser, winner]
    expect(group_advantages(REWARDS, 4, eps=eps), expected, tolerance=2e-7 if eps == 1e-6 else 2e-5)
    assert group_advantages(REWARDS, 4, eps=eps).dtype == torch.float32


def test_group_scale_by_hand_in_float64() -> None:
    # (1, 0, 0, 1): mean 1/2, sum of squares 1, Bessel: std = sqrt(1 / 3)
    even = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    expect(group_advantages(REWARDS.double(), 4)[:4], [even, -even, -even, even], tolerance=1e-12)


def test_batch_scale_divides_by_one_deviation_of_all_rewards() -> None:
    # 7 ones, 5 zeros: sum of squares 7 * 5 / 12, Bessel: std = sqrt(35 / 12 / 11) = 0.514929
    std = math.sqrt(35 / 132) + 1e-6
    expected = [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, -0.25, -0.25, -0.25, 0.75]
    expect(group_advantages(REWARDS, 4, "batch"), [a / std for a in expected], tolerance=1e-6)


def test_no_scale_only_subtracts_the_group_mean() -> None:
    expected = [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, -0.25, -0.25, -0.25, 0.75]
    expect(group_advantages(REWARDS, 4, "none"), expected, tolerance=0)


def test_whole_number_rewards_have_fractional_advantages() -> None:
    expect(group_advantages(torch.tensor([1, 0, 0, 3]), 4, "none"), [0, -1, -1, 2], tolerance=0)
    expect(group_advantages(torch.tensor([True, False]), 2, "none"), [0.5, -0.5], tolerance=0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_reward_is_ignored_and_has_advantage_zero(scale: str) -> None:
    # 1, 0, 1 remain: mean 2/3, sum of squares 2/3, Bessel: std = sqrt(1/3); a lone reward says nothing
    rewards = torch.tensor([1, NAN, 0, 1, NAN, NAN, NAN, 1, NAN, NAN, NAN, NAN])
    std = {
        "group": math.sqrt(1 / 3) + 1e-6,
        "batch": math.sqrt((3 * (1 / 4) ** 2 + (3 / 4) ** 2) / 3) + 1e-6,  # 1, 0, 1, 1: mean 3/4
        "none": 1.0,
    }[scale]
    expected = [1 / 3 / std, 0, -2 / 3 / std, 1 / 3 / std] + [0.0] * 8
    expect(group_advantages(rewards, 4, scale), expected, tolerance=1e-6)
    assert informative_groups(rewards, 4).tolist() == [True, False, False]
    assert nan_deviation(rewards.view(3, 4))[1:].tolist() == [[0.0], [0.0]]


def test_equal_rewards_up_to_rounding_are_not_informative_and_have_advantage_zero() -> None:
    third = torch.tensor(0.3)
    above = torch.nextafter(third, torch.tensor(1.0))
    rewards = torch.stack([third, above, third, third, third, above, *REWARDS[:3]])
    assert informative_groups(rewards, 3).tolist() == [False, False, True]
    assert informative_groups(-rewards, 3).tolist() == [False, False, True]
    assert group_advantages(rewards, 3)[:6].tolist() == [0.0] * 6


def test_small_and_offset_differences_are_informative() -> None:
    rewards = torch.tensor([0.0, 1e-9, -2.0, -2.001, 100.0, 100.001, 0.0, 0.0])
    assert informative_groups(rewards, 2).tolist() == [True, True, True, False]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6), st.floats(-5, 5, width=32))
def test_advantages_sum_to_zero_in_a_group_and_ignore_a_constant(rewards: list[float], shift: float) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(values, 3, "none")
    torch.testing.assert_close(advantages.view(2, 3).sum(1), torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(group_advantages(values + shift, 3, "none"), advantages, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("size", "scale", "match"),
    [(1, "group", "num_generations=1"), (1, "batch", "num_generations=1"), (1, "none", "num_generations=1"),
     (5, "group", r"num_generations=5.*\(12,\)"), (4, "std", "scale_rewards='std'")],
)  # fmt: skip
def test_broken_groups_and_unknown_scales_are_refused(size: int, scale: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        group_advantages(REWARDS, size, scale)
    if size == 5:
        with pytest.raises(ValueError, match=match):
            informative_groups(REWARDS, size)
