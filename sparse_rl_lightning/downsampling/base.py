"""Down-sampling: draw more samples of a prompt than are trained on, and keep those that a rule chooses.

A rule is one method. Advantages are computed among the samples kept, as in the papers below, so that a group's
advantages sum to zero whatever was dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sparse_rl_lightning.advantages import informative_groups, nan_deviation
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.text import shown


class DownSampling(ABC):
    """Draw ``num_samples`` of every prompt, and train on the ``num_generations`` that a rule chooses.

    Args:
        num_samples: Samples to draw per prompt, at least ``sampling.num_generations``.
    """

    def __init__(self, num_samples: int) -> None:
        check_number("num_samples", num_samples, least=2)
        self.num_samples = num_samples

    @abstractmethod
    def ranking(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
        """Order the samples of one prompt, those to keep first.

        Args:
            rewards: Rewards (M,), float64, none of them NaN.
            lengths: Completion tokens (M,).
            count: How many will be kept, if there are as many.

        Returns:
            Different indices (M,), or at least ``count`` of them if there are as many.
        """

    def _checked(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
        """The ranking.

        Raises:
            ValueError: If it is none of these samples.
        """
        ranking, size = torch.as_tensor(self.ranking(rewards, lengths, count)), len(rewards)
        indices = ranking.tolist()
        fits = ranking.dim() == 1 and not (ranking.is_floating_point() or ranking.dtype == torch.bool)
        if not fits or len({*indices}) < max(len(indices), min(count, size)) or not {*indices} <= {*range(size)}:
            raise UserError(
                f"rollout.downsampling: ranking of {type(self).__name__} returned {shown(indices)} for {size} samples, "
                f"of which {min(count, size)} are kept: return at least as many indices, all different, from 0 to "
                f"{size - 1}."
            )
        return ranking.to(torch.int64)

    def choose(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
        """Indices (count,), ascending, of the samples of one prompt to keep; those without a reward (NaN) come last."""
        scored = (~rewards.isnan()).nonzero().flatten()
        order = scored  # of a rule of one's own nothing is asked about no samples
        if len(scored):
            order = scored[self._checked(rewards[scored].double(), lengths[scored], count)][:count]
        rest = rewards.isnan().nonzero().flatten()
        return torch.cat([order, rest])[:count].sort().values


def down_sample(scored: ScoredRollout, rule: DownSampling | None, count: int) -> Tensor:
    """Leave ``count`` samples of each prompt in a rollout with rewards, and note in its numbers what was dropped.

    Without a rule, or if it drops none, nothing changes.

    Returns:
        The rewards of the samples kept.
    """
    drawn, rewards, lengths = scored.num_generations, scored.rollout.rewards, scored.rollout.completion_lengths
    assert rewards is not None
    if rule is None or drawn == count:
        return rewards
    groups = zip(rewards.cpu().view(-1, drawn), lengths.cpu().view(-1, drawn), strict=True)
    kept = torch.cat([number * drawn + rule.choose(*group, count) for number, group in enumerate(groups)])
    is_dropped = torch.ones(len(rewards), dtype=torch.bool)
    is_dropped[kept] = False
    dropped = is_dropped.to(rewards.device)
    scored.downsampling = {
        "downsampling/drawn/reward": rewards.nanmean(),
        "downsampling/drawn/reward_std": nan_deviation(rewards.view(-1, drawn)).mean(),
        "downsampling/drawn/frac_reward_zero_std": 1 - informative_groups(rewards, drawn).float().mean(),
        "downsampling/dropped/reward": rewards[dropped].nanmean(),
        "downsampling/dropped/mean_length": lengths[dropped].float().mean(),
    }
    scored.rollout = scored.rollout[kept.to(rewards.device)]
    scored.completions = [scored.completions[index] for index in kept.tolist()]
    if scored.conversations is not None:
        scored.conversations = [scored.conversations[index] for index in kept.tolist()]
    for table in (scored.reward_table, scored.failed):
        table |= {name: values[kept.to(values.device)] for name, values in table.items()}
    return rewards[kept.to(rewards.device)]
