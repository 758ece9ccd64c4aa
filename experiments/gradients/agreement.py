"""How far two noisy gradients agree: cosine and ratio of lengths, freed of the noise that they share.

A gradient is measured in C chunks of different prompts. Products of the *same* chunk contain its noise, products of two
different ones do not, so with <a, b> as the mean of a_i b_j over i != j

    cosine = <a, b> / sqrt(<a, a> <b, b>),    length = sqrt(<b, b> / <a, a>),    projection = <a, b> / <a, a>

estimate what infinitely many samples would give; noise may carry a cosine beyond 1. Intervals are from the jackknife
over chunks (Efron 1982). Everything is read off the Gram matrix of all chunks, so gradients need not be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

NORMAL = 1.96  # quantile of an interval of 95 %


@dataclass(frozen=True)
class Estimate:
    """A number with half the width of its 95 % interval."""

    value: float
    width: float

    def __str__(self) -> str:
        is_finite = math.isfinite(self.value) and math.isfinite(self.width)
        return f"{self.value:.2f} ± {self.width:.2f}" if is_finite else "–"  # noise left no length to divide by


def crossed(products: Tensor) -> Tensor:
    """The mean of products (C, C) of chunks of different prompts: all but the diagonal."""
    count = len(products)
    return (products.sum() - products.diagonal().sum()) / (count * (count - 1))


def cosine(aa: Tensor, ab: Tensor, bb: Tensor) -> float:
    """Cosine of a and b from their products (C, C); NaN where noise leaves no length."""
    square = float(crossed(aa) * crossed(bb))
    return float(crossed(ab)) / math.sqrt(square) if square > 0 else math.nan


def length(aa: Tensor, ab: Tensor, bb: Tensor) -> float:
    """The length of b over that of a."""
    ratio = float(crossed(bb) / crossed(aa))
    return math.sqrt(ratio) if ratio > 0 else math.nan


def projection(aa: Tensor, ab: Tensor, bb: Tensor) -> float:
    """How much of a is in b: 1 is all of it."""
    return float(crossed(ab) / crossed(aa))


def noise(aa: Tensor, ab: Tensor, bb: Tensor) -> float:
    """The cosine of two halves of b, different prompts each: the ceiling of any raw cosine."""
    half = len(bb) // 2
    first, second = bb[:half, :half].sum(), bb[half : 2 * half, half : 2 * half].sum()
    return float(bb[:half, half : 2 * half].sum() / (first * second).sqrt())


Measure = Callable[[Tensor, Tensor, Tensor], float]


def estimate(measure: Measure, gram: Tensor, a: int, b: int) -> Estimate:
    """A measure of two gradients with its jackknife interval.

    Args:
        measure: :func:`cosine`, :func:`length` or :func:`projection`.
        gram: Products (K, C, K, C), float64, of K gradients in C chunks each.
        a: Which gradient it is compared with.
        b: Which one is judged.
    """
    return _jackknife(partial(_measured, measure, gram, a, b), gram.shape[1])


def lead(measure: Measure, gram: Tensor, a: int, b: int, rival: int) -> Estimate:
    """How much larger the measure of a and b is than that of a and its rival, chunk by chunk the same prompts."""

    def difference(rows: Tensor) -> float:
        return _measured(measure, gram, a, b, rows) - _measured(measure, gram, a, rival, rows)

    return _jackknife(difference, gram.shape[1])


def _measured(measure: Measure, gram: Tensor, a: int, b: int, rows: Tensor) -> float:
    def products(x: int, y: int) -> Tensor:
        return gram[x][rows][:, y][:, rows]

    return measure(products(a, a), products(a, b), products(b, b))


def _jackknife(of: Callable[[Tensor], float], count: int) -> Estimate:
    everything = torch.arange(count)
    left_out = torch.tensor([of(everything[everything != i]) for i in range(count)], dtype=torch.float64)
    variance = (count - 1) / count * (left_out - left_out.mean()).square().sum()
    return Estimate(of(everything), NORMAL * float(variance.sqrt()))
