"""Corrections for samples not drawn by the learner's own policy: rejection, token masks, weights, statistics.

All functions are about the consistency ratio of one token, xi = pi_old / pi_sparse: the dense policy over the
sparse policy that drew the token, both at the parameters the rollout used. ``log_ratio`` (B, T) is its logarithm,
from :func:`consistency_log_ratio`, and ``mask`` (B, T), bool, is always the whole completion, whatever has been
rejected before. Nothing carries gradient.

Sparse-RL as in the paper (arXiv 2601.10079) is ``reject_sequences`` and ``importance_weights`` with their
defaults. The authors' code also drops single tokens and divides the weights by their mean in the micro-batch::

    keep = reject_sequences(log_ratio, mask)[:, None] & mask_tokens(log_ratio, mask, low=0.5, high=1.5)
    weights = importance_weights(log_ratio, mask, "token_mask", clip_min=0.5, clip_max=1.5)
    capped = importance_weights(log_ratio, mask, "token_truncate", clip_max=1.5)
    weights = normalize_weights(weights, capped, mask)  # on a micro-batch, at loss time
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_choice, check_number

WeightMode = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"
]

SequenceLevel = Literal["sequence", "geometric"]

MAX_LOG_RATIO = 20.0
"""Bound on the absolute logarithm of a ratio before ``exp``, against overflow only."""
ROUNDING = 1e-5
"""Probability below which what is left of a distribution may be rounding."""

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Weights of tokens, elementwise from log-ratios log p - log q and log-probabilities log p, of any shape."""


def consistency_log_ratio(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio (B, T), log pi_old - log pi_sparse, of every token drawn; detached, 0 outside the completions.

    Args:
        old_logprobs: Log-probabilities (B, T) of the dense policy that the rollout used.
        sampler_logprobs: Log-probabilities (B, T) of the sparse policy that drew the tokens, at the same temperature.
        mask: Completion tokens (B, T), bool.
    """
    return torch.where(mask, old_logprobs - sampler_logprobs, 0.0).detach()


def reject_sequences(log_ratio: Tensor, mask: Tensor, threshold: float = 1e-4) -> Tensor:
    """Which sequences (B,) to keep: all but those with a token that the dense policy finds near-impossible.

    A ratio below ``threshold``, between 0 and 1, rejects its sequence. The test is one-sided: a token that the dense
    policy finds much likelier than the sampler did rejects nothing (Sparse-RL, arXiv 2601.10079, sparsity-aware
    rejection sampling).
    """
    if not 0 < threshold < 1:
        raise UserError(f"threshold must be between 0 and 1 (a ratio of probabilities), got threshold={threshold}.")
    return ~((log_ratio < math.log(threshold)) & mask).any(dim=1)


def mask_tokens(log_ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Which completion tokens (B, T) have a ratio within [low, high] (IcePop; the authors' code of Sparse-RL).

    ``low=0`` and an infinite ``high`` are no bounds.
    """
    if not 0 <= low < high:
        raise UserError(f"low and high must satisfy 0 <= low < high, got low={low}, high={high}.")
    log_low = math.log(low) if low > 0 else -math.inf
    return mask & (log_ratio >= log_low) & (log_ratio <= math.log(high))


def mask_sequences(
    log_ratio: Tensor, mask: Tensor, low: float, high: float, level: SequenceLevel = "geometric"
) -> Tensor:
    """Which sequences (B,) have a ratio within [low, high] as a whole (rejection of verl, seq-mask-tis of OpenRLHF).

    The ratio of a sequence is the product of its tokens' (``level="sequence"``) or their geometric mean ("geometric");
    ``low=0`` and an infinite ``high`` are no bounds.
    """
    check_choice("level", level, SequenceLevel)
    whole = _of_sequences(torch.where(mask, log_ratio, 0.0), mask, level)
    return mask_tokens(whole, torch.ones_like(whole, dtype=torch.bool), low, high).squeeze(1)


def off_policy_sequences(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float = 1e-4
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): drop bad samples the learner has moved away from.

    A sequence is dropped, False in (B,), when its advantage is negative and mean_t(log pi_old - log pi) > delta. This
    depends on the current learner, so it belongs to the loss and not to the rollout.

    Args:
        logprobs: Log-probabilities (B, T) of the learner, used without gradient.
        old_logprobs: Log-probabilities (B, T) of the policy to compare with: before the update, or the sampler.
        advantages: Advantages (B,).
        mask: Completion tokens (B, T), bool.
        delta: Largest mean difference to keep; the default is slime's.
    """
    check_number("delta", delta, least=0)
    difference = torch.where(mask, old_logprobs - logprobs, 0.0).detach()
    return ~((advantages < 0) & (_of_sequences(difference, mask, "geometric").squeeze(1) > delta))


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    mode: WeightMode = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """Weights (B, T) that make tokens of the sparse policy count as if the dense policy had drawn them.

    "token" weights a token by its own xi, "sequence" by the product over its sequence, "geometric" by the
    geometric mean. "_truncate" clamps the weight to [clip_min, clip_max], "_mask" sets it to 0 outside. With no
    bounds the "token" modes give the paper's uncapped xi. The weights are detached, and 0 outside ``mask``.

    Args:
        log_ratio: Log-ratios (B, T) from :func:`consistency_log_ratio`.
        mask: Completion tokens (B, T), bool, rejected ones included.
        mode: Level and treatment of extremes.
        clip_min: Lower bound of the weight, None for none.
        clip_max: Upper bound of the weight, None for none.
        normalize: Whether to divide by the mean weight of all tokens given, so that it becomes 1. For a mean over a
            micro-batch, or over other weights, leave it out and call :func:`normalize_weights`.
    """
    _check_mode(mode, clip_min, clip_max)
    level, treatment = mode.split("_")
    masked = torch.where(mask, log_ratio, 0.0).detach()
    if level != "token":
        masked = _of_sequences(masked, mask, level)
    ratio = _ratio(masked).expand(mask.shape)
    bounded = ratio if clip_min is clip_max is None else ratio.clamp(clip_min, clip_max)
    if treatment == "mask":
        bounded = torch.where(bounded == ratio, ratio, 0.0)
    weights = torch.where(mask, bounded, 0.0)
    return normalize_weights(weights, weights, mask) if normalize else weights


def calibrated_weights(
    log_ratio: Tensor, old_logprobs: Tensor, mask: Tensor, threshold: float = 2.3, floor: float = 5e-3
) -> Tensor:
    """Weights min(xi, 1 + threshold x max(1 - p, floor)) (B, T), with p the token's dense probability.

    Calibrated importance sampling (arXiv 2609.32444): rounding moves a token's log-odds by an amount eps that depends
    little on how sure the policy is, and xi = p + (1 - p) exp(eps). So one bound on exp(eps), 1 + ``threshold``, is a
    bound on xi that is tighter for sure tokens. The weights are detached, and 0 outside ``mask``.

    Args:
        log_ratio: Log-ratios (B, T) from :func:`consistency_log_ratio`.
        old_logprobs: Log-probabilities (B, T) of the dense policy that the rollout used.
        mask: Completion tokens (B, T), bool, rejected ones included.
        threshold: Bound on exp(eps), minus 1.
        floor: Least 1 - p, near the resolution of the log-probabilities.
    """
    check_number("threshold", threshold, least=0)
    check_number("floor", floor, least=0)
    unsure = -torch.expm1(old_logprobs.detach().masked_fill(~mask, 0.0))
    capped = _ratio(log_ratio.detach()).minimum(1 + threshold * unsure.clamp(min=floor))
    return torch.where(mask, capped, 0.0)


def normalize_weights(weights: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Divide ``weights`` (B, T) by the mean of ``reference`` (B, T) over ``mask``; a mean of 0 divides nothing.

    The two differ in the authors' code of Sparse-RL: weights are 0 outside [0.5, 1.5], but their divisor is the
    mean of min(xi, 1.5) over all completion tokens of the micro-batch, masked and rejected ones included. The
    result depends on how sequences are grouped into micro-batches; call it at loss time.
    """
    mean = torch.where(mask, reference, 0.0).sum() / mask.sum().clamp(min=1)
    return weights / torch.where(mean > 0, mean, 1.0)


def expected_scores(logprobs: Tensor, sampler_logprobs: Tensor, weigh: Weigh) -> Tensor:
    """The score that a token of the sampler has on average, E_q[f(p / q) log p] (N,), whose gradient is the drift.

    Score centering (arXiv 2609.20807) subtracts it from the token's own f(p / q) log p: what the sampler's distribution
    q alone would push the learner's p to is then gone, whatever the reward. Known are the sampler's K most likely
    tokens; of the others q is taken for a multiple a of p, so that their part is -a f(1 / a) times what the K have of
    E_p[log p], whose gradient is 0 over the whole vocabulary. With K = V nothing is approximated.

    Args:
        logprobs: Learner's log-probabilities (N, K) of the sampler's most likely tokens, with gradient.
        sampler_logprobs: The sampler's own (N, K).
        weigh: Weights f of tokens.

    Returns:
        The expected score (N,); its value is no quantity of interest, its gradient is.
    """
    with torch.no_grad():
        # masses of the other tokens; where both are but rounding, they count as equal
        sparse, dense = ((1 - known.exp().sum(-1, keepdim=True)).clamp(min=0) for known in (sampler_logprobs, logprobs))
        multiple = (sparse + ROUNDING) / (dense + ROUNDING)
        behind = multiple * weigh(-multiple.log(), torch.full_like(multiple, -math.inf))
        coefficients = sampler_logprobs.exp() * weigh(logprobs - sampler_logprobs, logprobs) - behind * logprobs.exp()
    return (coefficients * logprobs).sum(dim=-1)


def mismatch_statistics(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Distance between the sparse and the dense policy, over all completion tokens before any rejection.

    The KL divergences are KL(sparse || dense), estimated on the sampler's own tokens.

    Args:
        log_ratio: Log-ratios (B, T) from :func:`consistency_log_ratio`.
        mask: Completion tokens (B, T), bool, rejected sequences and tokens included.

    Returns:
        Scalars, with the values of a perfect match if there are no tokens:

        - ``mismatch/kl_k1``: mean of -log xi, unbiased, may be negative;
        - ``mismatch/kl_k3``: mean of xi - 1 - log xi, never negative;
        - ``mismatch/ratio_p05``: 5th percentile of xi (nearest rank);
        - ``mismatch/ess``: effective sample size of the weights xi as a share of the tokens, (0, 1];
        - ``mismatch/low_ratio_tokens``: share of tokens with xi below 1e-4;
        - ``mismatch/low_ratio_sequences``: share of sequences with such a token;
        - ``sampling/importance_sampling_ratio/{min,mean,max}``: of xi (TRL's names);
        - ``sampling/sampling_logp_difference/{mean,max}``: of the absolute log xi (TRL's names).
    """
    log_xi = log_ratio.detach()[mask]
    if not len(log_xi):
        log_xi = log_ratio.new_zeros(1)
    xi = _ratio(log_xi)
    low = (log_ratio < math.log(1e-4)) & mask
    return {
        "mismatch/kl_k1": -log_xi.mean(),
        "mismatch/kl_k3": (torch.expm1(log_xi.clamp(max=MAX_LOG_RATIO)) - log_xi).mean(),
        "mismatch/ratio_p05": xi.kthvalue(math.ceil(0.05 * len(xi))).values,
        "mismatch/ess": xi.sum() ** 2 / (len(xi) * (xi**2).sum()),
        "mismatch/low_ratio_tokens": low.sum() / mask.sum().clamp(min=1),
        "mismatch/low_ratio_sequences": low.any(dim=1).sum() / mask.any(dim=1).sum().clamp(min=1),
        "sampling/importance_sampling_ratio/min": xi.min(),
        "sampling/importance_sampling_ratio/mean": xi.mean(),
        "sampling/importance_sampling_ratio/max": xi.max(),
        "sampling/sampling_logp_difference/mean": log_xi.abs().mean(),
        "sampling/sampling_logp_difference/max": log_xi.abs().max(),
    }


def _of_sequences(masked: Tensor, mask: Tensor, level: str) -> Tensor:
    """Sums (B, 1) of rows (B, T), or means over the tokens of ``mask``."""
    total = masked.sum(dim=1, keepdim=True)
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1) if level == "geometric" else total


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@cache  # what has passed is not checked again
def _check_mode(mode: str, clip_min: float | None, clip_max: float | None) -> None:
    check_choice("mode", mode, WeightMode)
    check_number("clip_min", clip_min, least=0, or_none=True)
    check_number("clip_max", clip_max, above=0, or_none=True)
    if clip_min is not None and clip_max is not None and clip_min > clip_max:
        raise UserError(f"clip_min must not exceed clip_max, got clip_min={clip_min}, clip_max={clip_max}.")
