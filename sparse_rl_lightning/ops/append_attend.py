"""append_attend: ``append`` and ``decode_attention``, one after the other, for devices that do both in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.append import reference as append_reference
from sparse_rl_lightning.ops.decode_attention import empty_partials
from sparse_rl_lightning.ops.decode_attention import reference as attention_reference
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools


def append_attend(
    pools: KVPools, slots: Tensor, seen: Tensor, projected: Tensor, query_ring: Tensor | None,
    transform: QKTransform, scale: float, max_length: int,
) -> Tensor:  # fmt: skip
    """Write one token per slot, and attend over the slot's entries with its query, that token included.

    Arguments, results and errors are those of :func:`~sparse_rl_lightning.ops.append` and
    :func:`~sparse_rl_lightning.ops.decode_attention`, bit for bit.

    Args:
        pools: Pools of one layer, (S, H); lengths grow by one.
        slots: Slots (B), int64, each at most once, -1 for a row to skip.
        seen: Positions (S), int64, of each slot's new token.
        projected: Queries, keys and values (B, Hq + 2 H, D) of the new tokens.
        query_ring: Recent queries (S, Hq, A, D).
        transform: Norms and angles of queries and keys.
        scale: Factor on q.k before the softmax.
        max_length: Upper bound of the entries of a head, the new one among them.

    Returns:
        The result (B, Hq, D), zeros in rows to skip.
    """
    rows, heads, dim = projected.shape
    query = projected.new_empty(rows, heads - 2 * pools.offsets.shape[-1], dim)
    out = torch.empty_like(query)
    call(
        "append_attend", pools.keys, projected, transform.query_norm, transform.key_norm, transform.epsilon,
        transform.cos, transform.sin, slots, seen, pools.offsets, pools.capacities, pools.keys, pools.values,
        pools.positions, pools.lengths, query_ring, query, scale, max_length, out,
        empty_partials(query, max_length), pools.errors,
    )  # fmt: skip
    return out


def reference(
    projected: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float, cos: Tensor | None,
    sin: Tensor | None, slots: Tensor, seen: Tensor, offsets: Tensor, capacities: Tensor, key_pool: Tensor,
    value_pool: Tensor, position_pool: Tensor, lengths: Tensor, query_ring: Tensor | None, query: Tensor, scale: float,
    max_length: int, out: Tensor, partials: Tensor | None, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``append_attend`` in PyTorch."""
    append_reference(
        projected, query_norm, key_norm, epsilon, cos, sin, slots, seen, offsets, capacities, key_pool, value_pool,
        position_pool, lengths, query_ring, query,
    )  # fmt: skip
    attention_reference(query, key_pool, value_pool, slots, offsets, lengths, scale, max_length, out, None, None)


register("append_attend", reference)
