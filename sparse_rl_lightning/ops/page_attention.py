"""page_attention: attention of one new token per slot over some pages of the slot."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.checks import check_runs
from sparse_rl_lightning.ops.decode_attention import attend_rows, empty_partials
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools
from sparse_rl_lightning.ops.summarize_pages import check_pages


def page_attention(
    pools: KVPools,
    slots: Tensor,
    query: Tensor,
    pages: Tensor,
    page_size: int,
    scale: float,
    *,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one query token per slot over the live entries of the listed pages, per KV head.

    With all pages listed it equals :func:`~sparse_rl_lightning.ops.decode_attention`, in the CPU kernels bit for bit. A
    row's result depends only on its own slot.

    Args:
        pools: Pools of one layer, (S, H).
        slots: Slots (B), int64, -1 for a row to skip.
        query: Queries (B, Hq, D); Hq is a multiple of H, the heads of a group are adjacent.
        pages: Pages (B, H, K), int32, ascending, the first -1 ends a list; page p has the entries from ``p *
            page_size`` on.
        page_size: Number of entries of a page.
        scale: Factor on q.k before the softmax.
        lse: Output (B, Hq), float32: the log of the sum of the exponentials of the scaled logits.

    Returns:
        The result (B, Hq, D), of the query's type.

    Raises:
        RuntimeError: If a list names a page that does not exist, by ``pools.raise_errors`` on a GPU; on the CPU also if
            it does not ascend.
    """
    check_pages(pools, page_size)
    out = torch.empty_like(query)
    call(
        "page_attention", pools.keys, query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, pages,
        page_size, scale, out, lse, empty_partials(query, pages.shape[-1] * page_size), pools.errors,
    )  # fmt: skip
    return out


def reference(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor,
    pages: Tensor, page_size: int, scale: float, out: Tensor, lse: Tensor | None, partials: Tensor | None = None,
    errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``page_attention`` in PyTorch."""
    check_runs(slots, offsets, lengths, len(key_pool), len(key_pool))
    at = slots.clamp(min=0)
    counts = (lengths[at] * (slots >= 0)[:, None]).unsqueeze(-1)  # (B, H, 1)
    listed = (pages >= 0).cumprod(dim=-1).bool() & (slots >= 0)[:, None, None]
    first = pages.long() * page_size
    falls = listed[..., 1:] & (first[..., 1:] <= first[..., :-1])
    if bool((listed & (first >= counts)).any() | falls.any()):
        raise RuntimeError("a list of pages does not ascend, or names a page without entries.")
    entries = first.unsqueeze(-1) + torch.arange(page_size, device=pages.device)  # (B, H, K, page_size)
    live = listed.unsqueeze(-1) & (entries < counts.unsqueeze(-1))
    rows = offsets[at][..., None, None] + torch.where(live, entries, 0)
    result, total, _ = attend_rows(query, key_pool, value_pool, rows.flatten(2), live.flatten(2), scale)
    out.copy_(result)
    if lse is not None:
        lse.copy_(total)


register("page_attention", reference)
