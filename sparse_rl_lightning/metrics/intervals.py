"""Numbers of texts with their 95 % intervals over the problems: what is drawn for one problem resembles itself.

Where sequences are what is drawn, tokens belong to these as sequences do to problems.

Letters: N sequences or tokens, P problems.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_rl_lightning.acceptance import TAIL, percentile
from sparse_rl_lightning.metrics.accuracy import Z95, confidence_interval


class Estimate(NamedTuple):
    """A value, and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def ratio(numerators: Tensor, denominators: Tensor, problems: Tensor) -> Estimate:
    """Sum of numerators over sum of denominators, with the linearized error of a ratio of totals over problems.

    Args:
        numerators: Numbers (N,) of sequences, or of tokens, such as 1 where both caches agree.
        denominators: Numbers (N,), such as 1 for a token.
        problems: The number (N,) of each one's problem.
    """
    numbers, places = torch.unique(problems, return_inverse=True)
    count = len(numbers)
    over, under = (
        torch.zeros(count, dtype=torch.float64).index_add_(0, places, values.double())
        for values in (numerators, denominators)
    )
    value = float(over.sum() / under.sum())
    if count == 1:
        return Estimate(value, -math.inf, math.inf)
    spread = (over - value * under).square().sum() * count / (count - 1)
    error = Z95 * float(spread.sqrt() / under.sum())
    return Estimate(value, value - error, value + error)


def mean(values: Tensor, problems: Tensor) -> Estimate:
    """The mean of values (N,)."""
    return ratio(values, torch.ones(len(values)), problems)


def share(scores: Tensor, problems: Tensor) -> Estimate:
    """The mean of scores (N,) from 0 to 1, with Wilson's interval, which has a width at 0 and 1 too."""
    return Estimate(float(scores.double().mean()), *confidence_interval(scores, problems))


def tail(values: Tensor, problems: Tensor) -> Estimate:
    """The percentile of values (N,); its bounds are the percentiles at the bounds of the share of values below it."""
    value = percentile(values)
    below, low, high = mean(values < value, problems)
    around = (TAIL + bound - below for bound in (low, high))
    return Estimate(value, *(percentile(values, min(1.0, max(0.0, bound))) for bound in around))
