"""The loss of a micro-batch as its share of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparse_rl_lightning.corrections import normalize_weights, off_policy_sequences
from sparse_rl_lightning.losses import (
    Denominator,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    aggregate,
    count_items,
    kl_penalty,
    policy_loss,
)
from sparse_rl_lightning.types import LossOutput, Rollout


@dataclass(frozen=True)
class Objective:
    """Policy term plus ``beta`` times KL term, both aggregated alike; arguments as in SparseGRPO.

    Raises:
        ValueError: If ``beta`` is negative or an option is unknown.
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
        if self.beta < 0:
            raise ValueError(f"beta must be 0 or more, got beta={self.beta}.")
        if self.kl_on not in ("completion", "kept"):
            raise ValueError(f"kl_on must be 'completion' or 'kept', got kl_on={self.kl_on!r}.")

    def __call__(self, part: Rollout, window: Rollout, logprobs: Tensor) -> LossOutput:
        """The part's contribution: contributions of all parts of the window add up to the window's loss.

        Args:
            part: The micro-batch.
            window: All sequences of the optimiser step, the micro-batch included.
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
            num_items=self._items(window, window.keep),
        )
        if self.beta > 0:
            output = self._with_penalty(output, part, window, mask, logprobs)
        return output

    def mask(self, part: Rollout) -> Tensor:
        """(B, T) bool: the tokens the loss speaks of."""
        if not self.mask_truncated_completions:
            return part.completion_mask
        return part.completion_mask & part.finished[:, None]

    def _with_penalty(
        self, output: LossOutput, part: Rollout, window: Rollout, mask: Tensor, logprobs: Tensor
    ) -> LossOutput:
        assert part.ref_logprobs is not None
        penalty = kl_penalty(logprobs, part.ref_logprobs, mask, self.kl_estimator)
        kept, window_kept = (part.keep, window.keep) if self.kl_on == "kept" else (None, None)
        items = self._items(window, window_kept)
        term = aggregate(penalty, mask, kept, self.loss_type, self.denominator, self.max_completion_length, items)
        metrics = {**output.metrics, "kl": penalty.detach().sum() / mask.sum().clamp(min=1)}
        return LossOutput(output.loss + self.beta * term, metrics)

    def _items(self, window: Rollout, keep: Tensor | None) -> Tensor | None:
        """What the sums of all micro-batches are divided by; bnpo normalises every micro-batch by itself."""
        if self.loss_type == "bnpo":
            return None
        return count_items(self.mask(window), keep, self.loss_type, self.denominator)

    def _keep(self, part: Rollout, mask: Tensor, logprobs: Tensor) -> Tensor | None:
        """What rejection left, less the sequences that the learner has moved away from; divisors ignore these."""
        if self.off_policy_delta is None:
            return part.keep
        reference = part.sampler_logprobs if self.off_policy_reference == "sampler" else part.old_logprobs
        assert reference is not None
        assert part.advantages is not None
        near = off_policy_sequences(logprobs, reference, part.advantages, mask, self.off_policy_delta)[:, None]
        return mask & near if part.keep is None else part.keep & near

    def _weights(self, part: Rollout, mask: Tensor) -> Tensor | None:
        if part.weights is None or part.weight_reference is None:
            return part.weights
        return normalize_weights(part.weights, part.weight_reference, mask)
