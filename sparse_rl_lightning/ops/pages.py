"""Pages: neighbouring entries that are read or left together, what is kept of them, and which a query reads.

Letters: G query heads of a group, Q queries, P pages, C vectors kept of each page, D head size. Page p of a head holds
its entries from ``p * page_size`` on; only the last one may be incomplete, and it is always read.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.ops.select import rank_entries

PageReduction = Literal["mean", "max"]
"""Over the query heads of a group, which read the same pages: the mean of their scores or the largest."""


def page_counts(lengths: Tensor, page_size: int) -> Tensor:
    """Pages that so many entries fill, the incomplete one included."""
    return (lengths + page_size - 1) // page_size


def page_means(keys: Tensor) -> Tensor:
    """The mean key of each page: (..., page_size, D) to (..., 1, D), summed at least in float32, of the keys' type."""
    return keys.to(accumulation_dtype(keys.dtype)).mean(dim=-2, keepdim=True).to(keys.dtype)


def page_bounds(keys: Tensor) -> Tensor:
    """Largest and smallest key of each page, element by element: (..., page_size, D) to (..., 2, D)."""
    return torch.stack([keys.amax(dim=-2), keys.amin(dim=-2)], dim=-2)


def page_scores(queries: Tensor, summaries: Tensor, reduction: PageReduction) -> Tensor:
    """How much each query wants each page, one number for a group of query heads.

    With one vector per page, its mean key c, the score is q . c. With two, the bounds u and l, it is
    ``sum_i max(q_i u_i, q_i l_i)``, which no key of the page exceeds: positive elements of q meet u, negative ones l.

    Args:
        queries: (..., G, Q, D).
        summaries: (..., C, P, D), what :func:`page_means` or :func:`page_bounds` made.
        reduction: Over G.

    Returns:
        (..., Q, P), at least float32.
    """
    assert reduction in ("mean", "max"), reduction
    dtype = accumulation_dtype(summaries.dtype)
    wide = queries.to(dtype)
    parts = [wide] if summaries.shape[-3] == 1 else [wide.clamp(min=0), wide.clamp(max=0)]
    if reduction == "mean":
        parts = [part.mean(dim=-3, keepdim=True) for part in parts]
    vectors = summaries.to(dtype).unsqueeze(-4).unbind(-3)  # each (..., 1, P, D)
    with torch.autocast(queries.device.type, enabled=False):  # mixed-precision training would round them to bf16
        products = [part @ vector.mT for part, vector in zip(parts, vectors, strict=True)]
    return torch.stack(products).sum(dim=0).amax(dim=-3)


def keep_pages(scores: Tensor, counts: Tensor, limits: Tensor, num_first: int, num_last: int) -> Tensor:
    """The pages to read: the first, the last, and the best scores among the rest; exact ties go to the lowest index.

    Args:
        scores: (..., P) float, NaN counts as -inf; those of pages that are always read, or not there, do not matter.
        counts: Pages that are there, broadcasts to (...).
        limits: Pages to read, at least ``num_first + num_last``; broadcasts to (...).
        num_first: First pages that are always read.
        num_last: Last pages that are always read.

    Returns:
        (..., P) bool.
    """
    index = torch.arange(scores.shape[-1], device=scores.device)
    there = index < counts.unsqueeze(-1)
    pinned = there & ((index < num_first) | (index >= counts.unsqueeze(-1) - num_last))
    classes = (there.to(torch.int8) + pinned.to(torch.int8)).expand(scores.shape)
    rank = rank_entries(scores.masked_fill(scores.isnan(), -torch.inf), classes)
    return there & (rank < limits.unsqueeze(-1))


def list_pages(keep: Tensor, width: int) -> Tensor:
    """The pages of ``keep`` (..., P) bool as ascending numbers (..., width) int32, -1 behind the last; width <= P."""
    order = keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    there = torch.arange(width, device=keep.device) < keep.sum(dim=-1, keepdim=True)
    return torch.where(there, order, -1).to(torch.int32)
