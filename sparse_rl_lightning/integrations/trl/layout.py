"""Two layouts of the same sequences: TRL's left-padded prompts before right-padded completions, and a Rollout's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_rl_lightning.records import Rollout


class Drawn(NamedTuple):
    """One sequence of a rollout, in a list that TRL shuffles and splits with its tensors."""

    rollout: Rollout
    row: int


def rows_of(rollout: Rollout) -> list[Drawn]:
    """All sequences of a rollout, one by one."""
    return [Drawn(rollout, row) for row in range(len(rollout))]


def together(drawn: Sequence[Drawn]) -> Rollout:
    """These sequences of one rollout, in this order."""
    rollout = drawn[0].rollout
    assert all(one.rollout is rollout for one in drawn), "TRL trains on one generation batch at a time"
    return rollout[torch.tensor([one.row for one in drawn], device=rollout.sequences.device)]


def by_completion(values: Tensor, rollout: Rollout, width: int) -> Tensor:
    """Values (B, T) at tokens of the sequences as TRL has them, (B, width) by place in the completion; 0 elsewhere."""
    index = rollout.prompt_lengths[:, None] + torch.arange(width, device=values.device)
    inside = index < values.shape[1]
    index = index.clamp(max=values.shape[1] - 1)
    inside &= rollout.completion_mask.gather(1, index)
    return torch.where(inside, values.gather(1, index), 0)


def by_token(values: Tensor, rollout: Rollout) -> Tensor:
    """Values (B, C) by place in the completion as a rollout has them, (B, T) at the tokens; 0 elsewhere."""
    index = torch.arange(rollout.sequences.shape[1], device=values.device) - rollout.prompt_lengths[:, None]
    found = values.gather(1, index.clamp(0, values.shape[1] - 1))
    return torch.where(rollout.completion_mask, found, torch.zeros_like(found))


def grouped(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """The prompts without their repeats, and the number of samples of each.

    TRL repeats a prompt for each of its samples, and hands a process any piece of that; a prompt that is read once for
    several samples saves time. The order stays: a prompt's samples are adjacent.
    """
    runs = [(list(prompt), len(list(same))) for prompt, same in groupby(list(ids) for ids in prompts)]
    samples = math.gcd(*(count for _, count in runs))
    return [prompt for prompt, count in runs for _ in range(count // samples)], samples
