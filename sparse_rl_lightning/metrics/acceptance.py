"""The lower tail of the acceptance by length of the sequence, over many rollouts and ranks.

Sparrow (arXiv 2606.08446, section 3.2) pools the tokens of all sequences by how long the sequence is where they stand,
and holds the 5th percentile of every such bin; the mean says little, because most tokens are untouched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from sparse_rl_lightning.acceptance import NEAR_ONE, sampled_acceptance
from sparse_rl_lightning.metrics.sketch import LogSketch

BIN_SIZE = 2000
NUM_BINS = 20


class _Tail(Metric):
    """What both classes count."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    counts: Tensor
    total: Tensor
    near_one: Tensor

    def __init__(
        self,
        bin_size: int = BIN_SIZE,
        num_bins: int = NUM_BINS,
        quantile: float = 0.05,
        accuracy: float = 0.005,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if bin_size < 1 or num_bins < 1:
            raise ValueError(
                f"bin_size and num_bins must be at least 1, got bin_size={bin_size} and num_bins={num_bins}."
            )
        if not 0 <= quantile <= 1:
            raise ValueError(f"quantile must lie between 0 and 1, got quantile={quantile}.")
        self.bin_size, self.num_bins, self.quantile = bin_size, num_bins, quantile
        self.sketch = LogSketch(accuracy)  # of the total variation, 1 - acceptance
        self.add_state("counts", torch.zeros(num_bins, self.sketch.num_buckets, dtype=torch.int64), "sum")
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("near_one", torch.zeros((), dtype=torch.int64), "sum")

    @property
    def bin_names(self) -> list[str]:
        """``0-2000``, ``2000-4000``, ..., the last without an end, ``38000+``."""
        starts = [number * self.bin_size for number in range(self.num_bins)]
        return [f"{start}-{start + self.bin_size}" for start in starts[:-1]] + [f"{starts[-1]}+"]

    def compute(self) -> dict[str, Tensor]:
        """What has been seen so far; NaN where nothing was.

        Returns:
            ``tail`` (bins,) the quantile of each length bin, ``tokens`` (bins,) how many tokens it is of; ``tail_all``,
            ``mean`` and ``near_one`` (the share above 0.999) of all tokens together.
        """
        tokens = self.counts.sum(dim=-1)
        return {
            "tail": 1 - self.sketch.from_the_top(self.counts, self.quantile),
            "tokens": tokens,
            "tail_all": 1 - self.sketch.from_the_top(self.counts.sum(dim=0), self.quantile),
            "mean": self.total / tokens.sum(),
            "near_one": self.near_one / tokens.sum(),
        }

    def _add(self, acceptance: Tensor, mask: Tensor) -> None:
        values = acceptance.detach()[mask].double()
        if not bool(values.isfinite().all()):
            raise ValueError("The acceptance of some tokens is not finite: look for NaN in the log-probabilities.")
        bins = (mask.nonzero()[:, 1] // self.bin_size).clamp(max=self.num_bins - 1)
        places = bins * self.sketch.num_buckets + self.sketch.bucket(1 - values)
        self.counts += torch.bincount(places, minlength=self.counts.numel()).view_as(self.counts)
        self.total += values.sum()
        self.near_one += (values > NEAR_ONE).sum()


class AcceptanceTail(_Tail):
    """Low percentile of the acceptance by length bin, its mean, and the share of tokens above 0.999.

    A token's length is the number of tokens before it, prompt included. The percentile is read from a histogram of
    fixed size: 1 - percentile is off by at most 0.5 % of itself. Feed one instance the lower and another the upper
    bounds of :func:`~sparse_rl_lightning.acceptance.acceptance_bounds`, or one the exact values.

    Args:
        bin_size: Tokens per length bin.
        num_bins: Bins; the last has no end.
        quantile: Which one, 0.05 for the 5th percentile.
        accuracy: Largest relative error of 1 - percentile.
        **kwargs: Of ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is out of range.
    """

    def update(self, acceptance: Tensor, mask: Tensor) -> None:
        """Add the acceptance (B, T) at the tokens of the completion mask (B, T).

        Raises:
            ValueError: If a value is not finite.
        """
        self._add(acceptance, mask)


class SampledAcceptanceTail(_Tail):
    """The same statistics of min(1, dense / sparse probability) of the tokens drawn: another quantity but for its mean.

    Args:
        bin_size: Tokens per length bin.
        num_bins: Bins; the last has no end.
        quantile: Which one, 0.05 for the 5th percentile.
        accuracy: Largest relative error of 1 - percentile.
        **kwargs: Of ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is out of range.
    """

    def update(self, dense_logprobs: Tensor, sparse_logprobs: Tensor, mask: Tensor) -> None:
        """Add the drawn tokens' log-probabilities (B, T) under both policies, at the completion mask (B, T).

        Raises:
            ValueError: If a value is not finite.
        """
        self._add(sampled_acceptance(dense_logprobs, sparse_logprobs), mask)
