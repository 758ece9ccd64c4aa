"""The Beta distribution of the tail: its distribution function against mpmath, its fit against what was drawn."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl_lightning.metrics.beta import beta_cdf, fit_beta

PARAMETERS = [(0.3, 0.2), (1.0, 1.0), (5.0, 1.2), (2.0, 30.0), (400.0, 7.0)]


def drawn(a: float, b: float, count: int = 4000) -> torch.Tensor:
    torch.manual_seed(3)
    return 0.999 * torch.distributions.Beta(torch.tensor(a).double(), torch.tensor(b).double()).sample((count,))


@settings(max_examples=60)
@given(st.floats(0.05, 300), st.floats(0.05, 300), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_distribution_function(a: float, b: float, points: list[float]) -> None:
    found = beta_cdf(torch.tensor(points, dtype=torch.float64), a, b).tolist()
    want = [float(mpmath.betainc(a, b, 0, x, regularized=True)) for x in points]
    assert found == pytest.approx(want, abs=1e-10)


@pytest.mark.parametrize(("a", "b"), PARAMETERS)
def test_the_fit_finds_what_was_drawn(a: float, b: float) -> None:
    values = drawn(a, b)
    fit = fit_beta(torch.cat([values, torch.full((1000,), 0.9995)]))
    assert (fit.a, fit.b) == (pytest.approx(a, rel=0.1), pytest.approx(b, rel=0.1))
    assert fit.ks < 0.025  # 1.36 / sqrt(4000) is exceeded once in twenty
    assert (fit.count, fit.share) == (4000, 0.8)
    assert fit.variance == pytest.approx(float(values.var()), rel=0.06)


@pytest.mark.parametrize(("a", "b"), PARAMETERS)
def test_no_other_parameters_are_more_likely(a: float, b: float) -> None:
    x = (drawn(a, b, 300) / 0.999).clamp(1e-9, 1 - 1e-9)
    fit = fit_beta(drawn(a, b, 300))

    def likelihood(one: float, other: float) -> float:
        return float(
            torch.distributions.Beta(torch.tensor(one).double(), torch.tensor(other).double()).log_prob(x).sum()
        )

    best = likelihood(fit.a, fit.b)
    for factor in (0.99, 1.01):
        assert likelihood(fit.a * factor, fit.b) < best
        assert likelihood(fit.a, fit.b * factor) < best


def test_distance_by_brute_force() -> None:
    values = torch.tensor([0.2, 0.9, 0.5, 0.45], dtype=torch.float64)
    fit = fit_beta(values)
    ordered = sorted(float(v) / 0.999 for v in values)
    cdf = [float(mpmath.betainc(fit.a, fit.b, 0, x, regularized=True)) for x in ordered]
    want = max(max((i + 1) / 4 - f, f - i / 4) for i, f in enumerate(cdf))
    assert fit.ks == pytest.approx(want, abs=1e-9)


def test_a_shape_that_is_no_beta_is_far_away() -> None:
    two = torch.cat([drawn(200.0, 200.0), 0.9 + 0.0 * drawn(1.0, 1.0) + torch.linspace(0, 0.01, 4000)])
    assert fit_beta(two).ks > 0.1


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5, 0.5], [0.9999, 1.0]])
def test_too_little_to_fit_is_nan(values: list[float]) -> None:
    fit = fit_beta(torch.tensor(values))
    assert math.isnan(fit.a)
    assert math.isnan(fit.b)
    assert math.isnan(fit.ks)
    assert fit.count == sum(value <= 0.999 for value in values)


def test_the_ends_do_not_break_it() -> None:
    fit = fit_beta(torch.tensor([0.0, 0.0, 0.3, 0.6, 0.999]))
    assert 0 < fit.a < fit.b < 10
    assert 0 < fit.ks < 1


def test_a_wrong_end_is_refused() -> None:
    with pytest.raises(ValueError, match="upper=0"):
        fit_beta(torch.ones(3), upper=0)
