"""window_importance: attention that the most recent queries pay to every cached key."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_choice
from sparse_rl_lightning.ops.checks import check_runs
from sparse_rl_lightning.ops.entries import CachedEntries, dense_pools, heads_of, scratch_for
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, accumulation_dtype, live_entries

GroupReduction = Literal["max", "mean"]
QueryReduction = Literal["mean", "sum"]
Pooling = Literal["max", "avg", "none"]
Options = tuple[int, bool, GroupReduction, QueryReduction, Pooling, int]


def window_importance(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    lengths: Tensor,
    positions: Tensor,
    scale: float,
    *,
    window: int,
    exclude_window: bool = True,
    group_reduction: GroupReduction = "max",
    query_reduction: QueryReduction = "mean",
    pooling: Pooling = "max",
    kernel_size: int = 7,
) -> Tensor:
    """Compute the attention from the recent queries to entries before the observation window, pooled over neighbors.

    The order of the operations: logits; ``group_reduction="max"`` over the query heads of a group; softmax; mean
    or sum over the queries; pooling; ``group_reduction="mean"``. A query sees the entries at its own position and
    before. Every (slot, head) row is independent: neither other rows nor free memory can change its result.

    Args:
        queries: Queries (S, Hq, A, D), post-RoPE, in any order; Hq is a multiple of H, the heads of a group are
            adjacent.
        query_positions: Positions (S, A), int64, of the queries, -1 for an absent query, whose content is not used.
        keys: Keys (S, H, N, D), post-RoPE, in the order of their positions, live ones first; a view will do.
        lengths: Number of live entries (S, H).
        positions: True token positions (S, H, N), int64.
        scale: Factor on q.k before the softmax.
        window: Number of last live entries of a row that are the observation window. They get 0 and are left out of the
            pooling.
        exclude_window: Whether the softmax is over the live entries outside the window (R-KV) or all of them (SnapKV).
        group_reduction: Reduction over a group: "max" of the logits before the softmax (R-KV) or "mean" of the
            importance (kvpress).
        query_reduction: Reduction over the queries present: "mean" (R-KV) or "sum" (SnapKV).
        pooling: Pooling over ``kernel_size`` entries with stride 1: "max", "avg" or "none". The average divides by
            ``kernel_size`` at the borders too (SnapKV's ``avg_pool1d`` with its counted zero padding).
        kernel_size: Odd number of entries.

    Returns:
        The importance (S, H, N), 0 in the window and in free memory; float64 if the keys are, else float32.
    """
    pools, slots = dense_pools(keys, lengths, positions)
    importance = torch.empty(1, *keys.shape[:3], dtype=accumulation_dtype(keys.dtype), device=keys.device)
    options = (window, exclude_window, group_reduction, query_reduction, pooling, kernel_size)
    _run(pools, queries[None].contiguous(), slots, slots, scale, options, query_positions.contiguous(), importance)
    return importance[0]


def cached_importance(
    entries: CachedEntries,
    *,
    window: int,
    exclude_window: bool = True,
    group_reduction: GroupReduction = "max",
    query_reduction: QueryReduction = "mean",
    pooling: Pooling = "max",
    kernel_size: int = 7,
) -> Tensor:
    """Compute :func:`window_importance` in all layers of the cache: (L, B, H, N), 0 in rows to skip."""
    importance, options = entries.scores(), (window, exclude_window, group_reduction, query_reduction, pooling)
    _run(
        entries.pools, entries.queries, entries.slots, entries.seen, entries.scale, (*options, kernel_size), None,
        importance,
    )  # fmt: skip
    return importance


def _run(
    pools: KVPools, ring: Tensor, slots: Tensor, seen: Tensor, scale: float, options: Options, at: Tensor | None,
    importance: Tensor,
) -> None:  # fmt: skip
    _check_options(options[0], *options[2:])
    num_rows = ring.shape[3] + 1 if ring.dim() == 5 else 1
    call(
        "window_importance", pools.keys, ring, pools.keys, pools.positions, slots, seen, pools.offsets, pools.lengths,
        scale, *options, at, importance, scratch_for(importance, num_rows), pools.errors,
    )  # fmt: skip


@cache
def _check_options(window: int, group: str, query: str, pooling: str, kernel_size: int) -> None:
    check_choice("group_reduction", group, GroupReduction)
    check_choice("query_reduction", query, QueryReduction)
    check_choice("pooling", pooling, Pooling)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise UserError(f"kernel_size must be an odd number of entries, got kernel_size={kernel_size}.")
    if window < 0:
        raise UserError(f"window must be 0 or more entries, got window={window}.")


def reference(
    query_ring: Tensor, key_pool: Tensor, position_pool: Tensor, slots: Tensor, seen: Tensor, offsets: Tensor,
    lengths: Tensor, scale: float, window: int, exclude_window: bool, group_reduction: GroupReduction,
    query_reduction: QueryReduction, pooling: Pooling, kernel_size: int, query_positions: Tensor | None,
    importance: Tensor, scratch: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``window_importance`` in PyTorch."""
    width = importance.shape[-1]
    check_runs(slots, offsets, lengths, width, len(key_pool))
    importance.zero_()
    used, keys, valid, rows = heads_of(key_pool, slots, offsets, lengths, width)
    if not valid.numel():
        return
    at = ring_positions(seen, query_ring.shape[3]) if query_positions is None else query_positions
    at, outside = at[slots[used]], live_entries(lengths[:, slots[used]] - window, width)
    # layers are so many slots more
    positions = position_pool[rows].flatten(0, 1)
    at, valid, outside = at.repeat(len(offsets), 1), valid.flatten(0, 1), outside.flatten(0, 1)
    attended = outside if exclude_window else valid
    visible = attended.unsqueeze(2) & (positions.unsqueeze(2) <= at[:, None, :, None])  # (S, H, A, N)
    queries = query_ring[:, slots[used]].flatten(0, 1)
    logits = group_logits(queries, keys.flatten(0, 1).to(importance.dtype), scale)  # (S, H, G, A, N)
    if group_reduction == "max":
        logits = logits.amax(dim=2, keepdim=True)
    hidden = ~visible.unsqueeze(2) | (logits == -torch.inf)  # absent queries, at position -1, see nothing
    # a query that sees nothing has a softmax of NaN, free memory may have NaN: both are removed here
    paid = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).masked_fill(hidden, 0.0).sum(dim=3)  # (S, H, G, N)
    if query_reduction == "mean":
        paid = paid / (at >= 0).sum(dim=-1).clamp(min=1)[:, None, None, None]
    pooled = pool_entries(paid, outside.unsqueeze(2), pooling, kernel_size).mean(dim=2)
    importance[:, used] = pooled.view(len(offsets), -1, *pooled.shape[1:])


def ring_positions(seen: Tensor, count: int) -> Tensor:
    """The positions (S, A) of the queries in a ring of ``count`` places after ``seen`` tokens (S,), -1 for none yet."""
    last = seen[:, None] - 1
    ring = torch.arange(count, device=seen.device)
    # each place has the newest position that is the place modulo the ring's size
    return (last - (last - ring) % max(count, 1)).clamp(min=-1)


def pool_entries(values: Tensor, inside: Tensor, pooling: Pooling, kernel_size: int) -> Tensor:
    """Pool neighbors (..., N) by maximum or average, as if only the first entries, those ``inside``, existed.

    The mask ``inside``, bool, broadcasts to (..., N). Missing neighbors count as zeros in an average. What is not
    inside becomes 0.
    """
    if pooling == "none":
        return values.masked_fill(~inside, 0.0)
    rows = values.masked_fill(~inside, -torch.inf if pooling == "max" else 0.0).flatten(end_dim=-2)
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    pooled = pool(rows, kernel_size, stride=1, padding=kernel_size // 2)
    return pooled.view(values.shape).masked_fill(~inside, 0.0)


def group_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The scaled products (S, H, G, A, N) of every query with the keys of its group, at least in float32."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    slots, heads, num_entries, dim = keys.shape
    group, num_queries = queries.shape[1] // heads, queries.shape[2]
    stacked = queries.to(dtype).reshape(slots, heads, group * num_queries, dim)
    with torch.autocast(keys.device.type, enabled=False):  # mixed-precision training would round them to bf16
        logits = torch.matmul(stacked, keys.to(dtype).mT).mul_(scale)
    return logits.view(slots, heads, group, num_queries, num_entries)


register("window_importance", reference, differentiable=True)
