"""LogSketch: quantiles of many numbers from a histogram of fixed size, within a relative error (DDSketch).

Counts are whole numbers and add up, so a sketch of several ranks or rollouts is exactly the sketch of all their numbers
together (Masson, Rim and Lee 2019, arXiv 1908.10693).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogSketch:
    """Buckets of equal width on a logarithmic axis from 1 down to ``smallest``, and one for everything below.

    A quantile read from the counts differs from the exact one of the same numbers (numpy's, interpolated between two
    neighbours) by at most ``accuracy`` times it, plus ``smallest``.

    Args:
        accuracy: Largest relative error, in (0, 1).
        smallest: Numbers up to this count as 0, in (0, 1).

    Raises:
        ValueError: If one is out of range.
    """

    accuracy: float = 0.005
    smallest: float = 1e-7

    def __post_init__(self) -> None:
        for name in ("accuracy", "smallest"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {name}={getattr(self, name)}.")

    @property
    def growth(self) -> float:
        """How many times the lower end of a bucket its upper end is."""
        return (1 + self.accuracy) / (1 - self.accuracy)

    @property
    def num_buckets(self) -> int:
        """Buckets, the one for 0 included: the first holds the largest numbers."""
        return math.ceil(-math.log(self.smallest) / math.log(self.growth)) + 1

    def bucket(self, numbers: Tensor) -> Tensor:
        """The bucket, int64, of each number in [0, 1]; others go to the nearest."""
        steps = (-numbers.double().clamp(min=self.smallest).log() / math.log(self.growth)).floor().long()
        steps = steps.clamp(0, self.num_buckets - 2)
        return torch.where(numbers <= self.smallest, self.num_buckets - 1, steps)

    def numbers(self, device: torch.device | str = "cpu") -> Tensor:
        """(buckets,) float64: what each bucket stands for, no number in it being further away than ``accuracy``."""
        steps = torch.arange(self.num_buckets - 1, dtype=torch.float64, device=device)
        middle = 2 / (self.growth + 1) * self.growth**-steps
        return torch.cat([middle, middle.new_zeros(1)])

    def from_the_top(self, counts: Tensor, share: float) -> Tensor:
        """The number that this share of all numbers exceeds.

        Args:
            counts: (..., buckets) int64, how many numbers fell into each bucket.
            share: In [0, 1]; 0.05 is the 95th percentile.

        Returns:
            (...) float64, NaN where nothing was counted.
        """
        total = counts.sum(dim=-1, keepdim=True)
        rank = share * (total - 1).clamp(min=0).double()
        neighbours = torch.cat([rank.floor(), rank.ceil()], dim=-1).long()
        found = torch.searchsorted(counts.cumsum(dim=-1), neighbours, right=True)
        first, second = self.numbers(counts.device)[found.clamp(max=self.num_buckets - 1)].unbind(dim=-1)
        between = torch.lerp(first, second, (rank - rank.floor()).squeeze(-1))
        return between.masked_fill(total.squeeze(-1) == 0, torch.nan)
