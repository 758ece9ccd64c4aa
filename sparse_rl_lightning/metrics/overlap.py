"""How much two next-token distributions overlap: exactly, and bounded from a few log-probabilities of each.

The overlap sum_v min(p_v, q_v) = 1 - total variation is the probability with which speculative sampling would
accept a token drawn from q as one of p (Sparrow, arXiv 2606.08446, calls it acceptance).
"""

from __future__ import annotations

import torch
from torch import Tensor


def distribution_overlap(logp: Tensor, logq: Tensor) -> Tensor:
    """The exact overlap sum_v min(p_v, q_v), between 0 (disjoint) and 1 (equal).

    Args:
        logp: (..., V) normalised log-probabilities.
        logq: (..., V) normalised log-probabilities.

    Returns:
        (...).
    """
    return torch.minimum(logp, logq).exp().sum(dim=-1)


def overlap_bounds(topk_logprobs: Tensor, other_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the overlap of two distributions from their log-probabilities at K distinct tokens.

    The K tokens overlap by a known amount. The rest overlap by 0 or more, and by no more than the smaller of the
    two probabilities left. Any K tokens will do; the sampler's most likely ones make the bounds tight.

    Args:
        topk_logprobs: (..., K) log-probabilities of one distribution.
        other_logprobs: (..., K) log-probabilities of the other at the same tokens.

    Returns:
        ``lower`` and ``upper`` (...), which enclose :func:`distribution_overlap`.
    """
    lower = distribution_overlap(topk_logprobs, other_logprobs)
    left = torch.minimum(1 - topk_logprobs.exp().sum(dim=-1), 1 - other_logprobs.exp().sum(dim=-1))
    return lower, lower + left.clamp(min=0)
