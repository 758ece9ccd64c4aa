"""Accuracy over several samples per problem: unbiased pass@k, and confidence intervals.

Letters: P problems, N samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchmetrics import Metric

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


def confidence_interval(scores: Tensor) -> tuple[float, float]:
    """Bounds of 95 % confidence for the mean of scores between 0 and 1: Wilson's interval over the problems.

    With one sample per problem it is Wilson's interval of a proportion. With several, where the scores (P,) are shares
    of right samples, the number of trials is derived from the spread between problems, but never below their number; so
    it has a width at 0 and 1 too.
    """
    return _wilson(len(scores), float(scores.double().mean()), float(scores.double().var(correction=0)))


class ConfidenceInterval(Metric):
    """The bounds of ``confidence_interval`` over all batches and ranks; NaN if there was no problem."""

    full_state_update = False
    sums: Tensor  # (3,) problems, scores, squared scores

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor) -> None:
        """Add problems, P or none, by their shares (P,) of right samples."""
        scores = scores.double()
        self.sums += torch.stack([scores.new_tensor(len(scores)), scores.sum(), (scores**2).sum()])

    def compute(self) -> tuple[float, float]:
        """Both bounds."""
        count, total, squares = self.sums.tolist()
        if not count:
            return math.nan, math.nan
        mean = total / count
        return _wilson(int(count), mean, max(0.0, squares / count - mean**2))


def _wilson(count: int, mean: float, spread: float) -> tuple[float, float]:
    trials = max(count, count * mean * (1 - mean) / spread) if spread > 1e-12 else count
    center = (mean + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    half = Z95 * math.sqrt(mean * (1 - mean) / trials + Z95**2 / (4 * trials**2)) / (1 + Z95**2 / trials)
    return min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half))  # rounding may pass 0 and 1


def accuracy(correct: Tensor) -> Accuracy:
    """Avg@N with its interval, and pass@k for k = 1, 2, 4, ... and N, from verdicts (P, N).

    Raises:
        ValueError: If there is no problem or no sample.
    """
    if correct.numel() == 0:
        raise UserError(f"accuracy needs at least one problem and one sample, got shape {tuple(correct.shape)}.")
    num_problems, num_samples = correct.shape
    scores = correct.double().mean(dim=1)
    steps = {2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples}
    pass_at = {k: float(pass_at_k(correct, k).mean()) for k in sorted(steps)}
    return Accuracy(num_problems, num_samples, float(scores.mean()), *confidence_interval(scores), pass_at)


def mean_accuracy(parts: Sequence[Accuracy]) -> tuple[float, float, float]:
    """The unweighted mean over at least one benchmark, and bounds of 95 % confidence from theirs."""
    mean = sum(part.mean for part in parts) / len(parts)
    below = math.sqrt(sum((part.mean - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.mean) ** 2 for part in parts)) / len(parts)
    return mean, max(0.0, mean - below), min(1.0, mean + above)
