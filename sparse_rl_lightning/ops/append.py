"""append: one new token per slot, normalized and rotated if requested, written behind the slot's entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.body import normalize
from sparse_rl_lightning.ops.checks import check_numbers, check_runs
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, to_stored


class QKTransform(NamedTuple):
    """The transform of queries and keys before attention: norms and a rotary embedding, each if there is one."""

    cos: Tensor | None = None  # (B, r)
    sin: Tensor | None = None  # (B, r)
    query_norm: Tensor | None = None  # (D)
    key_norm: Tensor | None = None  # (D)
    epsilon: float = 0.0

    def split(self, projected: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, D) and keys (B, H, D), normalized and rotated, and values, from (B, Hq + 2 H, D)."""
        query, key, value = parts(projected, num_kv_heads)
        return (
            _transformed(query, self.query_norm, self.epsilon, self.cos, self.sin),
            _transformed(key, self.key_norm, self.epsilon, self.cos, self.sin),
            value,
        )

    def rounded(self, projected: Tensor, num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, QKTransform]:
        """The heads rounded to another type, after their norms, which read them unrounded; and what is left to do."""
        if projected.dtype == dtype:
            return projected, self
        if self.query_norm is None or self.key_norm is None:
            return projected.to(dtype), self
        query, key, value = parts(projected, num_kv_heads)
        query, key = normalize(query, self.query_norm, self.epsilon), normalize(key, self.key_norm, self.epsilon)
        return torch.cat([query, key, value], dim=1).to(dtype), QKTransform(self.cos, self.sin)


def append(
    pools: KVPools,
    slots: Tensor,
    seen: Tensor,
    projected: Tensor,
    query_ring: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Write one token's key and value at the end of each slot, and its query into the ring of recent queries.

    Queries and keys are normalized first if there are weights for it, then rotated if there are angles; the rotation is
    that of transformers, in which element i pairs with i + r / 2.

    Args:
        pools: Pools of one layer, (S, H); lengths grow by one.
        slots: Slots (B), int64, each at most once, -1 for a row to skip.
        seen: Positions (S), int64, of each slot's new token.
        projected: Queries, keys and values (B, Hq + 2 H, D) of the new tokens. Float8 pools store key and value
            rounded, those beyond +-448 as +-448.
        query_ring: Recent queries (S, Hq, A, D); the query of position p goes to place p modulo A.
        cos: Cosines (B, r), float32 (float64 with float64 pools), r even and at most D; elements from r on are not
            rotated.
        sin: Sines of the same shape and type.
        query_norm: Weights (D) of the root mean square norm of each query head, of the same type.
        key_norm: Weights (D) of the norm of each key head.
        epsilon: Number added to the mean square, at least 0.

    Returns:
        The queries (B, Hq, D), normalized and rotated; zeros in rows to skip.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
        RuntimeError: If a slot is full; on a GPU by ``pools.raise_errors``, the token is dropped.
    """
    rows, heads, dim = projected.shape
    query = projected.new_empty(rows, max(heads - 2 * pools.offsets.shape[-1], 0), dim)
    call(
        "append", pools.keys, projected, query_norm, key_norm, epsilon, cos, sin, slots, seen, pools.offsets,
        pools.capacities, pools.keys, pools.values, pools.positions, pools.lengths, query_ring, query, pools.errors,
    )  # fmt: skip
    return query


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r elements of (B, heads, D) by (B, r) angles; computed at least in float32, rounded once."""
    width = cos.shape[1]
    wide, rest = x[..., :width].to(cos.dtype), x[..., width:]
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([(wide * cos[:, None] + turned * sin[:, None]).to(x.dtype), rest], dim=-1)


def parts(projected: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, Hq, D), keys (B, H, D) and values (B, H, D) of (B, Hq + 2 H, D), as views."""
    first = projected.shape[1] - 2 * num_kv_heads
    return projected[:, :first], projected[:, first:-num_kv_heads], projected[:, -num_kv_heads:]


def _transformed(x: Tensor, weight: Tensor | None, epsilon: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Normalize heads (B, heads, D) if there is a weight, and rotate them if there are angles."""
    if weight is not None:
        x = normalize(x, weight, epsilon)
    return x if cos is None or sin is None else rotate(x, cos, sin)


def reference(
    projected: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float, cos: Tensor | None,
    sin: Tensor | None, slots: Tensor, seen: Tensor, offsets: Tensor, capacities: Tensor, key_pool: Tensor,
    value_pool: Tensor, position_pool: Tensor, lengths: Tensor, query_ring: Tensor | None, query: Tensor,
    errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``append`` in PyTorch."""
    if (cos is None) != (sin is None):
        raise UserError("give both cos and sin, or neither.")
    if cos is not None and (cos.shape[1] % 2 or cos.shape[1] > query.shape[2]):
        most = query.shape[2]
        raise UserError(f"cos has {cos.shape[1]} columns, expected an even number up to head_dim = {most}.")
    if epsilon < 0:
        raise UserError(f"epsilon is {epsilon}, expected 0 or more.")
    heads = offsets.shape[1]
    if projected.shape[1] != query.shape[1] + 2 * heads:
        raise UserError(f"projected has {projected.shape[1]} heads, expected {query.shape[1]} and 2 x {heads}.")
    check_runs(slots, offsets, lengths, capacities, len(key_pool))
    rows = (slots >= 0).nonzero().squeeze(1)
    slots = slots[rows]
    check_numbers("seen", seen[slots])
    at = lengths[slots]  # (B, H)
    if bool((at >= capacities[slots]).any()):
        raise RuntimeError("a slot is full: compress it before the next token.")
    new_query, key, value = parts(projected, heads)
    new_query = _transformed(new_query, query_norm, epsilon, cos, sin)
    key = _transformed(key, key_norm, epsilon, cos, sin)
    query.zero_()
    query[rows] = new_query[rows]
    pool_rows = offsets[slots] + at
    key_pool[pool_rows] = to_stored(key[rows], key_pool.dtype)
    value_pool[pool_rows] = to_stored(value[rows], value_pool.dtype)
    position_pool[pool_rows] = seen[slots, None].expand_as(pool_rows).to(torch.int32)
    lengths[slots] = at + 1
    if query_ring is not None and query_ring.shape[2]:
        query_ring[slots, :, seen[slots] % query_ring.shape[2]] = query[rows]


register("append", reference)
