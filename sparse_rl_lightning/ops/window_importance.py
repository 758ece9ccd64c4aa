"""window_importance: attention that the most recent queries pay to every cached key."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_choice
from sparse_rl_lightning.ops.checks import check_numbers
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import accumulation_dtype, dense_heads, live_entries

GroupReduction = Literal["max", "mean"]
QueryReduction = Literal["mean", "sum"]
Pooling = Literal["max", "avg", "none"]


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
    _check_options(window, group_reduction, query_reduction, pooling, kernel_size)
    dtype, shape = accumulation_dtype(keys.dtype), keys.shape[:3]
    importance = torch.empty(shape, dtype=dtype, device=keys.device)
    num_rows = queries.shape[2] + 1 if queries.dim() == 4 else 1
    scratch = torch.empty(*shape[:2], num_rows, shape[-1], dtype=dtype, device=keys.device)
    call(
        "window_importance", keys, queries.contiguous(), query_positions.contiguous(), dense_heads(keys),
        dense_heads(positions), lengths.to(torch.int32).contiguous(), scale, window, exclude_window, group_reduction,
        query_reduction, pooling, kernel_size, importance, scratch,
    )  # fmt: skip
    return importance


def _check_options(window: int, group: str, query: str, pooling: str, kernel_size: int) -> None:
    check_choice("group_reduction", group, GroupReduction)
    check_choice("query_reduction", query, QueryReduction)
    check_choice("pooling", pooling, Pooling)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise UserError(f"kernel_size must be an odd number of entries, got kernel_size={kernel_size}.")
    if window < 0:
        raise UserError(f"window must be 0 or more entries, got window={window}.")


def reference(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, lengths: Tensor, scale: float,
    window: int, exclude_window: bool, group_reduction: GroupReduction, query_reduction: QueryReduction,
    pooling: Pooling, kernel_size: int, importance: Tensor, scratch: Tensor,
) -> None:  # fmt: skip
    """The op ``window_importance`` in PyTorch."""
    check_numbers("a head's number of entries", lengths, keys.shape[2] + 1)
    if not importance.numel():
        return
    valid = live_entries(lengths, keys.shape[2])
    outside = live_entries(lengths - window, keys.shape[2])
    attended = outside if exclude_window else valid
    visible = attended.unsqueeze(2) & (positions.unsqueeze(2) <= query_positions[:, None, :, None])  # (S, H, A, N)
    logits = group_logits(queries, keys, scale)  # (S, H, G, A, N)
    if group_reduction == "max":
        logits = logits.amax(dim=2, keepdim=True)
    hidden = ~visible.unsqueeze(2) | (logits == -torch.inf)  # absent queries, at position -1, see nothing
    # a query that sees nothing has a softmax of NaN, free memory may have NaN: both are removed here
    paid = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).masked_fill(hidden, 0.0).sum(dim=3)  # (S, H, G, N)
    if query_reduction == "mean":
        paid = paid / (query_positions >= 0).sum(dim=-1).clamp(min=1)[:, None, None, None]
    importance.copy_(pool_entries(paid, outside.unsqueeze(2), pooling, kernel_size).mean(dim=2))


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
        logits = torch.matmul(stacked, keys.to(dtype).mT) * scale
    return logits.view(slots, heads, group, num_queries, num_entries)


register("window_importance", reference)
