"""What the ranks of a run tell each other beside gradients."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from sparse_rl_lightning.advantages import ScaleRewards, group_advantages


def gather_to_zero(value: Any, world_size: int) -> list[Any]:
    """Every rank's value on rank zero, an empty list on the others; one rank gets its own back."""
    if world_size == 1:
        return [value]
    is_zero = torch.distributed.get_rank() == 0
    values: list[Any] | None = [None] * world_size if is_zero else None
    torch.distributed.gather_object(value, values)
    return values or []


def advantages_of_rank(
    rewards: Tensor, num_generations: int, scale_rewards: ScaleRewards, trainer: Trainer | None
) -> Tensor:
    """Advantages (B,) of this rank's rewards; a deviation over the batch is that of all ranks.

    Args:
        rewards: (B,), as many on every rank.
        num_generations: Samples per prompt.
        scale_rewards: As for :func:`~sparse_rl_lightning.advantages.group_advantages`.
        trainer: Of several ranks, None for one.
    """
    if trainer is None or scale_rewards != "batch":
        return group_advantages(rewards, num_generations, scale_rewards)
    everyone: Any = trainer.strategy.all_gather(rewards)  # (ranks, B)
    advantages = group_advantages(everyone.flatten(), num_generations, scale_rewards)
    return advantages.view(everyone.shape)[trainer.global_rank]
