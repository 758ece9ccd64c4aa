"""The clipped objective of drawn evictions, beside that of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.losses import MAX_LOG_RATIO, Denominator, LossType, aggregate, clipped_objective
from sparse_rl_lightning.records import LossOutput


def eviction_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    steps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    denominator: Denominator = "all",
    max_completion_length: int | None = None,
    num_items: int | float | Tensor | None = None,
) -> LossOutput:
    """Minus the clipped objective min(w A, clip(w) A) of drawn evictions, w of each head's draw at each event.

    A draw counts like a token of its sequence: the sums have the divisors of the tokens, so that tokens and draws
    together are the gradient of the expected reward (arXiv 2604.18002). One after which no token was sampled does not
    count: nothing that the policy did has seen it.

    Args:
        logprobs: Log-probabilities (B, E, L, H) of the draws, with gradient.
        old_logprobs: Log-probabilities (B, E, L, H) under the policy before the update.
        steps: Tokens (B, E), int64, fed before each event, -1 for none.
        advantages: Advantages (B,).
        mask: Completion tokens (B, T), bool.
        loss_type: Way to aggregate, as in ``policy_loss``; "cispo" is aggregated like it and clipped as usual.
        epsilon: Lower clip of w.
        epsilon_high: Upper clip of w, None for ``epsilon``; ignored by "cispo", where it means something else.
        delta: Upper bound of the unclipped w too, None for none.
        denominator: Effect of rejection on the divisor; no draw is rejected.
        max_completion_length: Length L of dr_grpo.
        num_items: Number of items in the whole optimization step, None for those in this batch.

    Returns:
        The loss, and metrics over the draws: ``draws/logprob``, ``draws/ratio_max`` and ``draws/clip_ratio``.
    """
    last = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).amax(dim=1, keepdim=True)
    counted = ((steps >= 0) & (steps < last))[:, :, None, None].expand_as(logprobs)
    log_ratio = torch.where(counted, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    side = advantages[:, None, None, None]
    high = None if loss_type == "cispo" else epsilon_high
    clipped = clipped_objective(ratio, side, epsilon, high, delta)
    objective = torch.where(counted, clipped, 0.0).sum(dim=(1, 2, 3))  # (B,)
    # at any token that counts: the next one fed may be of a tool's answer, which does not
    per_token = objective.new_zeros(mask.shape).scatter(1, last, objective[:, None])
    loss = aggregate(-per_token, mask, None, loss_type, denominator, max_completion_length, num_items)
    beyond = ((ratio < 1 - epsilon) & (side < 0)) | ((ratio > 1 + (epsilon if high is None else high)) & (side > 0))
    total = counted.sum().clamp(min=1)
    metrics = {
        "draws/logprob": torch.where(counted, logprobs, 0.0).detach().sum() / total,
        "draws/ratio_max": torch.where(counted, ratio.detach(), 0.0).max() if ratio.numel() else ratio.new_zeros(()),
        "draws/clip_ratio": (beyond & counted).sum() / total,
    }
    return LossOutput(loss, metrics)
