"""Intervals over problems against repeated draws, and against formulas where there is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparse_rl_lightning.metrics.intervals import mean, ratio, share, tail


def test_a_mean_has_the_interval_of_a_mean() -> None:
    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])
    found = mean(values, torch.arange(5))
    error = 1.959964 * float(values.double().std()) / math.sqrt(5)
    assert found == pytest.approx((2.8, 2.8 - error, 2.8 + error))


def test_samples_of_a_problem_are_not_independent() -> None:
    """Copies of every sequence change nothing."""
    over, under, problems = torch.tensor([3.0, 1.0, 4.0]), torch.tensor([4.0, 2.0, 5.0]), torch.arange(3)
    copied = ratio(over.repeat_interleave(4), under.repeat_interleave(4), problems.repeat_interleave(4))
    assert copied == pytest.approx(ratio(over, under, problems))


def test_a_share_has_an_interval_where_it_is_0() -> None:
    value, low, high = share(torch.zeros(64), torch.arange(64))
    assert (value, low) == (0, pytest.approx(0, abs=1e-12))
    assert high == pytest.approx(1.959964**2 / (64 + 1.959964**2))


def test_one_problem_says_nothing_of_others() -> None:
    found = ratio(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.zeros(2, dtype=torch.long))
    assert found == (0.75, -math.inf, math.inf)
    assert tail(torch.rand(9), torch.zeros(9, dtype=torch.long)).value > 0


def test_coverage() -> None:
    """Of texts with levels of their own some 95 % of the intervals hold the truth: tokens of a text are alike."""
    draws = np.random.default_rng(0)
    levels = draws.normal(size=(20_000, 1)) + 0.5 * draws.normal(size=(20_000, 60))
    truths = {"tail": float(np.quantile(levels, 0.05)), "ratio": float((levels > 0).mean())}
    held = {"tail": 0, "ratio": 0}
    for _ in range(400):
        values = torch.from_numpy(draws.normal(size=(200, 1)) + 0.5 * draws.normal(size=(200, 60)))
        mask = torch.from_numpy(np.arange(60) < draws.integers(10, 60, size=(200, 1)))
        problems = torch.arange(200)[:, None].expand(200, 60)[mask]
        found = {"tail": tail(values[mask], problems), "ratio": mean(values[mask] > 0, problems)}
        for name, (_, low, high) in found.items():
            held[name] += low <= truths[name] <= high
    assert 0.91 < held["tail"] / 400 < 0.985
    assert 0.91 < held["ratio"] / 400 < 0.985
