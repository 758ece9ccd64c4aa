"""Given: tokens that the policy did not write enter live slots, such as a tool's answer or what a user says next.

They are read as chunks under the sequences' own compressed caches. A slot is compressed at the same lengths as if its
tokens had been drawn: a text is cut where the slot is full. All slots' chunks go through the model together.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.cache.chunks import Chunk, append_chunk, append_to_window
from sparse_rl_lightning.cache.linear_states import in_pieces
from sparse_rl_lightning.cache.running_state import Piece
from sparse_rl_lightning.ops.append import Turn
from sparse_rl_lightning.ops.uploads import upload
from sparse_rl_lightning.policies.routing import recording
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE
from sparse_rl_lightning.rollout.engine.engine import Engine


def read_chunks(engine: Engine, chunks: list[Chunk]) -> Tensor:
    """Read chunks of different slots, and return the logits (n, V) of the last token of each.

    The cache has their tokens already; each has room in its slot, which the caller compresses afterwards.
    """
    cache, decoder = engine.cache, engine.decoder
    attention = _Chunked(engine, chunks)
    recur = in_pieces(cache.linear, [(chunk.slot, chunk.count) for chunk in chunks])
    with recording(engine.routers) as experts:
        hidden = decoder(attention.ids, attention.positions, attention, recur)
    chosen = experts()
    slots, stops = upload([[chunk.slot for chunk in chunks], [chunk.stop for chunk in chunks]], cache.tokens.device)
    cache.seen[slots] = stops
    per_token = cache.geometry.num_layers * cache.geometry.num_kv_heads
    for chunk, (first, last), held in zip(chunks, attention.rows, cache.entries_held(slots), strict=True):
        own = slice(chunk.start, chunk.stop)
        later = torch.arange(chunk.count - 1, -1, -1, device=slots.device)
        cache.held[chunk.slot, own] = held - per_token * later.int()
        if chosen is not None and engine.logs.routing is not None:
            engine.logs.routing[chunk.slot, own] = chosen[first:last]
    return decoder.logits(hidden[attention.last])


class _Chunked:
    """Attention of packed chunks, each over its own slot."""

    def __init__(self, engine: Engine, chunks: list[Chunk]) -> None:
        self.engine, self.chunks = engine, chunks
        self.rows = list(pairwise([0, *accumulate(chunk.count for chunk in chunks)]))
        slots = [chunk.slot for chunk in chunks for _ in range(chunk.count)]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        padding = -len(slots) % ROW_MULTIPLE
        numbers = [slots, positions, [*positions, *[0] * padding], [last - 1 for _, last in self.rows]]
        owners, places, self.positions, self.last = upload(numbers, engine.cache.tokens.device)
        self.ids = F.pad(engine.cache.tokens[owners, places], (0, padding))

    def __call__(
        self, layer: int, projected: Tensor, turn: Turn, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        cache, compressor = self.engine.cache, self.engine.compression.compressor
        g = cache.geometry
        query, key, value = turn.split(projected, g.num_kv_heads)
        place, window, out = g.places[layer], g.window_of(layer), torch.zeros_like(query)
        weights = self.engine.decoder.output_weights[layer] if compressor.needs_output_norms else None
        for chunk, (first, last) in zip(self.chunks, self.rows, strict=True):
            own = slice(first, last)
            rows = Piece(chunk.slot, query[own], key[own], value[own], hidden[own], sinks)
            if cache.windows is not None and window:
                out[own] = append_to_window(cache, place, window, chunk, rows)
            else:
                out[own] = append_chunk(cache, compressor, place, chunk, rows, weights)
        return out
