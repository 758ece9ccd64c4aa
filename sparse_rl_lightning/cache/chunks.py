"""Chunks: several tokens at once behind what a slot holds, as if they had been fed one by one.

They have room: the caller cuts a text where a slot is full. So nothing is evicted in between, and the query of a token
sees the live entries before it and the tokens of the chunk up to itself. The memory of one layer and one slot is copied
for that, never a whole cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning.cache.running_state import Piece, update_after_chunk
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops.attention import causal_attention, visible_attention
from sparse_rl_lightning.ops.pools import gather_heads, to_computed, to_stored


@dataclass(frozen=True)
class Chunk:
    """Tokens of a slot, in the cache already, that are read behind the ``start`` tokens that were fed to it."""

    slot: int
    start: int
    count: int
    evicted: tuple[int, ...]  # (L) tokens lost before, a mean over heads

    @property
    def stop(self) -> int:
        """The number of tokens fed afterwards."""
        return self.start + self.count


def append_chunk(
    cache: SlotCache, compressor: Compressor, layer: int, chunk: Chunk, rows: Piece, weights: Tensor | None
) -> Tensor:
    """Write a chunk behind the entries of its slot in one layer, and attend over them all: (Q, Hq, D).

    Args:
        cache: Cache of the slot.
        compressor: Compressor, whose running numbers are updated.
        layer: Place of the layer among those that are compressed.
        chunk: Chunk; its slot has room for it.
        rows: Queries, keys and values of the chunk.
        weights: Output projection (Hq, D, E) of the layer, if the compressor needs it.
    """
    g, pools, count, slot = cache.geometry, cache.layers[layer], chunk.count, chunk.slot
    index = torch.arange(count, device=rows.query.device)
    before, positions = pools.lengths[slot].clone(), chunk.start + index  # (H,), (Q,)
    new = pools.offsets[slot, :, None] + before[:, None] + index  # (H, Q) rows of the pools
    for pool, written in ((pools.keys, rows.keys), (pools.values, rows.values)):
        pool[new] = to_stored(written.transpose(0, 1), pool.dtype)
    pools.positions[new] = positions.to(pools.positions.dtype).expand(new.shape)
    pools.lengths[slot] = before + count
    query, ring = rows.query.to(g.query_dtype), cache.size.num_queries
    if ring:  # of a long chunk only the last queries stay
        last = slice(max(0, count - ring), count)
        cache.queries[layer, slot][:, positions[last] % ring] = query[last].transpose(0, 1)
    # later queries see what is stored, so the chunk's queries see the same numbers
    alike = not cache.size.per_head  # then the host knows how long all heads are, and does not wait
    width = chunk.stop - chunk.evicted[layer] if alike else int(pools.lengths[slot].max())
    at, _ = gather_heads(pools.offsets[slot], pools.lengths[slot], width)
    keys, values = (to_computed(pool[at], g.query_dtype) for pool in (pools.keys, pools.values))  # (H, N, D)
    if alike and not cache.size.has_state:
        out = causal_attention(query, keys.transpose(0, 1), values.transpose(0, 1), g.scale, sinks=rows.sinks)
        return out.to(rows.query.dtype)
    newest = (before[:1] if alike else before)[:, None] + index  # (H, Q) entry of each token, or (1, Q)
    seen = torch.arange(width, device=at.device) <= newest.unsqueeze(-1)  # (H, Q, N), or (1, Q, N)
    if cache.size.has_state:
        piece = Piece(slot, query, keys.transpose(0, 1), values.transpose(0, 1), rows.hidden, rows.sinks)
        update_after_chunk(compressor, cache, layer, piece, new, positions, seen, weights)
    return visible_attention(query, keys, values, seen, g.scale, rows.sinks).to(rows.query.dtype)
