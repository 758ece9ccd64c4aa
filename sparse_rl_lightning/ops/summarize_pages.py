"""summarize_pages: vectors that summarize every page of a slot.

Pages are neighboring entries that are read together. Page p of a head has its entries from ``p * page_size`` on; only
the last one may be incomplete, and it is always read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.checks import check_runs
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import FLOAT8, KVPools, accumulation_dtype


def summarize_pages(
    pools: KVPools, slots: Tensor, page_size: int, summaries: Tensor, *, newest_only: bool = False
) -> None:
    """Write the mean key, or the bounds of the keys, of every complete page of these slots.

    An incomplete page is left unchanged: it is always read.

    Args:
        pools: Pools of one layer, (S, H).
        slots: Slots (B), int64, -1 for a row to skip.
        page_size: Number of entries of a page.
        summaries: Output (S, H, C, P, D) of the pools' type; with C = 1 means, with C = 2 the largest and the smallest
            elements.
        newest_only: Whether to summarize only the page that the newest entry has completed, if it has.

    Raises:
        RuntimeError: If a head has more pages than ``summaries``; on a GPU by ``pools.raise_errors``.
    """
    check_pages(pools, page_size)
    call(
        "summarize_pages", pools.keys, pools.keys, slots, pools.offsets, pools.lengths, page_size, newest_only,
        summaries, pools.errors,
    )  # fmt: skip


def check_pages(pools: KVPools, page_size: int) -> None:
    """Refuse float8 pools, whose means and bounds would need another type, and pages without entries."""
    if pools.keys.dtype == FLOAT8:
        raise UserError("pages are not read from float8 pools: keep keys and values in bfloat16, float16 or float32.")
    if page_size < 1:
        raise UserError(f"page_size must be at least 1 entry, got page_size={page_size}.")


def page_means(keys: Tensor) -> Tensor:
    """The mean key of each page: (..., page_size, D) to (..., 1, D), summed at least in float32, of the keys' type."""
    return keys.to(accumulation_dtype(keys.dtype)).mean(dim=-2, keepdim=True).to(keys.dtype)


def page_bounds(keys: Tensor) -> Tensor:
    """The largest and smallest key of each page, element by element: (..., page_size, D) to (..., 2, D)."""
    return torch.stack([keys.amax(dim=-2), keys.amin(dim=-2)], dim=-2)


def write_summaries(
    key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, page_size: int, newest_only: bool,
    summaries: Tensor, summarize: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """The op ``summarize_pages`` in PyTorch, for any function from (..., page_size, D) keys to (..., C, D) vectors."""
    check_runs(slots, offsets, lengths, summaries.shape[3] * page_size, len(key_pool))
    slots = slots[slots >= 0]
    counts = lengths[slots].long()  # (B, H)
    if newest_only:
        page = (counts // page_size - 1).unsqueeze(-1)  # (B, H, 1)
        done = (page >= 0) & (counts % page_size == 0).unsqueeze(-1)
    else:
        page = torch.arange(summaries.shape[3], device=counts.device).expand(*counts.shape, -1)
        done = (page + 1) * page_size <= counts.unsqueeze(-1)
    row, head, index = done.nonzero(as_tuple=True)
    page, slot = page[row, head, index], slots[row]  # (n,)
    entries = page[:, None] * page_size + torch.arange(page_size, device=counts.device)
    summaries[slot, head, :, page] = summarize(key_pool[offsets[slot, head, None] + entries])


def reference(
    key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, page_size: int, newest_only: bool,
    summaries: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``summarize_pages`` in PyTorch."""
    if summaries.shape[2] not in (1, 2):
        raise UserError(f"summaries have {summaries.shape[2]} vectors per page, expected 1 (means) or 2 (bounds).")
    summarize = page_means if summaries.shape[2] == 1 else page_bounds
    write_summaries(key_pool, slots, offsets, lengths, page_size, newest_only, summaries, summarize)


register("summarize_pages", reference)
