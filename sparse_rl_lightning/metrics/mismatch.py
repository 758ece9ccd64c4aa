"""The distance between the sparse policy that samples and the dense policy that learns, over many rollouts.

One rollout's numbers, with more of them, are :func:`sparse_rl_lightning.corrections.mismatch_statistics`; the
classes here agree with it and add up over updates and ranks. Both read the completions before any rejection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from sparse_rl_lightning.corrections import MAX_LOG_RATIO


class MismatchKL(Metric):
    """KL(sparse || dense) per token, estimated on the sampler's own tokens: ``k1`` unbiased, ``k3`` never negative."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    k1: Tensor
    k3: Tensor
    tokens: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("k1", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("k3", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Add log xi (B, T) of :func:`~sparse_rl_lightning.corrections.consistency_log_ratio` with its mask (B, T)."""
        log_xi = log_ratio.detach()[mask].double()
        self.k1 -= log_xi.sum()
        self.k3 += (torch.expm1(log_xi.clamp(max=MAX_LOG_RATIO)) - log_xi).sum()
        self.tokens += len(log_xi)

    def compute(self) -> dict[str, Tensor]:
        """``k1`` and ``k3`` in nats per token; 0 before the first token."""
        tokens = self.tokens.clamp(min=1)
        return {"k1": self.k1 / tokens, "k3": self.k3 / tokens}


class EffectiveSampleSize(Metric):
    """Effective sample size of the weights xi as a share of the tokens: (sum xi)^2 / (n sum xi^2), 1 for a match."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    weights: Tensor
    squares: Tensor
    tokens: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("weights", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("squares", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Add log xi (B, T) of :func:`~sparse_rl_lightning.corrections.consistency_log_ratio` with its mask (B, T)."""
        xi = log_ratio.detach()[mask].double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        self.weights += xi.sum()
        self.squares += (xi**2).sum()
        self.tokens += len(xi)

    def compute(self) -> Tensor:
        """A number in (0, 1]; 1 before the first token."""
        size = self.weights**2 / (self.tokens * self.squares)
        return torch.where(self.tokens > 0, size, torch.ones_like(size))
