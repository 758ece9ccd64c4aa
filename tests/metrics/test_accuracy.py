"""pass@k against drawing all subsets, intervals against numbers from outside and against their own promise."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from sparse_rl_lightning.metrics import ConfidenceInterval, accuracy, confidence_interval, mean_accuracy, pass_at_k


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    correct = torch.rand(9, 6) < torch.linspace(0, 1, 9)[:, None]
    for k in range(1, 7):
        subsets = list(combinations(range(6), k))
        expected = torch.stack([correct[:, list(subset)].any(dim=1) for subset in subsets]).double().mean(dim=0)
        torch.testing.assert_close(pass_at_k(correct, k), expected)


@pytest.mark.parametrize("k", [0, 4])
def test_k_must_fit_the_samples(k: int) -> None:
    with pytest.raises(ValueError, match=rf"between 1 and the 3 samples of a problem, got k={k}"):
        pass_at_k(torch.ones(2, 3, dtype=torch.bool), k)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(15, 100, 0.0931, 0.2328), (0, 30, 0.0, 0.1135), (30, 30, 0.8865, 1.0), (250, 500, 0.4564, 0.5436)],
)
def test_interval_of_a_proportion_is_wilsons(right: int, count: int, low: float, high: float) -> None:
    """Newcombe 1998, and the closed form at 0 and 1: n / (n + z^2)."""
    scores = torch.tensor([1.0] * right + [0.0] * (count - right))
    assert confidence_interval(scores) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_mean_lies_within_its_interval_in_the_last_bit_too() -> None:
    """At 0 and 1, where rounding moves a bound past the mean and a picture's error bars would be negative."""
    for count in range(1, 200):
        for score in (0.0, 1.0):
            low, high = confidence_interval(torch.full((count,), score))
            assert low <= score <= high


def test_interval_holds_what_it_promises() -> None:
    """30 problems of their own difficulty, 32 samples each: about 95 % of the intervals hold the true mean."""
    hits = 0
    for _ in range(400):
        difficulty = torch.rand(30)
        low, high = confidence_interval((torch.rand(30, 32) < difficulty[:, None]).double().mean(dim=1))
        hits += low <= 0.5 <= high
    assert 0.91 <= hits / 400 <= 0.99


def test_samples_that_agree_are_worth_no_more_than_one() -> None:
    once = (torch.rand(40, 1) < 0.5).expand(40, 32)
    assert confidence_interval(once.double().mean(dim=1)) == pytest.approx(confidence_interval(once[:, 0].double()))


def test_accuracy_of_a_benchmark() -> None:
    correct = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    found = accuracy(correct)
    assert (found.num_problems, found.num_samples, found.mean) == (3, 5, pytest.approx(0.4))
    assert found.pass_at == {
        1: pytest.approx(0.4), 2: pytest.approx(1.4 / 3), 4: pytest.approx(1.8 / 3), 5: pytest.approx(2 / 3)
    }  # fmt: skip
    assert 0 < found.low < 0.4 < found.high < 1
    with pytest.raises(ValueError, match="at least one problem"):
        accuracy(torch.zeros(0, 4, dtype=torch.bool))


def test_mean_is_unweighted() -> None:
    large = accuracy(torch.ones(1000, 1, dtype=torch.bool))
    small = accuracy(torch.zeros(10, 1, dtype=torch.bool))
    mean, low, high = mean_accuracy([large, small])
    assert mean == 0.5
    assert low == pytest.approx(0.5 - (1 - large.low) / 2)
    assert high == pytest.approx(0.5 + small.high / 2)


# ---------------------------------------------------------------- copies of a problem


def test_copies_of_a_problem_are_one_problem() -> None:
    """Four problems written down 32 times, one of them right: Wilson's interval of 1 of 4, by hand.

    z = 1.96, p = 1/4, n = 4: (p + z^2/2n -+ z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n).
    """
    scores = torch.tensor([0.0, 1.0, 0.0, 0.0])
    low, high = confidence_interval(scores.repeat_interleave(32), torch.arange(4).repeat_interleave(32))
    assert (low, high) == (pytest.approx(0.0456, abs=1e-4), pytest.approx(0.6994, abs=1e-4))
    assert (low, high) == pytest.approx(confidence_interval(scores))
    correct = (scores == 1).repeat_interleave(32)[:, None]
    found = accuracy(correct, torch.arange(4).repeat_interleave(32))
    assert (found.num_problems, found.mean, found.low, found.high) == (
        128,
        0.25,
        pytest.approx(low),
        pytest.approx(high),
    )


def test_copies_in_unequal_numbers_weigh_as_they_are_many() -> None:
    """A right three times and B wrong once: mean 3/4, and 16 / (9 + 1) = 1.6 problems as sure as equal ones."""
    low, high = confidence_interval(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([7, 7, 7, -2]))
    z, n, p = 1.959964, 1.6, 0.75
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert low == pytest.approx((p + z**2 / (2 * n) - half) / (1 + z**2 / n), abs=1e-5)
    assert high == pytest.approx((p + z**2 / (2 * n) + half) / (1 + z**2 / n), abs=1e-5)


def test_copies_that_differ_by_chance_are_averaged() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    copies = torch.tensor([0, 0, 1, 1, 2, 2])
    assert confidence_interval(scores, copies) == pytest.approx(confidence_interval(torch.tensor([0.5, 1.0, 0.0])))


def test_copies_are_found_in_whatever_batches_they_come() -> None:
    scores, problems = torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat(8), torch.arange(4).repeat(8)
    interval = ConfidenceInterval()
    for part in torch.arange(32).split(5):
        interval.update(scores[part], problems[part])
    interval.update(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert interval.compute() == pytest.approx(confidence_interval(scores, problems))
    interval.reset()
    assert all(map(math.isnan, interval.compute()))
