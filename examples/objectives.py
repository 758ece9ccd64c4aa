"""Losses and advantages of one's own, each a few lines: DPPO and SAPO, RLOO and REINFORCE++.

    sparse-rl fit --config configs/quickstart.yaml --model.loss=examples.objectives.SAPO

docs/own_correction.md says what a loss sees, and how it is tried and reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.advantages import nan_deviation
from sparse_rl_lightning.learner.loss import Denominators
from sparse_rl_lightning.modules import AdvantageEstimator, Loss
from sparse_rl_lightning.records import LossOutput, Rollout


class DPPO(Loss):
    """A token counts by its ratio to the sampler, unless its probability has moved too far already (arXiv 2602.04879).

    Too far is an absolute difference, which a ratio is not: a rare token may become ten times as likely.

    Args:
        delta: Largest difference between the learner's probability of a token and the sampler's.
        two_sided: Leave a token out on the other side too, where the step would bring it back (prime-rl's IPO, with
            ``delta=0.3``).
    """

    corrects = True  # the ratio is to the sampler with its compressed cache

    def __init__(self, delta: float = 0.2, two_sided: bool = False) -> None:
        self.delta, self.two_sided = delta, two_sided

    def __call__(self, micro_batch: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        """Minus ratio x advantage, where the token is near."""
        sampler, advantages = micro_batch.sparse_logprobs, micro_batch.advantages[:, None]
        moved = (logprobs.exp() - sampler.exp()).detach()
        further = moved.abs() if self.two_sided else moved * advantages.sign()
        ratio = (logprobs - sampler).clamp(max=20).exp()
        terms = torch.where(further <= self.delta, -ratio * advantages, 0.0)
        output = self.token_mean(terms, micro_batch, denominators)
        output.metrics["dppo/left_out"] = (further > self.delta)[micro_batch.completion_mask].float().mean()
        return output


class SAPO(Loss):
    """A soft gate in place of the clip: 4 / t x sigmoid(t (ratio - 1)) x advantage (arXiv 2511.20347).

    Args:
        temperature: Sharpness t of the gate of good samples.
        temperature_negative: That of bad samples.
    """

    def __init__(self, temperature: float = 1.0, temperature_negative: float = 1.05) -> None:
        self.temperature, self.temperature_negative = temperature, temperature_negative

    def __call__(self, micro_batch: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        """Minus gate x advantage."""
        advantages = micro_batch.advantages[:, None]
        sharpness = torch.where(advantages > 0, self.temperature, self.temperature_negative)
        ratio = (logprobs - micro_batch.old_logprobs).clamp(max=20).exp()
        gate = 4 / sharpness * torch.sigmoid(sharpness * (ratio - 1))
        return self.token_mean(-gate * advantages, micro_batch, denominators)


class RLOO(AdvantageEstimator):
    """The reward minus the mean of the *other* samples of its prompt (arXiv 2402.14740)."""

    def estimate(self, rewards: Tensor) -> Tensor:
        """Advantages (prompts, num_generations)."""
        others = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1
        mean_of_others = (rewards.nansum(dim=1, keepdim=True) - rewards) / others.clamp(min=1)
        return torch.where(others > 0, rewards - mean_of_others, 0.0)


class ReinforcePlusPlus(AdvantageEstimator):
    """The reward minus the mean of its prompt, divided by the deviation of all prompts (arXiv 2501.03262, baseline)."""

    over_batch = True

    def estimate(self, rewards: Tensor) -> Tensor:
        """Advantages (prompts, num_generations)."""
        centered = rewards - rewards.nanmean(dim=1, keepdim=True)
        return centered / (nan_deviation(centered.reshape(1, -1)) + 1e-8)
