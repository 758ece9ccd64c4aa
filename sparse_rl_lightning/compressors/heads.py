"""One score for all heads of a layer, although its heads may hold different tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

HeadReduction = Literal["max", "mean"]
"""Over the heads that hold a token: its best score, or the mean."""

_NOWHERE = torch.iinfo(torch.int64).max


def across_heads(scores: Tensor, positions: Tensor, valid: Tensor, reduction: HeadReduction) -> Tensor:
    """Give a token the same score in every head that holds it.

    Heads that always keep the same tokens hold the same token at the same entry. Budgets per head, or a mixture with
    scores that differ from head to head, end that, so tokens are found by their positions.

    Args:
        scores: (S, H, N) float.
        positions: (S, H, N) true positions, increasing over the live entries of a row.
        valid: (S, H, N) bool, live entries, first in their rows.
        reduction: "max" or "mean" over the heads that hold the token.

    Returns:
        (S, H, N), 0 in free memory.
    """
    assert reduction in ("max", "mean"), reduction
    ordered = positions.masked_fill(~valid, _NOWHERE)
    wanted = ordered.flatten(1)  # (S, H x N)
    total = torch.zeros_like(scores) if reduction == "mean" else torch.full_like(scores, -torch.inf)
    holders = torch.zeros_like(scores)
    for head in range(scores.shape[1]):
        there = ordered[:, head].contiguous()  # (S, N)
        index = torch.searchsorted(there, wanted).clamp(max=there.shape[1] - 1)
        found = (there.gather(1, index) == wanted).view_as(scores)  # free memory is cut at the end
        score = scores[:, head].gather(1, index).view_as(scores)
        if reduction == "max":
            total = torch.where(found, torch.maximum(total, score), total)
        else:
            total = torch.where(found, total + score, total)
        holders += found
    result = total if reduction == "max" else total / holders.clamp(min=1)
    return result.masked_fill(~valid, 0.0)
