"""The published rules of down-sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.downsampling.base import DownSampling


class MaxVariance(DownSampling):
    """Keep the samples whose rewards vary most: of right and wrong ones as near to half each as there are.

    They are the k best and n - k worst for the k with the largest variance (PODS, arXiv 2504.13818, lemma 3.1).

    Args:
        num_samples: Samples to draw per prompt, at least ``sampling.num_generations``.
    """

    def ranking(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
        """The k best and the worst, for the best k; of equal variances the k nearest to the half."""
        order = rewards.argsort(stable=True)
        count = min(count, len(order))
        splits = sorted(range(count + 1), key=lambda k: abs(2 * k - count))
        kept = [torch.cat([order[len(order) - k :], order[: count - k]]) for k in splits]
        spreads = torch.stack([(rewards[subset] - rewards[subset].mean()).norm() for subset in kept])
        # equal are those that differ by no more than float32 rounds rewards, which were added up in it
        rounding = torch.finfo(torch.float32).eps * rewards.norm()
        return kept[int((spreads >= spreads.max() - rounding).int().argmax())]


class MaxReward(DownSampling):
    """Keep the samples of the highest rewards (max-reward in PODS, arXiv 2504.13818; the best n in Sparrow's appendix).

    Args:
        num_samples: Samples to draw per prompt, at least ``sampling.num_generations``.
    """

    def ranking(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
        """The best first."""
        return rewards.argsort(descending=True, stable=True)


class Shortest(DownSampling):
    """Keep the shortest samples, right or wrong (GFPO, arXiv 2508.09726).

    Args:
        num_samples: Samples to draw per prompt, at least ``sampling.num_generations``.
    """

    def ranking(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
        """The shortest first."""
        return lengths.argsort(stable=True)
