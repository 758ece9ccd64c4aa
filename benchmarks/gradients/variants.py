"""What each correction makes of a rollout's gradient: tokens left out, factors, and the policy that is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparse_rl_lightning.corrections import (
    consistency_log_ratio,
    importance_weights,
    mask_tokens,
    normalize_weights,
    reject_sequences,
)
from sparse_rl_lightning.learner.loss import GRPOLoss
from sparse_rl_lightning.records import Rollout

Correct = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From log xi (B, T) and the completion mask (B, T) to tokens kept (B, T) and weights (B, T), None for 1."""


@dataclass(frozen=True)
class Variant:
    """A correction, as the loss sees it; ``replays`` trains the sampler's own policy instead of the dense one."""

    name: str
    correct: Correct
    loss: GRPOLoss = field(default_factory=GRPOLoss)
    replays: bool = False

    def apply(self, part: Rollout, logprobs: Tensor) -> Tensor:
        """The loss () of a micro-batch at the very policy that drew it: every staleness ratio is 1."""
        old = logprobs.detach()
        assert part.old_logprobs is not None
        mask = part.completion_mask
        keep, weights = self.correct(consistency_log_ratio(part.old_logprobs, part.sampler_logprobs, mask), mask)
        own = replace(part, old_logprobs=old, keep=keep, weights=weights)
        return self.loss(own, logprobs, self.loss.denominators(own)).loss


def _naive(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, None]:
    return mask, None


def _rejection(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, None]:
    return mask & reject_sequences(log_ratio, mask)[:, None], None


def _weights(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return mask, importance_weights(log_ratio, mask, clip_max=1.5)


def _sparse_rl(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return _rejection(log_ratio, mask)[0], importance_weights(log_ratio, mask, clip_max=1.5)


def _unbounded(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return _rejection(log_ratio, mask)[0], importance_weights(log_ratio, mask)


def _official(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    keep = _rejection(log_ratio, mask)[0] & mask_tokens(log_ratio, mask, 0.5, 1.5)
    weights = importance_weights(log_ratio, mask, "token_mask", clip_min=0.5, clip_max=1.5)
    return keep, normalize_weights(weights, importance_weights(log_ratio, mask, clip_max=1.5), mask)


NAIVE = Variant("naive", _naive)
REPLAY = Variant("replay", _naive, replays=True)
VARIANTS = (
    NAIVE,
    Variant("rejection only", _rejection),
    Variant("reweighting only, ξ ≤ 1.5", _weights),
    Variant("Sparse-RL, ξ ≤ 1.5", _sparse_rl),
    Variant("Sparse-RL, unbounded ξ", _unbounded),
    Variant("Sparse-RL (official)", _official, GRPOLoss(denominator="kept_tokens")),
    REPLAY,
)


def gradients(variants: tuple[Variant, ...], part: Rollout, logprobs: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradient (number of weights,) of every variant, from one forward pass."""
    found = []
    for variant in variants:
        own = torch.autograd.grad(variant.apply(part, logprobs), weights, retain_graph=variant is not variants[-1])
        found.append(torch.cat([gradient.flatten() for gradient in own]))
    return found
