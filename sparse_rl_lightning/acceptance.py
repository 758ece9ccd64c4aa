"""Acceptance: the overlap of the sparse policy's next-token distribution with the dense policy's, token by token.

The overlap sum_v min(p_dense(v), p_sparse(v)) = 1 - total variation is the probability with which speculative sampling
would accept a token drawn from one as a token of the other. Its lower tail decides whether training on sparse rollouts
is stable (Sparrow, arXiv 2606.08446, eq. 2).

Letters: B sequences, T tokens, K most likely tokens of the sampler, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.logprobs import logprobs_at
from sparse_rl_lightning.records import Rollout

TAIL = 0.05
"""The share of tokens that makes up the tail, whose percentile Sparrow holds above a target (section 3.2)."""
BIN_SIZE = 2000
NUM_BINS = 20
NEAR_ONE = 0.999
"""The acceptance above which a token counts as unaffected by compression (Sparrow, section 3.1)."""
PUBLISHED_TARGET = 0.86
"""The lowest 5th percentile of the acceptance at which Sparrow's models trained as well as with dense rollouts."""
PUBLISHED_CEILING = 0.945
"""The 5th percentile between Sparrow's dense sampler and its dense learner: rounding and truncation to 20 tokens."""


def exact_acceptance(dense_logprobs: Tensor, sparse_logprobs: Tensor) -> Tensor:
    """The overlap (...) of two distributions (..., V), as log-probabilities: from 0 (disjoint) to 1 (equal)."""
    return torch.minimum(dense_logprobs, sparse_logprobs).exp().sum(dim=-1).clamp(max=1)


def acceptance_bounds(dense_logprobs: Tensor, sparse_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds ``lower`` and ``upper`` (...) of the acceptance from log-probabilities (..., K) at K distinct tokens.

    The K tokens overlap by a known amount. The rest overlap by 0 or more, and by no more than the smaller of the two
    probabilities left. Any K tokens will do; the sampler's most likely ones make the bounds tight, and with all V
    tokens both are the exact value. Despite rounding, 0 <= lower <= upper <= 1. Sparrow counts only tokens among
    the most likely of both policies, so its numbers are at most the lower bound here.
    """
    lower = exact_acceptance(dense_logprobs, sparse_logprobs)
    left = torch.minimum(1 - dense_logprobs.exp().sum(dim=-1), 1 - sparse_logprobs.exp().sum(dim=-1))
    return lower, (lower + left.clamp(min=0)).clamp(max=1)


def sampled_acceptance(dense_logprobs: Tensor, sparse_logprobs: Tensor) -> Tensor:
    """The ratio min(1, p_dense / p_sparse), (...), of tokens that the sparse policy drew.

    Its mean is an unbiased estimate of the mean acceptance. Its percentiles are not the percentiles of the acceptance:
    a single token carries little information about its distribution.
    """
    return (dense_logprobs - sparse_logprobs).clamp(max=0).exp()


@torch.no_grad()
def rollout_acceptance(
    model: PreTrainedModel,
    rollout: Rollout,
    temperature: float = 1.0,
    chunk_size: int = 512,
    head_in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Bounds of the acceptance at every token of a rollout, from one dense forward pass without gradient.

    Args:
        model: Policy with the weights that drew the rollout.
        rollout: Rollout with the sampler's most likely tokens, ``SamplingParams(top_logprobs=K)``.
        temperature: Temperature of the sampler, 1 for greedy rollouts.
        chunk_size: Number of tokens per chunk, as in ``sequence_logprobs``.
        head_in_float32: Precision of the output head, as in ``sequence_logprobs``.

    Returns:
        ``lower`` and ``upper`` (B, T), 0 outside the completions. Index t refers to the distribution that token t was
        drawn from.

    Raises:
        ValueError: If the rollout does not have the sampler's most likely tokens.
    """
    if rollout.topk_ids is None or rollout.topk_logprobs is None:
        raise UserError(
            "This rollout does not say what the sampler's most likely tokens were (rollout.topk_ids is None). Sample "
            "with top_logprobs=20, in SamplingParams or as model.top_logprobs."
        )
    mask = rollout.completion_mask
    dense = logprobs_at(
        model, rollout.sequences, rollout.topk_ids, mask, temperature, chunk_size, head_in_float32, rollout.routing
    )  # (B, T, K)
    lower, upper = acceptance_bounds(dense, rollout.topk_logprobs.to(mask.device))
    return lower * mask, upper * mask


def percentile(values: Tensor, share: float = TAIL) -> float:
    """The number below which ``share`` of the values lie, interpolated between neighbors; NaN without values.

    There may be any number of values, while ``torch.quantile`` refuses more than 16 million.
    """
    if not values.numel():
        return math.nan
    ordered = values.detach().flatten().sort().values
    rank = share * (len(ordered) - 1)
    low, high = ordered[[math.floor(rank), math.ceil(rank)]].double().tolist()
    return float(low + (high - low) * (rank - math.floor(rank)))


@dataclass(frozen=True)
class AcceptanceTail:
    """The lower tail of the acceptance of one rollout, by length and over all its tokens.

    Sparrow (arXiv 2606.08446, section 3.2) pools the tokens of all sequences by the length of the sequence up to them,
    and holds the 5th percentile of every such bin; the mean is uninformative, because most tokens are unaffected.
    """

    by_length: dict[str, float]  # percentile of each length bin, bins without tokens left out
    tokens: dict[str, int]  # number of tokens in each of these bins
    overall: float  # percentile of all tokens
    mean: float
    near_one: float  # share of tokens above 0.999

    @classmethod
    def of(
        cls, acceptance: Tensor, mask: Tensor, bin_size: int = BIN_SIZE, num_bins: int = NUM_BINS, share: float = TAIL
    ) -> AcceptanceTail:
        """Measure the tail; NaN without tokens.

        A token's length is the number of tokens before it, prompt included.

        Args:
            acceptance: Exact values (B, T), or bounds of :func:`acceptance_bounds`.
            mask: Completion tokens (B, T), bool.
            bin_size: Tokens per length bin.
            num_bins: Number of bins; the last has no end. Their names are ``0-2000``, ``2000-4000``, ..., ``38000+``.
            share: Share of the tokens below the percentile.
        """
        if bin_size < 1 or num_bins < 1:
            raise UserError(
                f"bin_size and num_bins must be at least 1, got bin_size={bin_size} and num_bins={num_bins}."
            )
        check_number("share", share, least=0, most=1)
        values = acceptance.detach()[mask].double()
        if not bool(values.isfinite().all()):
            raise UserError("The acceptance of some tokens is not finite: look for NaN in the log-probabilities.")
        bins = (mask.nonzero()[:, 1] // bin_size).clamp(max=num_bins - 1)
        binned = {number: values[bins == number] for number in torch.unique(bins).tolist()}
        names = {n: f"{n * bin_size}-{(n + 1) * bin_size}" if n < num_bins - 1 else f"{n * bin_size}+" for n in binned}
        return cls(
            by_length={names[number]: percentile(members, share) for number, members in binned.items()},
            tokens={names[number]: len(members) for number, members in binned.items()},
            overall=percentile(values, share),
            mean=float(values.mean()),
            near_one=float((values > NEAR_ONE).double().mean()),
        )


def tail_target(ceiling: float, target: float = PUBLISHED_TARGET) -> float:
    """The 5th percentile to hold: a target under the published ceiling (0.945) scaled to one that was measured here.

    The ceiling is the same statistic between the dense sampler and the dense learner. Kernels, precision and K change
    it, so a published number is meaningless without the ceiling it was measured under.
    """
    return target * ceiling / PUBLISHED_CEILING
