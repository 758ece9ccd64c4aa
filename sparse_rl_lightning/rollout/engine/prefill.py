"""Reading prompts: packed one after the other without padding, long ones in chunks, into their slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.ops.append import rotate
from sparse_rl_lightning.ops.float8 import to_stored
from sparse_rl_lightning.rollout.cache.compression import Compression
from sparse_rl_lightning.rollout.cache.slots import PackedPrompts, SlotCache
from sparse_rl_lightning.rollout.engine.decoder import ROW_MULTIPLE, Decoder
from sparse_rl_lightning.rollout.engine.running_state import Piece, follow_prompt


@dataclass(frozen=True)
class Reading:
    """A prompt to be read into a slot."""

    tokens: list[int]
    slot: int
    limits: list[int]  # (L) from this length on it is compressed at the end
    room: int  # tokens that its slot takes afterwards


def read_prompts(
    cache: SlotCache, decoder: Decoder, compression: Compression, readings: list[Reading], max_tokens: int
) -> Iterator[tuple[Reading, Tensor, int]]:
    """Fill the slots of these prompts, at most ``max_tokens`` tokens in one forward pass.

    ``cache.begin`` was called for their slots. Where a prompt is cut depends on nothing but its own length.

    Yields:
        Each prompt with the logits (V,) of its last token and the bytes that were staged beside the cache to read it.
    """
    short = [r for r in readings if len(r.tokens) <= max_tokens]
    for pack in _packs(sorted(short, key=lambda r: len(r.tokens)), max_tokens):
        whole = _Pack(cache, decoder, compression, pack)
        hidden = _forward(decoder, [t for r in pack for t in r.tokens], whole.positions, whole)
        logits = decoder.logits(hidden[whole.starts + whole.lengths - 1])
        yield from ((r, row, whole.staged_bytes) for r, row in zip(pack, logits, strict=True))
    for reading in readings:
        if len(reading.tokens) > max_tokens:
            chunks = _Chunks(cache, decoder, compression, reading)
            for start, stop in _cuts(len(reading.tokens), max_tokens):
                chunks.start, chunks.stop = start, stop
                positions = torch.arange(start, stop, device=cache.tokens.device)
                hidden = _forward(decoder, reading.tokens[start:stop], positions, chunks)
            yield reading, decoder.logits(hidden[stop - start - 1 : stop - start])[0], chunks.staged_bytes


def _packs(readings: list[Reading], max_tokens: int) -> Iterator[list[Reading]]:
    pack: list[Reading] = []
    for reading in readings:
        if pack and sum(len(r.tokens) for r in pack) + len(reading.tokens) > max_tokens:
            yield pack
            pack = []
        pack.append(reading)
    if pack:
        yield pack


def _cuts(length: int, max_tokens: int) -> list[tuple[int, int]]:
    """Nearly equal chunks."""
    count = -(-length // max_tokens)
    borders = [length * i // count for i in range(count + 1)]
    return list(pairwise(borders))


def _forward(decoder: Decoder, tokens: list[int], positions: Tensor, attend: _Pack | _Chunks) -> Tensor:
    """Hidden states of the tokens and of the padding behind them, which is token 0 at position 0."""
    padding = -len(tokens) % ROW_MULTIPLE
    ids = torch.tensor(tokens + [0] * padding, device=positions.device)
    return decoder(ids, F.pad(positions, (0, padding)), attend)


@dataclass
class _Pack:
    """Attention over several whole prompts, each causal within itself; a layer goes into the slots at once."""

    cache: SlotCache
    decoder: Decoder
    compression: Compression
    readings: list[Reading]
    staged_bytes: int = 0
    lengths: Tensor = field(init=False)  # (P,)
    starts: Tensor = field(init=False)  # (P,)
    positions: Tensor = field(init=False)  # (rows,)

    def __post_init__(self) -> None:
        device = self.cache.tokens.device
        self.lengths = torch.tensor([len(r.tokens) for r in self.readings], device=device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.positions = torch.cat([torch.arange(len(r.tokens), device=device) for r in self.readings])
        slots = torch.tensor([r.slot for r in self.readings], device=device).repeat_interleave(self.lengths)
        # tokens whose queries are still in the ring when the prompt ends
        ring = self.cache.size.num_queries
        recent = self.positions >= (self.lengths.repeat_interleave(self.lengths) - ring)
        self._recent = recent.nonzero().squeeze(1)
        self._ring = slots[recent], self.positions[recent] % max(ring, 1)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> Tensor:
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = torch.zeros_like(query)
        start, scale, state = 0, self.cache.geometry.scale, list[Tensor]()
        for reading in self.readings:
            own = slice(start, start + len(reading.tokens))
            out[own] = causal_attention(query[own], key[own], value[own], scale)
            if self.cache.size.has_state:
                state.append(_no_numbers(self.cache, len(reading.tokens)))
                piece = Piece(reading.slot, query[own], key[own], value[own], hidden[own])
                follow_prompt(self.compression.compressor, self.cache, self.decoder, layer, piece, state[-1])
            start = own.stop
        slots, places = self._ring
        self.cache.queries[layer][slots, :, places] = query[self._recent].to(self.cache.queries.dtype)
        kind = self.cache.key_pool.dtype
        keys, values = (to_stored(t.transpose(0, 1), kind).contiguous() for t in (key, value))
        self.staged_bytes = keys.nbytes + values.nbytes
        packed = PackedPrompts(
            [r.slot for r in self.readings], [len(r.tokens) for r in self.readings], self.starts, keys, values,
            [r.limits[layer] for r in self.readings], [r.room for r in self.readings],
            state if self.cache.size.state_fields else None,
        )  # fmt: skip
        self.compression.store_prompts(self.cache, layer, packed)
        return out


@dataclass
class _Chunks:
    """Attention of one chunk of a long prompt over all chunks so far, whose keys and values wait for the last."""

    cache: SlotCache
    decoder: Decoder
    compression: Compression
    reading: Reading
    start: int = 0
    stop: int = 0

    def __post_init__(self) -> None:
        g = self.cache.geometry
        shape = (g.num_layers, g.num_kv_heads, len(self.reading.tokens), g.head_dim)
        self._keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self._values = torch.zeros_like(self._keys)
        self._state = [_no_numbers(self.cache, shape[2]) for _ in range(g.num_layers)]

    @property
    def staged_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return self._keys.nbytes + self._values.nbytes

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> Tensor:
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        own, count = slice(self.start, self.stop), self.stop - self.start
        keys, values = self._keys[layer], self._values[layer]
        keys[:, own], values[:, own] = key[:count].transpose(0, 1), value[:count].transpose(0, 1)
        out, scale = torch.zeros_like(query), self.cache.geometry.scale
        seen_keys, seen_values = (t[:, : self.stop].transpose(0, 1) for t in (keys, values))
        out[:count] = causal_attention(query[:count], seen_keys, seen_values, scale)
        if self.cache.size.has_state:
            piece = Piece(self.reading.slot, query[:count], seen_keys, seen_values, hidden[:count])
            follow_prompt(self.compression.compressor, self.cache, self.decoder, layer, piece, self._state[layer])
        ring = self.cache.size.num_queries
        if ring:
            recent = torch.arange(max(self.start, self.stop - ring), self.stop, device=query.device)
            slot, kind = self.reading.slot, self.cache.queries.dtype
            self.cache.queries[layer, slot, :, recent % ring] = query[recent - self.start].transpose(0, 1).to(kind)
        if self.stop == len(self.reading.tokens):
            kind, first = self.cache.key_pool.dtype, torch.zeros(1, dtype=torch.int64, device=query.device)
            packed = PackedPrompts(
                [self.reading.slot], [self.stop], first, to_stored(keys, kind), to_stored(values, kind),
                [self.reading.limits[layer]], [self.reading.room],
                [self._state[layer]] if self.cache.size.state_fields else None,
            )  # fmt: skip
            self.compression.store_prompts(self.cache, layer, packed)
        return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens of a sequence over all of it: (t, Hq, D) queries on (T, H, D) keys."""
    kind = query.dtype
    query, key, value = (t.transpose(0, 1).to(value.dtype) for t in (query, key, value))
    length, total = query.shape[1], key.shape[1]
    group = query.shape[0] // key.shape[0]
    mask = None
    if length < total:
        index = torch.arange(total, device=query.device)
        mask = index <= index[total - length :, None]
    # each KV head is repeated: the grouped form of torch's attention is slow on the CPU
    key, value = (t.repeat_interleave(group, dim=0)[None] for t in (key, value))
    out = F.scaled_dot_product_attention(query[None], key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1).to(kind)


def _no_numbers(cache: SlotCache, length: int) -> Tensor:
    """(H, T, C) running numbers of a prompt that begins."""
    shape = (cache.geometry.num_kv_heads, length, len(cache.size.state_fields))
    return torch.zeros(shape, dtype=torch.float32, device=cache.key_pool.device)
