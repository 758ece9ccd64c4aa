"""The shape of the acceptance's tail: a Beta distribution fitted to the tokens that compression touched.

Sparrow (arXiv 2606.08446, section 3.1) finds that tokens of acceptance up to 0.999 follow a Beta distribution on
[0, 0.999], with a Kolmogorov-Smirnov distance below 0.04. It describes; nothing acts on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning.acceptance import NEAR_ONE

NEWTON_STEPS = 100
FRACTION_TERMS = 300
TINY = 1e-300


@dataclass(frozen=True)
class BetaFit:
    """A Beta distribution scaled to [0, upper], and how well it fits."""

    a: float
    b: float
    ks: float  # largest distance between its distribution function and that of the values
    count: int  # values it was fitted to
    share: float  # of all values; the others lie above
    upper: float

    @property
    def variance(self) -> float:
        """Of the scaled distribution: wide tails are what small budgets do."""
        total = self.a + self.b
        return self.upper**2 * self.a * self.b / (total**2 * (total + 1))


def fit_beta(values: Tensor, upper: float = NEAR_ONE) -> BetaFit:
    """The most likely Beta distribution on [0, upper] for the values up to ``upper``; the others are left out.

    Args:
        values: Any shape, between 0 and 1.
        upper: Largest value that takes part, and the end of the distribution.

    Returns:
        The fit; NaN where there are fewer than two different values.

    Raises:
        ValueError: If ``upper`` is not in (0, 1].
    """
    if not 0 < upper <= 1:
        raise ValueError(f"upper must lie in (0, 1], got upper={upper}.")
    flat = values.detach().flatten().double()
    scaled = (flat[flat <= upper] / upper).clamp(1e-9, 1 - 1e-9).sort().values  # the likelihood has no ends
    count, share = len(scaled), len(scaled) / max(len(flat), 1)
    if count < 2 or float(scaled[-1] - scaled[0]) < 1e-12:
        return BetaFit(math.nan, math.nan, math.nan, count, share, upper)
    a, b = _most_likely(scaled)
    expected = beta_cdf(scaled, a, b)
    index = torch.arange(count, dtype=torch.float64, device=scaled.device)
    ks = torch.maximum((index + 1) / count - expected, expected - index / count).max()
    return BetaFit(a, b, float(ks), count, share, upper)


def _most_likely(x: Tensor) -> tuple[float, float]:
    """Newton's method on the log-likelihood, which is concave in (a, b), from the moments' estimate."""
    mean, spread = float(x.mean()), float(x.var())
    total = max(mean * (1 - mean) / spread - 1, 1e-2)
    parameters = torch.tensor([mean * total, (1 - mean) * total], dtype=torch.float64)
    logs = torch.stack([x.log().mean(), torch.log1p(-x).mean()]).cpu()
    for _ in range(NEWTON_STEPS):
        slope = torch.digamma(parameters) - torch.digamma(parameters.sum()) - logs
        common = torch.polygamma(1, parameters.sum())
        curvature = torch.diag(torch.polygamma(1, parameters)) - common
        step = torch.linalg.solve(curvature, slope)
        following = torch.maximum(parameters - step, parameters / 3)  # stays positive
        done = bool(((following - parameters).abs() <= 1e-12 * parameters).all())
        parameters = following
        if done:
            break
    return float(parameters[0]), float(parameters[1])


def beta_cdf(x: Tensor, a: float, b: float) -> Tensor:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction.

    Args:
        x: Any shape, between 0 and 1.
        a: Positive.
        b: Positive.

    Returns:
        The shape of ``x``, float64.
    """
    x = x.double()
    swapped = x > (a + 1) / (a + b + 2)  # where the fraction of the other tail converges faster
    near = torch.where(swapped, 1 - x, x)
    one, other = x.new_tensor(a), x.new_tensor(b)
    first, second = torch.where(swapped, other, one), torch.where(swapped, one, other)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = (first * near.log() + second * torch.log1p(-near) - log_beta).exp() / first
    tail = torch.where(near > 0, front * _continued_fraction(near, first, second), 0.0)
    return torch.where(swapped, 1 - tail, tail)


def _continued_fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """1 / (1 + d1 / (1 + d2 / ...)) of DLMF 8.17.22, from the front by the modified method of Lentz."""
    numerator = torch.ones_like(x)
    denominator = _away_from_zero(1 - (a + b) * x / (a + 1)).reciprocal()
    value = denominator
    for m in range(1, FRACTION_TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            denominator = _away_from_zero(1 + term * denominator).reciprocal()
            numerator = _away_from_zero(1 + term / numerator)
            change = denominator * numerator
            value = value * change
        if bool(((change - 1).abs() < 1e-14).all()):
            break
    return value


def _away_from_zero(x: Tensor) -> Tensor:
    return torch.where(x.abs() < TINY, TINY, x)
