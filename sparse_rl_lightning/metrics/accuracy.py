"""Accuracy over several samples per problem: unbiased pass@k, and confidence intervals.

Letters: P problems, N samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from sparse_rl_lightning.errors import UserError

Z95 = 1.959963984540054
"""Standard deviations on each side that enclose 95 % of a normal distribution."""


@dataclass(frozen=True)
class Accuracy:
    """The accuracy on some problems; ``low`` and ``high`` bound 95 % confidence over the problems."""

    num_problems: int
    num_samples: int
    mean: float  # Avg@N, which is Pass@1
    low: float
    high: float
    pass_at: dict[int, float] = field(default_factory=dict)  # pass@k by k


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """The probability that at least one of k samples is right, unbiased: 1 - C(N - c, k) / C(N, k) (arXiv 2107.03374).

    Args:
        correct: Verdicts (P, N), bool.
        k: Number of samples, between 1 and N.

    Returns:
        The probabilities (P,) float64.

    Raises:
        ValueError: If k is out of range.
    """
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise UserError(f"k must be between 1 and the {num_samples} samples of a problem, got k={k}.")
    wrong = num_samples - correct.sum(dim=1, dtype=torch.float64)  # (P,)
    draws = torch.arange(k, dtype=torch.float64, device=correct.device)
    none_right = ((wrong[:, None] - draws).clamp(min=0) / (num_samples - draws)).prod(dim=1)
    return 1 - none_right


def confidence_interval(scores: Tensor, problems: Tensor | None = None) -> tuple[float, float]:
    """Bounds of 95 % confidence for the mean of scores between 0 and 1: Wilson's interval over the problems.

    With one sample per problem it is Wilson's interval of a proportion. With several, where the scores (P,) are shares
    of right samples, the number of trials is derived from the spread between problems, but never below their number; so
    it has a width at 0 and 1 too.

    Args:
        scores: Scores (P,), at least one.
        problems: Numbers (P,) int64, the same for rows that are copies of one problem, such as AIME's 30 written down
            32 times: these are not independent, and count as one. None if all differ. Problems with unequally many
            copies count as the number of equal ones that would be as sure, 1 / sum of squared shares.
    """
    scores = scores.double()
    if problems is None:
        problems = torch.arange(len(scores), device=scores.device)
    _, places, sizes = torch.unique(problems, return_inverse=True, return_counts=True)
    means = scores.new_zeros(len(sizes)).index_add_(0, places, scores) / sizes
    mean, shares = scores.mean(), sizes.double() / len(scores)
    spread = (shares * (means - mean) ** 2).sum()
    return _wilson(len(scores) ** 2 / float((sizes**2).sum()), float(mean), float(spread))


class ConfidenceInterval(Metric):
    """The bounds of ``confidence_interval`` over all batches and ranks; NaN if there was no problem."""

    full_state_update = False
    scores: Any  # tensors (P,), or one
    problems: Any

    def __init__(self) -> None:
        super().__init__()
        for name in ("scores", "problems"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, problems: Tensor) -> None:
        """Add rows, P or none, by their shares (P,) of right samples, and the numbers (P,) of their problems."""
        self.scores.append(scores.double())
        self.problems.append(problems)

    def compute(self) -> tuple[float, float]:
        """Both bounds."""
        scores = dim_zero_cat(self.scores) if len(self.scores) else torch.zeros(0)
        return confidence_interval(scores, dim_zero_cat(self.problems)) if len(scores) else (math.nan, math.nan)


def _wilson(count: float, mean: float, spread: float) -> tuple[float, float]:
    trials = max(count, count * mean * (1 - mean) / spread) if spread > 1e-12 else count
    center = (mean + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    half = Z95 * math.sqrt(mean * (1 - mean) / trials + Z95**2 / (4 * trials**2)) / (1 + Z95**2 / trials)
    return min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half))  # rounding may pass 0 and 1


def accuracy(correct: Tensor, problems: Tensor | None = None) -> Accuracy:
    """Avg@N with its interval, and pass@k for k = 1, 2, 4, ... and N, from verdicts (P, N).

    Args:
        correct: Verdicts (P, N), bool.
        problems: Numbers (P,) of the rows' problems, as for :func:`confidence_interval`.

    Raises:
        ValueError: If there is no problem or no sample.
    """
    if correct.numel() == 0:
        raise UserError(f"accuracy needs at least one problem and one sample, got shape {tuple(correct.shape)}.")
    num_problems, num_samples = correct.shape
    scores = correct.double().mean(dim=1)
    steps = {2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples}
    pass_at = {k: float(pass_at_k(correct, k).mean()) for k in sorted(steps)}
    return Accuracy(num_problems, num_samples, float(scores.mean()), *confidence_interval(scores, problems), pass_at)


def mean_accuracy(parts: Sequence[Accuracy]) -> tuple[float, float, float]:
    """The unweighted mean over at least one benchmark, and bounds of 95 % confidence from theirs."""
    mean = sum(benchmark.mean for benchmark in parts) / len(parts)
    below = math.sqrt(sum((benchmark.mean - benchmark.low) ** 2 for benchmark in parts)) / len(parts)
    above = math.sqrt(sum((benchmark.high - benchmark.mean) ** 2 for benchmark in parts)) / len(parts)
    return mean, max(0.0, mean - below), min(1.0, mean + above)
