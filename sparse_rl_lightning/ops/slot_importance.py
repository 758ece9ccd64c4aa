"""window_importance: attention of the recent queries to the entries of a slot, straight from the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.float8 import computing_dtype, to_computed
from sparse_rl_lightning.ops.importance import GroupReduction, Pooling, QueryReduction, window_importance
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, accumulation_dtype, check, check_groups, check_runs, gather_heads


def score_importance(
    pools: KVPools,
    slots: Tensor,
    queries: Tensor,
    query_positions: Tensor,
    scale: float,
    num_entries: int,
    *,
    window: int,
    exclude_window: bool = True,
    group_reduction: GroupReduction = "max",
    query_reduction: QueryReduction = "mean",
    pooling: Pooling = "max",
    kernel_size: int = 7,
) -> Tensor:
    """Attention from the recent queries to the entries before the observation window, pooled over neighbours.

    The options and the mathematics are those of :func:`sparse_rl_lightning.ops.importance.window_importance`.

    Args:
        pools: One layer, (S, H).
        slots: (B) int64, -1 for a row to skip.
        queries: (S, Hq, A, D) post-RoPE, in any order.
        query_positions: (S, A) int64, -1 for an absent query.
        scale: Factor on q.k before the softmax.
        num_entries: N, no head holds more.
        window: The last live entries, which get 0.
        exclude_window: Softmax over the entries before the window, or over all.
        group_reduction: "max" of the logits, or "mean" of the result.
        query_reduction: "mean" or "sum".
        pooling: "max", "avg" or "none".
        kernel_size: Odd number of entries.

    Returns:
        (B, H, N) float32 (float64 for float64 pools), 0 in the window and in free memory.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout, or an option is unknown.
    """
    rows, heads = slots.shape[0], pools.offsets.shape[1]
    dtype = accumulation_dtype(queries.dtype)
    scores = torch.empty(rows, heads, num_entries, dtype=dtype, device=pools.keys.device)
    scratch = scores.new_empty(rows, heads, queries.shape[2] + 1 if queries.dim() == 4 else 1, num_entries)

    def check_all() -> None:
        pools.check(2)
        num_slots, dim = pools.offsets.shape[0], pools.keys.shape[1]
        check("slots", slots, pools.keys, torch.int64, (None,))
        kind = computing_dtype(pools.keys.dtype, queries.dtype)
        check("queries", queries, pools.keys, kind, (num_slots, None, None, dim))
        check("query_positions", query_positions, pools.keys, torch.int64, (num_slots, queries.shape[2]))
        check_groups("queries", queries, pools)
        _check_options(window, group_reduction, query_reduction, pooling, kernel_size)

    call(
        "window_importance", pools.keys, check_all, queries, query_positions, pools.keys, pools.positions, slots,
        pools.offsets, pools.lengths, scale, window, exclude_window, group_reduction, query_reduction, pooling,
        kernel_size, scores, scratch, pools.errors,
    )  # fmt: skip
    return scores


def _check_options(window: int, group: str, query: str, pooling: str, kernel_size: int) -> None:
    allowed = {
        "group_reduction": ("max", "mean"),
        "query_reduction": ("mean", "sum"),
        "pooling": ("none", "max", "avg"),
    }
    given = {"group_reduction": group, "query_reduction": query, "pooling": pooling}
    for name, value in given.items():
        if value not in allowed[name]:
            raise UserError(f"{name} must be one of {', '.join(allowed[name])}, got {name}={value!r}.")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise UserError(f"kernel_size must be an odd number of entries, got kernel_size={kernel_size}.")
    if window < 0:
        raise UserError(f"window must be 0 or more entries, got window={window}.")


def importance_reference(
    queries: Tensor, query_positions: Tensor, key_pool: Tensor, position_pool: Tensor, slots: Tensor, offsets: Tensor,
    lengths: Tensor, scale: float, window: int, exclude_window: bool, group_reduction: GroupReduction,
    query_reduction: QueryReduction, pooling: Pooling, kernel_size: int, scores: Tensor, scratch: Tensor,
    errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``window_importance`` in PyTorch."""
    check_runs(slots, offsets, lengths, scores.shape[2], len(key_pool))
    if not scores.numel():
        return
    used = slots >= 0
    slots = slots.clamp(min=0)
    rows, live = gather_heads(offsets[slots], lengths[slots] * used[:, None], scores.shape[2])
    keys = to_computed(key_pool[rows], scores.dtype)
    scores.copy_(
        window_importance(
            queries[slots], query_positions[slots], keys, live, position_pool[rows], scale, window=window,
            exclude_window=exclude_window, group_reduction=group_reduction, query_reduction=query_reduction,
            pooling=pooling, kernel_size=kernel_size,
        )
    )  # fmt: skip


register("window_importance", importance_reference)
