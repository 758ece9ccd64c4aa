"""Extension: observation tokens, such as a tool's answer or a user's message, enter slots in use.

They are read as chunks under the sequences' own compressed caches. A slot is compressed at the same lengths as if its
tokens had been sampled: a text is split where the slot is full. All slots' chunks go through the model together.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.cache.chunks import Chunk, append_chunk
from sparse_rl_lightning.cache.running_state import Piece
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.mixed_layers import ChunkMode


def extend(engine: Engine, chunks: list[Chunk]) -> Tensor:
    """Read chunks of different slots, and return the logits (n, V) of the last token of each.

    The cache has their tokens already; each has room in its slot, which the caller compresses afterwards.
    """
    cache, texts = engine.cache, Extension(engine, chunks)
    hidden = engine.run(texts.ids, texts.positions, engine.with_all_layers(texts))
    slots, stops = upload([[chunk.slot for chunk in chunks], [chunk.stop for chunk in chunks]], cache.tokens.device)
    cache.seen[slots] = stops
    per_token = cache.geometry.num_layers * cache.geometry.num_kv_heads
    for chunk, num_entries in zip(chunks, cache.entries_held(slots), strict=True):
        later = torch.arange(chunk.count - 1, -1, -1, device=slots.device)
        cache.held[chunk.slot, chunk.start : chunk.stop] = num_entries - per_token * later.int()
    return engine.decoder.logits(hidden[texts.last])


class Extension:
    """Attention of packed chunks, each over its own slot."""

    mode: ChunkMode = "extension"
    staged_bytes = 0

    def __init__(self, engine: Engine, chunks: list[Chunk]) -> None:
        self.cache, self.chunks, self._engine = engine.cache, chunks, engine
        self.pieces = [(chunk.slot, chunk.start, chunk.stop) for chunk in chunks]
        self._rows = list(pairwise([0, *accumulate(chunk.count for chunk in chunks)]))
        slots = [chunk.slot for chunk in chunks for _ in range(chunk.count)]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        padding = -len(slots) % ROW_MULTIPLE
        numbers = [slots, positions, [*positions, *[0] * padding], [last - 1 for _, last in self._rows]]
        owners, places, self.positions, self.last = upload(numbers, engine.cache.tokens.device)
        self.ids = F.pad(engine.cache.tokens[owners, places], (0, padding))

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer of full attention."""
        engine, cache = self._engine, self.cache
        query, key, value = transform.split(projected, cache.geometry.num_kv_heads)
        out, weights = torch.zeros_like(query), engine.output_weights(layer)
        for chunk, (first, last) in zip(self.chunks, self._rows, strict=True):
            rows = slice(first, last)
            piece = Piece(chunk.slot, query[rows], key[rows], value[rows], hidden[rows], sinks)
            out[rows] = append_chunk(cache, engine.compression.compressor, layer, chunk, piece, weights)
        return out
