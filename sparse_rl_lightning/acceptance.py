"""Acceptance: how far the sparse policy's next-token distribution overlaps with the dense policy's, token by token.

The overlap sum_v min(p_dense(v), p_sparse(v)) = 1 - total variation is the probability with which speculative sampling
would accept a token drawn from one as a token of the other. Its lower tail decides whether training on sparse rollouts
is stable (Sparrow, arXiv 2606.08446, eq. 2).

Letters: B sequences, T tokens, K most likely tokens of the sampler, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_rl_lightning.logprobs import logprobs_at
from sparse_rl_lightning.records import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR_ONE = 0.999
"""Above it a token counts as untouched by compression (Sparrow, section 3.1)."""
PUBLISHED_TARGET = 0.86
"""The lowest 5th percentile of the acceptance with which Sparrow's models trained as well as with dense rollouts."""
PUBLISHED_CEILING = 0.945
"""The 5th percentile between Sparrow's dense sampler and its dense learner: rounding and truncation to 20 tokens."""


def exact_acceptance(dense_logprobs: Tensor, sparse_logprobs: Tensor) -> Tensor:
    """The exact overlap of two distributions, between 0 (disjoint) and 1 (equal).

    Args:
        dense_logprobs: (..., V) normalised log-probabilities.
        sparse_logprobs: (..., V) normalised log-probabilities.

    Returns:
        (...). It does not matter which is which.
    """
    return torch.minimum(dense_logprobs, sparse_logprobs).exp().sum(dim=-1).clamp(max=1)


def acceptance_bounds(dense_logprobs: Tensor, sparse_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the acceptance from the log-probabilities of both policies at K distinct tokens.

    The K tokens overlap by a known amount. The rest overlap by 0 or more, and by no more than the smaller of the two
    probabilities left. Any K tokens will do; the sampler's most likely ones make the bounds tight, and with all V
    tokens both are the exact value. Sparrow counts only tokens among the most likely of both policies, so its numbers
    are at most the lower bound here.

    Args:
        dense_logprobs: (..., K) log-probabilities under the dense policy.
        sparse_logprobs: (..., K) log-probabilities under the sparse policy at the same tokens.

    Returns:
        ``lower`` and ``upper`` (...), which enclose :func:`exact_acceptance`; 0 <= lower <= upper <= 1 whatever is
        rounded.
    """
    lower = exact_acceptance(dense_logprobs, sparse_logprobs)
    left = torch.minimum(1 - dense_logprobs.exp().sum(dim=-1), 1 - sparse_logprobs.exp().sum(dim=-1))
    return lower, (lower + left.clamp(min=0)).clamp(max=1)


def sampled_acceptance(dense_logprobs: Tensor, sparse_logprobs: Tensor) -> Tensor:
    """min(1, p_dense / p_sparse) of tokens that the sparse policy drew.

    Its mean is an unbiased estimate of the mean acceptance. Its percentiles are another quantity than the acceptance's:
    a single token says little about its distribution.

    Args:
        dense_logprobs: (...) of the tokens drawn, ``Rollout.old_logprobs``.
        sparse_logprobs: (...) of the tokens drawn, ``Rollout.sampler_logprobs``.

    Returns:
        (...), between 0 and 1.
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
    """Bounds of the acceptance at every token of a rollout, by one dense forward pass without gradient.

    Args:
        model: The policy with the weights that drew the rollout.
        rollout: With the sampler's most likely tokens, ``SamplingParams(top_logprobs=K)``.
        temperature: The sampler's temperature, 1 for greedy rollouts.
        chunk_size: As in ``sequence_logprobs``.
        head_in_float32: As in ``sequence_logprobs``.

    Returns:
        ``lower`` and ``upper`` (B, T), 0 outside the completions. Index t speaks of the distribution that token t was
        drawn from.

    Raises:
        ValueError: If the rollout carries no such tokens.
    """
    if rollout.topk_ids is None or rollout.topk_logprobs is None:
        raise ValueError(
            "This rollout does not say what the sampler's most likely tokens were (rollout.topk_ids is None). Sample "
            "with top_logprobs=20, in SamplingParams or as model.top_logprobs."
        )
    mask = rollout.completion_mask
    dense = logprobs_at(
        model, rollout.sequences, rollout.topk_ids, mask, temperature, chunk_size, head_in_float32
    )  # (B, T, K)
    lower, upper = acceptance_bounds(dense, rollout.topk_logprobs)
    return lower * mask, upper * mask


def tail_target(ceiling: float, target: float = PUBLISHED_TARGET) -> float:
    """The 5th percentile to hold, a published target scaled to one's own ceiling.

    Kernels, precision and K move the acceptance of two dense policies, so a published number means nothing without the
    ceiling it was measured under (0.945).

    Args:
        ceiling: The same statistic between one's own dense sampler and dense learner.
        target: Under the published ceiling.
    """
    return target * ceiling / PUBLISHED_CEILING
