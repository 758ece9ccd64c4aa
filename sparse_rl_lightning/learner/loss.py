"""The loss of a micro-batch as its share of one optimiser step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.corrections import normalize_weights, off_policy_sequences
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.losses import (
    Denominator,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    aggregate,
    check_options,
    count_items,
    kl_penalty,
    policy_loss,
)
from sparse_rl_lightning.ranges import check_number
from sparse_rl_lightning.records import LossOutput, Rollout


@dataclass(frozen=True)
class Items:
    """What the sums over all micro-batches of one optimiser step are divided by, None where each divides by its own."""

    policy: Tensor | None  # ()
    penalty: Tensor | None  # (), of the KL term
    everything: Tensor | None = None  # (), of a policy term from which nothing is rejected

    def summed(self, add: Callable[[Tensor], Tensor]) -> Items:
        """The same counts, each summed over all ranks by ``add``, in one call."""
        names = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if not names:
            return self
        totals = add(torch.stack([getattr(self, name) for name in names]))
        return Items(**{"policy": None, "penalty": None, **dict(zip(names, totals.unbind(), strict=True))})


@dataclass(frozen=True)
class Objective:
    """Policy term plus ``beta`` times KL term, both aggregated alike; arguments as in SparseGRPO.

    Raises:
        ValueError: If a number is not finite or out of range, or an option is unknown.
    """

    loss_type: LossType
    importance_sampling_level: ImportanceSamplingLevel
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    denominator: Denominator
    beta: float
    kl_estimator: KLEstimator
    kl_on: Literal["completion", "kept"]
    max_completion_length: int
    mask_truncated_completions: bool
    off_policy_delta: float | None = None  # of off-policy sequence masking, set by the callback OPSM
    off_policy_reference: Literal["old", "sampler"] = "old"

    def __post_init__(self) -> None:
        check_number("beta", self.beta, least=0)
        check_options(self.loss_type, self.importance_sampling_level, self.epsilon, self.epsilon_high, self.delta)
        if self.kl_on not in ("completion", "kept"):
            raise UserError(f"kl_on must be 'completion' or 'kept', got kl_on={self.kl_on!r}.")

    def items(self, window: Rollout) -> Items:
        """The counts of one optimiser step; ``window`` holds all its sequences."""
        if self.loss_type == "bnpo":  # normalises every micro-batch by itself
            return Items(None, None)
        mask = self.mask(window)
        kept = window.keep if self.kl_on == "kept" else None
        return Items(
            policy=count_items(mask, window.keep, self.loss_type, self.denominator),
            penalty=count_items(mask, kept, self.loss_type, self.denominator) if self.beta > 0 else None,
            everything=count_items(mask, None, self.loss_type, self.denominator),
        )

    def __call__(self, part: Rollout, items: Items, logprobs: Tensor) -> LossOutput:
        """The part's contribution: contributions of all parts of an optimiser step add up to the step's loss.

        Args:
            part: The micro-batch.
            items: Of the optimiser step it belongs to.
            logprobs: (B, T) of the learner, with gradient.

        Returns:
            The loss with gradient, and metrics with TRL's names.
        """
        assert part.old_logprobs is not None
        assert part.advantages is not None
        mask = self.mask(part)
        output = policy_loss(
            logprobs,
            part.old_logprobs,
            part.advantages,
            mask,
            keep=self._keep(part, mask, logprobs),
            weights=self._weights(part, mask),
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            denominator=self.denominator,
            max_completion_length=self.max_completion_length,
            num_items=items.policy,
        )
        if self.beta > 0:
            output = self._with_penalty(output, part, items, mask, logprobs)
        return output

    def mask(self, part: Rollout) -> Tensor:
        """(B, T) bool: the tokens the loss speaks of."""
        if not self.mask_truncated_completions:
            return part.completion_mask
        return part.completion_mask & part.finished[:, None]

    def _with_penalty(
        self, output: LossOutput, part: Rollout, items: Items, mask: Tensor, logprobs: Tensor
    ) -> LossOutput:
        assert part.ref_logprobs is not None
        penalty = kl_penalty(logprobs, part.ref_logprobs, mask, self.kl_estimator)
        kept = part.keep if self.kl_on == "kept" else None
        term = aggregate(
            penalty, mask, kept, self.loss_type, self.denominator, self.max_completion_length, items.penalty
        )
        metrics = {**output.metrics, "kl": penalty.detach().sum() / mask.sum().clamp(min=1)}
        return LossOutput(output.loss + self.beta * term, metrics)

    def _keep(self, part: Rollout, mask: Tensor, logprobs: Tensor) -> Tensor | None:
        """What rejection left, less the sequences that the learner has moved away from; divisors ignore these."""
        if self.off_policy_delta is None:
            return part.keep
        reference = part.sparse_logprobs if self.off_policy_reference == "sampler" else part.old_logprobs
        assert reference is not None
        assert part.advantages is not None
        near = off_policy_sequences(logprobs, reference, part.advantages, mask, self.off_policy_delta)[:, None]
        return mask & near if part.keep is None else part.keep & near

    def _weights(self, part: Rollout, mask: Tensor) -> Tensor | None:
        if part.weights is None or part.weight_reference is None:
            return part.weights
        return normalize_weights(part.weights, part.weight_reference, mask)
