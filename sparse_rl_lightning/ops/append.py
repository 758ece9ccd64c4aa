"""append: one new token per slot, rotated if requested, written behind the slot's entries."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.checks import check_numbers, check_runs
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, to_stored


def append(
    pools: KVPools,
    slots: Tensor,
    seen: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ring: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> None:
    """Write one token's key and value at the end of each slot, and its query into the ring of recent queries.

    With ``cos`` and ``sin`` query and key are rotated first, the query in place; the rotation is that of transformers,
    in which element i pairs with i + r / 2.

    Args:
        pools: Pools of one layer, (S, H); lengths grow by one.
        slots: Slots (B), int64, each at most once, -1 for a row to skip.
        seen: Positions (S), int64, of each slot's new token.
        query: Queries (B, Hq, D).
        key: Keys (B, H, D).
        value: Values (B, H, D). Float8 pools store key and value rounded, those beyond +-448 as +-448.
        query_ring: Recent queries (S, Hq, A, D); the query of position p goes to place p modulo A.
        cos: Cosines (B, r), float32 (float64 with float64 pools), r even and at most D; elements from r on are not
            rotated.
        sin: Sines of the same shape and type.

    Raises:
        RuntimeError: If a slot is full; on a GPU by ``pools.raise_errors``, the token is dropped.
    """
    call(
        "append", pools.keys, query, key, value, cos, sin, slots, seen, pools.offsets, pools.capacities, pools.keys,
        pools.values, pools.positions, pools.lengths, query_ring, pools.errors,
    )  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r elements of (B, heads, D) by (B, r) angles; computed at least in float32, rounded once."""
    width = cos.shape[1]
    wide, rest = x[..., :width].to(cos.dtype), x[..., width:]
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([(wide * cos[:, None] + turned * sin[:, None]).to(x.dtype), rest], dim=-1)


def reference(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None, slots: Tensor, seen: Tensor,
    offsets: Tensor, capacities: Tensor, key_pool: Tensor, value_pool: Tensor, position_pool: Tensor, lengths: Tensor,
    query_ring: Tensor | None, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``append`` in PyTorch."""
    if (cos is None) != (sin is None):
        raise UserError("give both cos and sin, or neither.")
    if cos is not None and (cos.shape[1] % 2 or cos.shape[1] > query.shape[2]):
        most = query.shape[2]
        raise UserError(f"cos has {cos.shape[1]} columns, expected an even number up to head_dim = {most}.")
    check_runs(slots, offsets, lengths, capacities, len(key_pool))
    rows = (slots >= 0).nonzero().squeeze(1)
    slots = slots[rows]
    check_numbers("seen", seen[slots])
    at = lengths[slots]  # (B, H)
    if bool((at >= capacities[slots]).any()):
        raise RuntimeError("a slot is full: compress it before the next token.")
    if cos is not None and sin is not None:
        query[rows] = rotate(query, cos, sin)[rows]
        key = rotate(key, cos, sin)
    place = offsets[slots] + at
    key_pool[place] = to_stored(key[rows], key_pool.dtype)
    value_pool[place] = to_stored(value[rows], value_pool.dtype)
    position_pool[place] = seen[slots, None].expand_as(place).to(torch.int32)
    lengths[slots] = at + 1
    if query_ring is not None and query_ring.shape[2]:
        query_ring[slots, :, seen[slots] % query_ring.shape[2]] = query[rows]


register("append", reference)
