"""The loss of a micro-batch as its share of one optimizer step.

By now a micro-batch has log-probs of the dense policy from before the update (``old_logprobs``) and advantages.
Correction callbacks (``callbacks/corrections/``, by ``corrections.py``) have compared dense with sparse probabilities:
``keep`` (B, T), bool, drops terms, and ``weights`` (B, T) multiply them after the clip, without gradient. The formulas
are in ``losses.py``, the learner's log-probs in ``forward.py``. A loss of one's own is a :class:`Loss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_rl_lightning.corrections import normalize_weights, off_policy_sequences
from sparse_rl_lightning.errors import UserError, check_choice, check_number
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
    top_token_share,
)
from sparse_rl_lightning.records import LossOutput, Rollout

KLTokens = Literal["completion", "kept"]
OffPolicyReference = Literal["old", "sampler"]


@dataclass(frozen=True)
class Denominators:
    """Divisors of the sums over all micro-batches of one optimizer step.

    Without ``policy`` and ``sequences`` each micro-batch is a loss by itself, and the trainer averages them.
    """

    policy: Tensor | None = None  # (), for the policy term
    penalty: Tensor | None = None  # (), for the KL term
    everything: Tensor | None = None  # (), for a second term from which nothing is rejected (replay, distillation)
    sequences: Tensor | None = None  # (), how many, whatever else the loss divides by
    max_completion_length: int | None = None  # the constant of dr_grpo

    def summed(self, add: Callable[[Tensor], Tensor]) -> Denominators:
        """The same denominators, each summed over all ranks by ``add``, in one call."""
        names = [name for name in ("policy", "penalty", "everything", "sequences") if getattr(self, name) is not None]
        if not names:
            return self
        totals: Any = add(torch.stack([getattr(self, name) for name in names])).unbind()
        return replace(self, **dict(zip(names, totals, strict=True)))


class Loss(ABC):
    """What an optimizer step minimizes: the loss of a micro-batch, in ``__call__``, which a subclass writes.

    A configuration names the class at ``model.loss`` (``docs/own_correction.md``).
    """

    corrects: bool = False
    """Whether it accounts for sequences drawn from less than the whole cache."""
    beta: float = 0.0
    """Above 0 a micro-batch has ``ref_logprobs`` (B, T) of the policy that training began with."""
    mask_truncated_completions: bool = False
    """Whether completions that hit the length limit count for nothing."""

    @abstractmethod
    def __call__(self, micro_batch: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        """The part's share of the loss: the shares of all parts of an optimizer step add up to the step's loss.

        Args:
            micro_batch: Sequences, or a part of a micro-batch.
            logprobs: Log-probabilities (B, T) of the learner, with gradient.
            denominators: Divisors of its optimizer step.

        Returns:
            The loss with gradient, and metrics by name.
        """

    def token_mean(self, terms: Tensor, micro_batch: Rollout, denominators: Denominators) -> LossOutput:
        """The share of terms (B, T) in the mean over all completion tokens of the step, of which kept ones count.

        A term is multiplied by its token's weight, without gradient.
        """
        mask = self.mask(micro_batch)
        kept = mask if micro_batch.keep is None else mask & micro_batch.keep
        if (weights := normalized_weights(micro_batch)) is not None:
            terms = terms * torch.where(kept, weights, 0.0).detach()
        loss = aggregate(terms, mask, kept, "dapo", num_items=denominators.policy)
        return LossOutput(loss, {"kept_fraction": kept.sum() / mask.sum().clamp(min=1)})

    def mask(self, micro_batch: Rollout) -> Tensor:
        """The tokens (B, T), bool, that the loss counts, of all sequences or of those that ended."""
        if not self.mask_truncated_completions:
            return micro_batch.completion_mask
        return micro_batch.completion_mask & micro_batch.finished[:, None]

    @property
    def counts_kept(self) -> bool:
        """Whether the divisors of an optimizer step depend on what rejection keeps of all its sequences."""
        return False

    def denominators(self, window: Rollout, max_completion_length: int | None = None) -> Denominators:
        """The divisors of one optimizer step, by default its tokens; ``sequences`` are counted beside them.

        Args:
            window: Sequences of the step, all of them.
            max_completion_length: Longest completion that rollouts draw.
        """
        tokens = self.mask(window).sum()
        return Denominators(
            policy=tokens, everything=tokens, sequences=torch.ones_like(window.prompt_lengths).sum(),
            max_completion_length=max_completion_length,
        )  # fmt: skip

    def second_term(self, beta: float = 0.0) -> Loss:
        """The loss of a second term over the same sequences, from which nothing is rejected, with this KL penalty.

        Raises:
            ValueError: If the class does not say what that is.
        """
        raise UserError(
            f"model.loss: {type(self).__name__} does not say what a second term over replayed sequences is, which "
            "this module adds. Override second_term(beta) in it, or train with SparseGRPO."
        )


def normalized_weights(micro_batch: Rollout) -> Tensor | None:
    """The weights (B, T) of a micro-batch, divided by their mean over all its completion tokens if that was left to it.

    Tokens that the loss masks are among them, as in the authors' code.
    """
    if micro_batch.weights is None or micro_batch.weight_reference is None:
        return micro_batch.weights
    return normalize_weights(micro_batch.weights, micro_batch.weight_reference, micro_batch.completion_mask)


@dataclass(frozen=True)
class GRPOLoss(Loss):
    """The objective: a policy term plus ``beta`` times a KL term, both aggregated alike.

    Args:
        loss_type: Loss type, ``grpo``, ``dapo``, ``bnpo``, ``dr_grpo`` or ``cispo``.
        importance_sampling_level: Level of the staleness ratio, ``token`` or ``sequence`` (GSPO).
        epsilon: Lower clip range, at most 1.
        epsilon_high: Upper clip range, null for ``epsilon``.
        delta: Upper bound of the unclipped ratio, above 1; null for none.
        denominator: Effect of rejection on the divisor: ``all``, ``kept_tokens`` or ``kept``.
        beta: Factor of the KL penalty to the initial policy; 0 loads no reference policy.
        kl_estimator: Estimator ``k2`` or ``k3``; ``k1`` is refused where ``beta`` is above 0.
        kl_on: Tokens of the penalty: all of the ``completion``, or those that rejection ``kept``.
        mask_truncated_completions: Leave completions that hit the length limit out of the loss.
        off_policy_delta: Threshold of off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): a sequence is left
            out when its advantage is negative and mean_t(log pi_old - log pi) exceeds this, where pi is the current
            learner. It counts as zeros: no divisor changes, for any ``denominator``. Null is off; slime's value is
            1e-4, the paper gives none.
        off_policy_reference: Policy pi_old: the dense policy before the update (``old``, as in slime), or the
            ``sampler`` as in the paper and in TRL: then compression counts too, and ``off_policy_delta`` must be above
            its mismatch (``mismatch/kl_k1``).

    Raises:
        ValueError: If a number is not finite or out of range, or an option is unknown or has no effect.
    """

    loss_type: LossType = "grpo"
    importance_sampling_level: ImportanceSamplingLevel = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    denominator: Denominator = "all"
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_on: KLTokens = "completion"
    mask_truncated_completions: bool = False
    off_policy_delta: float | None = None
    off_policy_reference: OffPolicyReference = "old"

    def __post_init__(self) -> None:
        check_number("loss.beta", self.beta, least=0)
        try:
            check_options(self.loss_type, self.importance_sampling_level, self.epsilon, self.epsilon_high, self.delta)
        except ValueError as error:
            raise UserError(f"loss.{error}") from error
        except TypeError as error:  # lists and the like cannot be looked up
            raise UserError(f"loss takes a name or a number for each option, got {self!r}.") from error
        check_number("loss.off_policy_delta", self.off_policy_delta, least=0, or_none=True)
        check_choice("loss.denominator", self.denominator, Denominator)
        check_choice("loss.kl_estimator", self.kl_estimator, KLEstimator)
        check_choice("loss.kl_on", self.kl_on, KLTokens)
        check_choice("loss.off_policy_reference", self.off_policy_reference, OffPolicyReference)
        self._check_effects()

    @cached_property
    def counts_kept(self) -> bool:
        """Whether divisors depend on what rejection keeps of a step's sequences."""
        if self.loss_type == "bnpo" or self.denominator == "all":
            return False
        return self.denominator == "kept" or self.loss_type not in ("grpo", "dr_grpo")

    def denominators(self, window: Rollout, max_completion_length: int | None = None) -> Denominators:
        """The divisors of one optimizer step; ``max_completion_length`` is the constant of ``dr_grpo``."""
        if self.loss_type == "bnpo":  # normalizes every micro-batch by itself
            return Denominators()
        mask = self.mask(window)
        kept = window.keep if self.kl_on == "kept" else None
        return Denominators(
            policy=count_items(mask, window.keep, self.loss_type, self.denominator),
            penalty=count_items(mask, kept, self.loss_type, self.denominator) if self.beta > 0 else None,
            everything=count_items(mask, None, self.loss_type, self.denominator),
            sequences=torch.ones_like(window.prompt_lengths).sum(),
            max_completion_length=max_completion_length,
        )

    def __call__(self, micro_batch: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        """The part's share of the loss, and metrics with TRL's names."""
        assert micro_batch.old_logprobs is not None
        assert micro_batch.advantages is not None
        mask, length, divisor = self.mask(micro_batch), denominators.max_completion_length, denominators.policy
        if divisor is None:  # before off-policy masking, which changes no divisor
            divisor = count_items(mask, micro_batch.keep, self.loss_type, self.denominator)
        output = policy_loss(
            logprobs,
            micro_batch.old_logprobs,
            micro_batch.advantages,
            mask,
            keep=self._keep(micro_batch, mask, logprobs),
            weights=normalized_weights(micro_batch),
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            denominator=self.denominator,
            max_completion_length=length,
            num_items=divisor,
        )
        output.metrics["top10_token_share"] = top_token_share(output.loss, logprobs)
        if self.beta == 0:
            return output
        assert micro_batch.ref_logprobs is not None
        penalty = kl_penalty(logprobs, micro_batch.ref_logprobs, mask, self.kl_estimator)
        kept = micro_batch.keep if self.kl_on == "kept" else None
        term = aggregate(penalty, mask, kept, self.loss_type, self.denominator, length, denominators.penalty)
        metrics = {**output.metrics, "kl": penalty.detach().sum() / mask.sum().clamp(min=1)}
        return LossOutput(output.loss + self.beta * term, metrics)

    def second_term(self, beta: float = 0.0) -> GRPOLoss:
        """The same without masks of off-policy sequences, and with this factor of the k3 penalty on all tokens."""
        return replace(self, beta=beta, kl_estimator="k3", kl_on="completion", off_policy_delta=None)

    def _check_effects(self) -> None:
        """Refuse what :func:`policy_loss` would accept, and what then does nothing, or the opposite."""
        if self.kl_estimator == "k1" and self.beta > 0:
            raise UserError(
                f"loss.kl_estimator='k1' has a gradient that does not depend on the reference policy, so beta="
                f"{self.beta} would not pull to it. Set kl_estimator to k3, the default and TRL's, or to k2."
            )
        if self.delta is not None and self.delta <= 1:
            raise UserError(
                f"loss.delta={self.delta} bounds the ratio where it starts, at 1, and would stop the gradient of good "
                "samples. Set delta above 1 + epsilon, for example to 2.0, or to null."
            )
        if self.epsilon > 1 and self.loss_type != "cispo":
            raise UserError(
                f"loss.epsilon={self.epsilon} would clip the ratio, which is never negative, at 1 - epsilon. Set "
                "epsilon to at most 1, where 1 means no lower clip, and epsilon_high to the upper clip, which may be "
                "larger."
            )

    def _keep(self, micro_batch: Rollout, mask: Tensor, logprobs: Tensor) -> Tensor | None:
        """Tokens left by rejection, without sequences the learner has moved away from; divisors ignore these."""
        if self.off_policy_delta is None:
            return micro_batch.keep
        # the sampler's, or their replay where the module replays
        reference = micro_batch.sparse_logprobs if self.off_policy_reference == "sampler" else micro_batch.old_logprobs
        assert reference is not None
        assert micro_batch.advantages is not None
        near = off_policy_sequences(logprobs, reference, micro_batch.advantages, mask, self.off_policy_delta)[:, None]
        return mask & near if micro_batch.keep is None else micro_batch.keep & near
