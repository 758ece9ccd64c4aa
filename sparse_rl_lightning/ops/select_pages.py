"""select_pages: the choice of the pages that a new token reads.

Letters: G query heads of a group, Q queries, P pages, C vectors of each page, D head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.checks import check_numbers, check_slots
from sparse_rl_lightning.ops.evict import rank_entries
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, accumulation_dtype
from sparse_rl_lightning.ops.summarize_pages import check_pages

PageReduction = Literal["mean", "max"]
"""Reduction over the query heads of a group, which read the same pages: the mean or the maximum of their scores."""


def select_pages(
    pools: KVPools,
    slots: Tensor,
    query: Tensor,
    summaries: Tensor,
    limits: Tensor,
    page_size: int,
    num_first: int,
    num_last: int,
    reduction: PageReduction,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Select the pages that one query token per slot reads: the first, the last, and the best scores among the rest.

    The score is ``page_scores``; exact ties go to the lowest index. A head with no more pages than its limit reads
    all of them without scores.

    Args:
        pools: Pools of one layer, (S, H).
        slots: Slots (B), int64, -1 for a row to skip.
        query: Queries (B, Hq, D), post-RoPE.
        summaries: Vectors (S, H, C, P, D) of the pages, as written by :func:`summarize_pages`.
        limits: Number of pages (B), int32, that each row reads.
        page_size: Number of entries of a page.
        num_first: Number of first pages that are always read.
        num_last: Number of last pages that are always read, at least 1: the incomplete one.
        reduction: Reduction over the query heads of a group.
        width: Limit K of the pages that a row reads.

    Returns:
        The pages (B, H, K), int32, ascending, -1 behind the last, and the scores (B, H, P), float32 (float64 for
        float64 pools), of the pages that competed, 0 elsewhere.

    Raises:
        RuntimeError: If a head has more pages than ``summaries``, or a row reads more than ``width``; on a GPU by
            ``pools.raise_errors``.
    """
    check_pages(pools, page_size)
    if num_first < 0 or num_last < 1:
        raise UserError(
            f"num_first must not be negative and num_last at least 1, got num_first={num_first}, num_last={num_last}."
        )
    shape = (slots.shape[0], pools.offsets.shape[1])
    pages = torch.empty(*shape, width, dtype=torch.int32, device=query.device)
    dtype = accumulation_dtype(query.dtype)
    scores = torch.empty(*shape, summaries.shape[3] if summaries.dim() == 5 else 0, dtype=dtype, device=query.device)
    call(
        "select_pages", summaries, query, summaries, slots, pools.lengths, limits, page_size, num_first, num_last,
        reduction == "max", scores, pages, pools.errors,
    )  # fmt: skip
    return pages, scores


def page_counts(lengths: Tensor, page_size: int) -> Tensor:
    """The number of pages that ``lengths`` entries fill, the incomplete one included."""
    return (lengths + page_size - 1) // page_size


def page_scores(queries: Tensor, summaries: Tensor, reduction: PageReduction) -> Tensor:
    """Score pages for queries (..., G, Q, D) by their vectors (..., C, P, D): (..., Q, P), at least float32.

    With one vector per page, its mean key c, the score is q . c. With two, the bounds u and l, it is
    ``sum_i max(q_i u_i, q_i l_i)``, which no key of the page exceeds: positive elements of q meet u, negative ones l.
    The scores of the G query heads of a group become one.
    """
    assert reduction in ("mean", "max"), reduction
    dtype = accumulation_dtype(summaries.dtype)
    wide = queries.to(dtype)
    parts = [wide] if summaries.shape[-3] == 1 else [wide.clamp(min=0), wide.clamp(max=0)]
    if reduction == "mean":
        parts = [term.mean(dim=-3, keepdim=True) for term in parts]
    vectors = summaries.to(dtype).unsqueeze(-4).unbind(-3)  # each (..., 1, P, D)
    with torch.autocast(queries.device.type, enabled=False):  # mixed-precision training would round them to bf16
        products = [term @ vector.mT for term, vector in zip(parts, vectors, strict=True)]
    return torch.stack(products).sum(dim=0).amax(dim=-3)


def keep_pages(scores: Tensor, counts: Tensor, limits: Tensor, num_first: int, num_last: int) -> Tensor:
    """Choose the pages to read: the first, the last, and the best scores among the rest; ties go to the lowest index.

    NaN among the scores (..., P) counts as -inf; those of pages always read, or not there, do not matter. The numbers
    of pages that exist, and of pages to read, at least ``num_first + num_last``, broadcast to (...).
    """
    index = torch.arange(scores.shape[-1], device=scores.device)
    exists = index < counts.unsqueeze(-1)
    pinned = exists & ((index < num_first) | (index >= counts.unsqueeze(-1) - num_last))
    classes = (exists.to(torch.int8) + pinned.to(torch.int8)).expand(scores.shape)
    rank = rank_entries(scores.masked_fill(scores.isnan(), -torch.inf), classes)
    return exists & (rank < limits.unsqueeze(-1))


def list_pages(keep: Tensor, width: int) -> Tensor:
    """Convert a mask (..., P) of pages to ascending numbers (..., width), int32, -1 behind the last; width <= P."""
    order = keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    is_listed = torch.arange(width, device=keep.device) < keep.sum(dim=-1, keepdim=True)
    return torch.where(is_listed, order, -1).to(torch.int32)


def reference(
    query: Tensor, summaries: Tensor, slots: Tensor, lengths: Tensor, limits: Tensor, page_size: int, num_first: int,
    num_last: int, group_max: bool, scores: Tensor, pages: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``select_pages`` in PyTorch."""
    check_slots(slots, lengths)
    check_numbers("a head's number of entries", lengths[slots[slots >= 0]])
    check_numbers("limits", limits[slots >= 0])
    at, num_pages = slots.clamp(min=0), summaries.shape[3]
    counts = page_counts(lengths[at] * (slots >= 0)[:, None], page_size)  # (B, H)
    if bool((counts > num_pages).any()):
        raise RuntimeError(f"a head holds {int(lengths[at].max())} entries, more than the {num_pages} pages.")
    limit = limits[:, None].expand_as(counts)
    if bool((torch.minimum(counts, limit) > pages.shape[2]).any()):
        raise RuntimeError(f"a row reads more pages than the {pages.shape[2]} that there is room for.")
    grouped = query.view(len(query), counts.shape[1], -1, 1, query.shape[-1])  # (B, H, G, 1, D)
    all_scores = page_scores(grouped, summaries[at], "max" if group_max else "mean").squeeze(2)
    index = torch.arange(num_pages, device=counts.device)
    competes = (index >= num_first) & (index < (counts - num_last).unsqueeze(-1)) & (counts > limit).unsqueeze(-1)
    scores.copy_(all_scores.masked_fill(~competes, 0.0))
    keep = keep_pages(scores, counts, limit, num_first, num_last)
    width = min(pages.shape[2], num_pages)
    pages.fill_(-1)[..., :width] = list_pages(keep, width)


register("select_pages", reference)
