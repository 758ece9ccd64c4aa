"""prefill_mass: the attention that every key of a prompt receives, added up chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.float8 import computing_dtype
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import (
    KVPools,
    accumulation_dtype,
    check,
    check_groups,
    check_numbers,
    check_runs,
    gather_heads,
)


def accumulate_mass(
    pools: KVPools, slots: Tensor, queries: Tensor, query_start: Tensor, scale: float, mass: Tensor
) -> Tensor:
    """Add the causal attention of a chunk of prompt queries to the mass of each key, summed over the heads of a group.

    Entry i of a head stands at position i: prompts are not evicted from before their last chunk. Queries at or behind
    a head's length are padding. Only rows of a few queries are held at a time, never the attention matrix.

    Args:
        pools: One layer, (S, H), the keys of the chunk already in it; values are not used.
        slots: (B) int64, -1 for a row to skip.
        queries: (B, Hq, C, D) post-RoPE.
        query_start: (B) int64, position of the first query of each row.
        scale: Factor on q.k before the softmax.
        mass: (B, H, N) float32 (float64 for float64 pools), added to; divide by the group size for the mean.

    Returns:
        (B, Hq, C) log-sum-exp of each query's scaled logits, -inf for padding.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
    """
    lse = torch.empty(queries.shape[:3], dtype=accumulation_dtype(queries.dtype), device=pools.keys.device)

    def check_all() -> None:
        pools.check(2)
        check("slots", slots, pools.keys, torch.int64, (None,))
        dtype = computing_dtype(pools.keys.dtype, queries.dtype)
        check("queries", queries, pools.keys, dtype, (len(slots), None, None, pools.keys.shape[1]))
        check("query_start", query_start, pools.keys, torch.int64, (len(slots),))
        check("mass", mass, pools.keys, lse.dtype, (len(slots), pools.offsets.shape[1], None))
        check_groups("queries", queries, pools)

    call(
        "prefill_mass", pools.keys, check_all, queries, query_start, pools.keys, slots, pools.offsets, pools.lengths,
        scale, mass, lse, pools.errors,
    )  # fmt: skip
    return lse


def mass_reference(
    queries: Tensor, query_start: Tensor, key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor,
    scale: float, mass: Tensor, lse: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``prefill_mass`` in PyTorch."""
    check_runs(slots, offsets, lengths, mass.shape[2], len(key_pool))
    check_numbers("query_start", query_start[slots >= 0])
    held = lengths[slots.clamp(min=0)] * (slots >= 0)[:, None]  # (B, H)
    rows, live = gather_heads(offsets[slots.clamp(min=0)], held, mass.shape[2])
    keys = key_pool[rows].to(lse.dtype)  # (B, H, N, D)
    index = torch.arange(mass.shape[2], device=mass.device)
    heads = (*held.shape, queries.shape[1] // held.shape[1], queries.shape[3])
    for chunk in range(queries.shape[2]):  # a query at a time: (B, H, G, N)
        at = (query_start + chunk)[:, None]
        grouped = queries[:, :, chunk].to(lse.dtype).reshape(heads)
        visible = (live & (index <= at.unsqueeze(-1)) & (at < held).unsqueeze(-1)).unsqueeze(2)
        logits = (grouped @ keys.mT * scale).masked_fill(~visible, -torch.inf)
        total = logits.logsumexp(dim=-1, keepdim=True)
        shares = (logits - total.masked_fill(total == -torch.inf, 0.0)).exp().masked_fill(~visible, 0.0)
        mass.add_(shares.sum(dim=2))
        lse[:, :, chunk] = total.flatten(1)


register("prefill_mass", mass_reference)
