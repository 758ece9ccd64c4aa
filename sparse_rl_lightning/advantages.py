"""Advantages from rewards: each sample against the other samples of its prompt, or as a class of one's own says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_choice

ScaleRewards = Literal["group", "batch", "none"]
SCALES = get_args(ScaleRewards)

_FLOAT_NOISE = 1e-6
"""Relative difference below which the rewards of a group differ by rounding only."""


class AdvantageEstimator(ABC):
    """How rewards become advantages: a configuration names a subclass at ``model.advantage_estimator``."""

    over_batch: bool = False
    """Whether prompts are compared with each other: then it sees the rewards of all ranks."""

    @abstractmethod
    def estimate(self, rewards: Tensor) -> Tensor:
        """Advantages (prompts, num_generations) of rewards, float64; a reward is NaN where no function applied."""

    def __call__(self, rewards: Tensor, num_generations: int) -> Tensor:
        """Advantages (B,), at least float32, of rewards (B,), the samples of a prompt adjacent; 0 for a NaN reward.

        Raises:
            ValueError: If :meth:`estimate` returns another shape, or what is not finite.
        """
        groups = _groups(rewards, num_generations)
        advantages = self.estimate(groups)
        counted = torch.where(groups.isnan(), 0.0, advantages) if advantages.shape == groups.shape else None
        if counted is None or not counted.isfinite().all():
            raise UserError(
                f"{type(self).__name__}.estimate must return finite advantages {tuple(groups.shape)}, one for each "
                f"reward, got {tuple(advantages.shape)}{'' if counted is None else ' with NaN or infinity in them'}."
            )
        return counted.flatten().to(torch.promote_types(rewards.dtype, torch.float32))


def group_advantages(
    rewards: Tensor, num_generations: int, scale_rewards: ScaleRewards = "group", eps: float = 1e-6
) -> Tensor:
    """Reward minus the mean reward of the prompt's samples, divided by a standard deviation.

    Rejected samples belong here too: rejection happens later and moves no baseline, unless configured to. A NaN reward
    (a reward function that did not apply) is left out of every mean and deviation, and its advantage is 0. Groups
    whose rewards are all equal have advantage 0. Source: GRPO (arXiv 2402.03300); "none" is Dr. GRPO (arXiv
    2503.20783).

    Args:
        rewards: Rewards (B,), the samples of a prompt adjacent.
        num_generations: Samples per prompt, at least 2.
        scale_rewards: Standard deviation to divide by: of the "group", of the whole "batch", or not at all
            ("none"). Deviations are Bessel-corrected.
        eps: Number added to the standard deviation.

    Returns:
        Advantages (B,), at least float32.

    Raises:
        ValueError: If a group has fewer than 2 samples, the batch is not made of whole groups, or
            ``scale_rewards`` is unknown.
    """
    if scale_rewards not in SCALES:
        check_choice("scale_rewards", scale_rewards, ScaleRewards)
    groups = _groups(rewards, num_generations)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (nan_deviation(groups) + eps)
    elif scale_rewards == "batch":
        advantages = advantages / (nan_deviation(groups.reshape(1, -1)) + eps)
    counted = ~groups.isnan() & _informative(groups).unsqueeze(1)
    return torch.where(counted, advantages, 0.0).flatten().to(torch.promote_types(rewards.dtype, torch.float32))


def informative_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Which prompts have samples with different rewards, so that their advantages are not all 0.

    Differences that are mere rounding of a sum of rewards do not count, and neither do NaN rewards.

    Args:
        rewards: Rewards (B,), the samples of a prompt adjacent.
        num_generations: Samples per prompt, at least 2.

    Returns:
        A bool per prompt (B / num_generations,).

    Raises:
        ValueError: As :func:`group_advantages`.
    """
    return _informative(_groups(rewards, num_generations))


def most_informative(rewards: Tensor, num_generations: int, num_prompts: int) -> Tensor:
    """Dynamic sampling: groups with differing rewards first, filled up with others, in prompt order.

    Args:
        rewards: (B,), the samples of a prompt adjacent.
        num_generations: Samples per prompt, at least 2.
        num_prompts: Groups to choose.

    Returns:
        (num_prompts x num_generations,) indices of samples.
    """
    uninformative = ~informative_groups(rewards, num_generations)
    groups = uninformative.to(torch.uint8).argsort(stable=True)[:num_prompts].sort().values
    members = torch.arange(num_generations, device=groups.device)
    return (groups[:, None] * num_generations + members).flatten()


def nan_deviation(rows: Tensor) -> Tensor:
    """Bessel-corrected deviation (rows, 1) of the values that are not NaN, 0 for fewer than two of them."""
    squares = (rows - rows.nanmean(dim=1, keepdim=True)) ** 2
    count = (~rows.isnan()).sum(dim=1, keepdim=True)
    return (squares.nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def _groups(rewards: Tensor, num_generations: int) -> Tensor:
    """The rewards as (prompts, num_generations) float64."""
    if num_generations < 2:
        raise UserError(
            f"num_generations must be at least 2, because a sample is judged against the other samples of its "
            f"prompt; got num_generations={num_generations}."
        )
    if rewards.dim() != 1 or len(rewards) % num_generations:
        raise UserError(
            f"rewards must be (prompts x num_generations,) with num_generations={num_generations}, got shape "
            f"{tuple(rewards.shape)}."
        )
    return rewards.double().reshape(-1, num_generations)


def _informative(groups: Tensor) -> Tensor:
    missing = groups.isnan()
    highest = groups.masked_fill(missing, -torch.inf).amax(dim=1)
    lowest = groups.masked_fill(missing, torch.inf).amin(dim=1)
    size = groups.nan_to_num(nan=0.0).abs().amax(dim=1)
    return highest - lowest > _FLOAT_NOISE * size
