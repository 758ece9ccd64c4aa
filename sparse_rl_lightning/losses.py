"""The policy-gradient objectives and the KL penalty per token, and their aggregation into a scalar.

Letters: w = pi / pi_old (staleness ratio), A advantage, m mask (completion tokens), k = m and keep (the tokens
that survive rejection), x the term of a token, already clipped and weighted, n_i = sum_t m, k_i = sum_t k of
sequence i. A sequence with k_i = 0 is rejected as a whole. :func:`aggregate` forms

=============  =====================================  ==========================================
family         loss                                   items, by ``denominator``
=============  =====================================  ==========================================
sequence mean  sum_i (sum_t k x / length_i) / items   all: B; kept_tokens: B; kept: sequences with k_i > 0
token mean     sum_i sum_t k x / items                all: sum n_i; kept: sum k_i; kept_tokens: sum of k_i, or
                                                      of n_i where the sequence is rejected as a whole
constant       sum_i sum_t k x / (items * L)          as sequence mean; L = max_completion_length
=============  =====================================  ==========================================

with length_i = n_i for "all" and k_i otherwise. "all" counts rejected tokens as zeros (Sparse-RL's paper, TRL),
"kept_tokens" leaves out rejected tokens but counts rejected sequences as zeros (the authors' code), "kept" leaves
out both (verl). grpo is the sequence mean, dapo, bnpo and cispo the token mean, dr_grpo the constant. Rows of
an empty mask count as sequences, as in TRL.

``num_items`` replaces ``items`` when a batch is one part of an optimization step: the sum over all parts (and
ranks) of :func:`count_items`, with the same loss type and denominator. The parts' losses then *add up* to the loss
of the whole step, so a trainer that averages over parts or ranks must be given the loss times their number.
bnpo is dapo without ``num_items``: each part has its own mean.

The KL term takes the same path: ``aggregate(kl_penalty(...), mask, keep, ...)``, with ``keep=None`` where the
penalty holds for rejected tokens too (preset "paper", whose denominator "all" does not depend on keep).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from sparse_rl_lightning.corrections import MAX_LOG_RATIO
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.records import LossOutput

LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo"]
Denominator = Literal["all", "kept_tokens", "kept"]
LOSS_TYPES, DENOMINATORS = get_args(LossType), get_args(Denominator)
ImportanceSamplingLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    loss_type: LossType = "grpo",
    importance_sampling_level: ImportanceSamplingLevel = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    denominator: Denominator = "all",
    max_completion_length: int | None = None,
    num_items: int | float | Tensor | None = None,
) -> LossOutput:
    """Minus the clipped objective weights * min(w A, clip(w) A), kept tokens only, as one number.

    Args:
        logprobs: Log-probabilities (B, T) of the learner, with gradient.
        old_logprobs: Log-probabilities (B, T) of the dense policy before the update.
        advantages: Advantages (B,).
        mask: Completion tokens (B, T), bool, rejected ones included.
        keep: Tokens (B, T) to keep, bool, False for rejected tokens; None keeps all.
        weights: Factors (B, T) on the clipped term, used without gradient; None for 1.
        loss_type: Way to aggregate the terms (module docstring). "cispo" also replaces the clipped term by
            min(w, epsilon_high) A log pi with the first factor detached (arXiv 2506.13585).
        importance_sampling_level: Level of w: each "token", or the geometric mean over the "sequence" (GSPO,
            arXiv 2507.18071).
        epsilon: Lower clip of w, which is clipped at 1 - epsilon.
        epsilon_high: Upper clip of w, at 1 + epsilon_high; None for ``epsilon``. For cispo the cap itself, e.g. 5.
        delta: Upper bound of the unclipped w too, which bounds the loss of unlikely bad tokens; None for none.
        denominator: Effect of rejection on the divisor (module docstring).
        max_completion_length: Length L of dr_grpo.
        num_items: Number of items in the whole optimization step, None for those in this batch.

    Returns:
        The loss, a zero attached to the graph when nothing is kept; and metrics, over all of ``mask`` but the last:
        ``clip_ratio/{low,high,region}_mean`` (tokens, or sequences, whose gradient the clip stops) and
        ``kept_fraction``.

    Raises:
        ValueError: If an option is unknown, out of range or does not fit the others, or shapes differ.
    """
    _check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, keep=keep, weights=weights)
    _check_shapes(mask[:, 0], advantages=advantages)
    check_options(loss_type, importance_sampling_level, epsilon, epsilon_high, delta)
    kept = mask if keep is None else mask & keep
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    if importance_sampling_level == "sequence":  # (B, 1) from here on
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    metrics = _clip_metrics(log_ratio.detach().exp(), advantages, mask, loss_type, epsilon, epsilon_high)
    metrics["kept_fraction"] = kept.sum() / mask.sum().clamp(min=1)

    ratio = torch.where(kept, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    metrics["staleness_ratio/max"] = torch.where(kept, ratio.detach(), 0.0).max()
    if loss_type == "cispo":
        objective = ratio.clamp(max=epsilon_high).detach() * advantages[:, None] * logprobs
    else:
        objective = clipped_objective(ratio, advantages[:, None], epsilon, epsilon_high, delta)
    if weights is not None:
        objective = objective * torch.where(kept, weights, 0.0).detach()
    loss = aggregate(-objective, mask, kept, loss_type, denominator, max_completion_length, num_items)
    return LossOutput(loss, metrics)


def top_token_share(loss: Tensor, logprobs: Tensor, count: int = 10) -> Tensor:
    """The share () of the loss's derivative by the log-probs (B, T), summed as magnitudes, that few tokens have.

    Near 0 every token counts a little; near 1 a step is made of ``count`` tokens. 0 where nothing has a gradient.
    """
    if not loss.requires_grad:
        return loss.new_zeros(())
    (derivative,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    sizes = derivative.abs().flatten()
    total = sizes.sum()
    return sizes.topk(min(count, len(sizes))).values.sum() / torch.where(total > 0, total, 1.0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL(pi || pi_ref) of every token, estimated on tokens of pi (Schulman, "Approximating KL divergence", 2020).

    With d = log pi_ref - log pi: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. As a loss k1 has no expected
    gradient; it is for logging.

    Args:
        logprobs: Log-probabilities (B, T) of the learner, with gradient.
        ref_logprobs: Log-probabilities (B, T) of the reference policy.
        mask: Completion tokens (B, T), bool.
        estimator: Estimator "k1", "k2" or "k3". For k3, d is clamped to at most 20 against overflow.

    Returns:
        The penalty (B, T), 0 outside ``mask``. Sum it up with :func:`aggregate`.

    Raises:
        ValueError: If ``estimator`` is unknown or shapes differ.
    """
    check_choice("estimator", estimator, KLEstimator)
    _check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = torch.where(mask, ref_logprobs - logprobs, 0.0)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    keep: Tensor | None = None,
    loss_type: LossType = "grpo",
    denominator: Denominator = "all",
    max_completion_length: int | None = None,
    num_items: int | float | Tensor | None = None,
) -> Tensor:
    """The scalar that (B, T) terms add up to under a loss type and a denominator (formulas: module docstring).

    Args:
        per_token: Terms (B, T); values of tokens that are not kept are never used.
        mask: Completion tokens (B, T), bool, rejected ones included.
        keep: Tokens (B, T) to keep, bool, False for rejected tokens; None keeps all.
        loss_type: Loss type, which determines the family: sequence mean, token mean or constant.
        denominator: Denominator "all", "kept_tokens" or "kept".
        max_completion_length: Length L of dr_grpo.
        num_items: Number of items in the whole optimization step, None for those in this batch.

    Returns:
        A scalar, attached to the graph of ``per_token`` even when nothing is kept.

    Raises:
        ValueError: If an option is unknown, dr_grpo has no length, or shapes differ.
    """
    _check_shapes(mask, per_token=per_token, keep=keep)
    _check_family(loss_type, denominator)
    kept = mask if keep is None else mask & keep
    items = torch.as_tensor(
        count_items(mask, kept, loss_type, denominator) if num_items is None else num_items,
        dtype=per_token.dtype,
        device=per_token.device,
    )
    terms = torch.where(kept, per_token, 0.0)
    if loss_type == "grpo":
        lengths = (mask if denominator == "all" else kept).sum(dim=1, keepdim=True)
        terms = terms / lengths.clamp(min=1)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise UserError("loss_type='dr_grpo' divides by max_completion_length: pass it.")
        items = items * max_completion_length
    return terms.sum() / torch.where(items > 0, items, 1)


def count_items(
    mask: Tensor, keep: Tensor | None = None, loss_type: LossType = "grpo", denominator: Denominator = "all"
) -> Tensor:
    """The number of items in this batch: sequences for grpo and dr_grpo, tokens for dapo, bnpo and cispo.

    Args:
        mask: Completion tokens (B, T), bool, rejected ones included.
        keep: Tokens (B, T) to keep, bool, False for rejected tokens; None keeps all.
        loss_type: Loss type, which determines the family.
        denominator: Denominator "all", "kept_tokens" or "kept".

    Returns:
        An integer tensor (). Counts of the parts of a step add up to ``num_items`` of the step.

    Raises:
        ValueError: If an option is unknown.
    """
    _check_family(loss_type, denominator)
    kept = mask if keep is None else mask & keep
    alive = kept.any(dim=1)
    if loss_type in ("grpo", "dr_grpo"):
        return (alive if denominator == "kept" else torch.ones_like(alive)).sum()
    if denominator == "kept_tokens":
        return torch.where(alive, kept.sum(dim=1), mask.sum(dim=1)).sum()
    return (kept if denominator == "kept" else mask).sum()


def clipped_objective(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None, delta: float | None
) -> Tensor:
    """min(w A, clip(w) A), the first w bounded by ``delta`` (two-sided clip of INTELLECT-2, arXiv 2505.07291)."""
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = ratio.clamp(1 - epsilon, 1 + high) * advantages
    return torch.minimum((ratio if delta is None else ratio.clamp(max=delta)) * advantages, clipped)


def _clip_metrics(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_type: LossType,
    epsilon: float,
    epsilon_high: float | None,
) -> dict[str, Tensor]:
    """Shares of tokens (ratio (B, T)) or of sequences (ratio (B, 1)) beyond the clip on the side that matters."""
    counted = mask if ratio.shape == mask.shape else mask.any(dim=1, keepdim=True)
    high_bound = epsilon if epsilon_high is None else epsilon_high
    low_bound, high_bound = (0.0, high_bound) if loss_type == "cispo" else (1 - epsilon, 1 + high_bound)
    side = torch.where(counted, advantages[:, None], 0.0)
    low, high = (ratio < low_bound) & (side < 0), (ratio > high_bound) & (side > 0)
    total = counted.sum().clamp(min=1).float()
    return {
        "clip_ratio/low_mean": low.sum() / total,
        "clip_ratio/high_mean": high.sum() / total,
        "clip_ratio/region_mean": (low | high).sum() / total,
    }


@cache
def check_options(loss_type: str, level: str, epsilon: float, epsilon_high: float | None, delta: float | None) -> None:
    """Refuse options of :func:`policy_loss` that are unknown, out of range or do not fit each other.

    Raises:
        ValueError: If one of them is.
    """
    check_choice("loss_type", loss_type, LossType)
    check_choice("importance_sampling_level", level, ImportanceSamplingLevel)
    check_number("epsilon", epsilon, least=0)
    check_number("epsilon_high", epsilon_high, least=0, or_none=True)
    check_number("delta", delta, above=0, or_none=True)
    if loss_type == "cispo" and epsilon_high is None:
        raise UserError("loss_type='cispo' caps the ratio at epsilon_high itself: pass epsilon_high, e.g. 5.0.")
    if loss_type == "cispo" and delta is not None:
        raise UserError(f"loss_type='cispo' has no delta, got delta={delta}. Remove it or choose another loss_type.")


def _check_family(loss_type: str, denominator: str) -> None:
    if loss_type not in LOSS_TYPES or denominator not in DENOMINATORS:
        check_choice("loss_type", loss_type, LossType)
        check_choice("denominator", denominator, Denominator)


def _check_shapes(mask: Tensor, **tensors: Tensor | None) -> None:
    if mask.dtype != torch.bool:
        raise UserError(f"mask must be a bool tensor, got {mask.dtype}.")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise UserError(f"{name} must have shape {tuple(mask.shape)} to fit mask, got {tuple(tensor.shape)}.")
