"""summarize_pages, select_pages: what is kept of every page of a slot, and which pages a new token reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.float8 import FLOAT8
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pages import (
    PageReduction,
    keep_pages,
    list_pages,
    page_bounds,
    page_counts,
    page_means,
    page_scores,
)
from sparse_rl_lightning.ops.pools import (
    KVPools,
    accumulation_dtype,
    check,
    check_groups,
    check_numbers,
    check_runs,
    check_slots,
)


def summarize_pages(
    pools: KVPools, slots: Tensor, page_size: int, summaries: Tensor, *, newest_only: bool = False
) -> None:
    """Write down the mean key, or the bounds of the keys, of every complete page of these slots.

    An incomplete page is left as it is: it is always read.

    Args:
        pools: One layer, (S, H).
        slots: (B) int64, -1 for a row to skip.
        page_size: Entries of a page.
        summaries: (S, H, C, P, D) of the pools' type; C = 1 takes means, C = 2 the largest and the smallest elements.
        newest_only: Look only at the page that the newest entry has completed, if it has.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
        RuntimeError: If a head has more pages than ``summaries``; on a GPU by ``pools.raise_errors``.
    """

    def check_all() -> None:
        refuse_float8(pools)
        pools.check(2)
        check("slots", slots, pools.keys, torch.int64, (None,))
        _check_summaries(summaries, pools, page_size)

    call(
        "summarize_pages", pools.keys, check_all, pools.keys, slots, pools.offsets, pools.lengths, page_size,
        newest_only, summaries, pools.errors,
    )  # fmt: skip


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
    """Which pages one query token per slot reads: the first, the last, and the best scores among the rest.

    The score is that of :func:`sparse_rl_lightning.ops.pages.page_scores`; exact ties go to the lowest index. A head
    with no more pages than its limit reads all of them and scores none.

    Args:
        pools: One layer, (S, H).
        slots: (B) int64, -1 for a row to skip.
        query: (B, Hq, D) post-RoPE.
        summaries: (S, H, C, P, D), as :func:`summarize_pages` wrote them.
        limits: (B) int32, pages that each row reads.
        page_size: Entries of a page.
        num_first: First pages that are always read.
        num_last: Last pages that are always read, at least 1: the incomplete one.
        reduction: Over the query heads of a group.
        width: K, no row reads more pages.

    Returns:
        Pages (B, H, K) int32, ascending, -1 behind the last, and scores (B, H, P) float32 (float64 for float64 pools)
        of the pages that competed, 0 elsewhere.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout, or a number is out of range.
        RuntimeError: If a head has more pages than ``summaries``, or a row reads more than ``width``; on a GPU by
            ``pools.raise_errors``.
    """
    rows, heads, device = slots.shape[0], pools.offsets.shape[1], pools.keys.device
    pages = torch.empty(rows, heads, width, dtype=torch.int32, device=device)
    shape = (rows, heads, summaries.shape[3] if summaries.dim() == 5 else 0)
    scores = torch.empty(shape, dtype=accumulation_dtype(pools.keys.dtype), device=device)

    def check_all() -> None:
        refuse_float8(pools)
        pools.check(2)
        check("slots", slots, pools.keys, torch.int64, (None,))
        check("query", query, pools.keys, pools.keys.dtype, (rows, None, pools.keys.shape[1]))
        check_groups("query", query, pools)
        _check_summaries(summaries, pools, page_size)
        check("limits", limits, pools.keys, torch.int32, (rows,))
        if num_first < 0 or num_last < 1:
            raise UserError(
                f"num_first must not be negative and num_last at least 1, got num_first={num_first}, "
                f"num_last={num_last}."
            )

    call(
        "select_pages", pools.keys, check_all, query, summaries, slots, pools.lengths, limits, page_size, num_first,
        num_last, reduction == "max", scores, pages, pools.errors,
    )  # fmt: skip
    return pages, scores


def refuse_float8(pools: KVPools) -> None:
    """Pages are not read from pools of eight bits: their means and bounds would need another type.

    Raises:
        ValueError: If the pools are float8.
    """
    if pools.keys.dtype == FLOAT8:
        raise UserError("pages are not read from float8 pools: keep keys and values in bfloat16, float16 or float32.")


def _check_summaries(summaries: Tensor, pools: KVPools, page_size: int) -> None:
    (num_slots, num_heads), dim = pools.offsets.shape, pools.keys.shape[1]
    check("summaries", summaries, pools.keys, pools.keys.dtype, (num_slots, num_heads, None, None, dim))
    if summaries.shape[2] not in (1, 2):
        raise UserError(f"summaries have {summaries.shape[2]} vectors per page, expected 1 (means) or 2 (bounds).")
    if page_size < 1:
        raise UserError(f"page_size must be at least 1 entry, got page_size={page_size}.")


def write_summaries(
    key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, page_size: int, newest_only: bool,
    summaries: Tensor, summarize: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """The op ``summarize_pages`` in PyTorch, for any function from (..., page_size, D) keys to (..., C, D) vectors."""
    check_runs(slots, offsets, lengths, summaries.shape[3] * page_size, len(key_pool))
    slots = slots[slots >= 0]
    held = lengths[slots].long()  # (B, H)
    if newest_only:
        page = (held // page_size - 1).unsqueeze(-1)  # (B, H, 1)
        done = (page >= 0) & (held % page_size == 0).unsqueeze(-1)
    else:
        page = torch.arange(summaries.shape[3], device=held.device).expand(*held.shape, -1)
        done = (page + 1) * page_size <= held.unsqueeze(-1)
    row, head, place = done.nonzero(as_tuple=True)
    page, slot = page[row, head, place], slots[row]  # (n,)
    entries = page[:, None] * page_size + torch.arange(page_size, device=held.device)
    summaries[slot, head, :, page] = summarize(key_pool[offsets[slot, head, None] + entries])


def summary_reference(
    key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, page_size: int, newest_only: bool,
    summaries: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``summarize_pages`` in PyTorch."""
    summarize = page_means if summaries.shape[2] == 1 else page_bounds
    write_summaries(key_pool, slots, offsets, lengths, page_size, newest_only, summaries, summarize)


def select_reference(
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
    own = page_scores(grouped, summaries[at], "max" if group_max else "mean").squeeze(2)
    index = torch.arange(num_pages, device=counts.device)
    competes = (index >= num_first) & (index < (counts - num_last).unsqueeze(-1)) & (counts > limit).unsqueeze(-1)
    scores.copy_(own.masked_fill(~competes, 0.0))
    keep = keep_pages(scores, counts, limit, num_first, num_last)
    width = min(pages.shape[2], num_pages)
    pages.fill_(-1)[..., :width] = list_pages(keep, width)


register("summarize_pages", summary_reference)
register("select_pages", select_reference)
