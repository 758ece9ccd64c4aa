"""Prefill: prompts go through the model packed one after the other without padding, long ones in chunks.

A prompt attends to all of itself, whatever its slot keeps in the end: its keys and values are staged outside the cache,
and each layer is compressed into the slot as soon as its last token is staged. For whole prompts that is one layer at a
time, so a pack stages one layer; a prompt in chunks stages all layers until its last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.cache.compression import Compression, Trigger
from sparse_rl_lightning.cache.running_state import Piece, follow_prompt
from sparse_rl_lightning.cache.slots import PackedPrompts, SlotCache
from sparse_rl_lightning.ops.append import rotate
from sparse_rl_lightning.ops.pools import to_stored
from sparse_rl_lightning.rollout.engine.decoder import ROW_MULTIPLE, Decoder


@dataclass(frozen=True)
class Prefill:
    """A prompt to be read into a slot."""

    tokens: list[int]
    slot: int
    limits: list[int]  # (L) lengths from which the prompt is compressed at its end
    evicted: tuple[int, ...]  # (L) tokens that are evicted then
    room: int  # tokens that its slot takes afterwards

    @classmethod
    def of(cls, tokens: list[int], slot: int, trigger: Trigger) -> Prefill:
        """Create a prompt with the lengths of a compressor's trigger."""
        evicted, room = trigger.after_prompt(len(tokens))
        return cls(tokens, slot, trigger.limits(len(tokens)), evicted, room)


def prefill(
    cache: SlotCache, decoder: Decoder, compression: Compression, prompts: list[Prefill], max_tokens: int
) -> Iterator[tuple[Prefill, Tensor, int]]:
    """Fill the slots of these prompts, at most ``max_tokens`` tokens in one forward pass.

    ``cache.begin`` was called for their slots. The chunks of a prompt depend on nothing but its own length.

    Yields:
        Each prompt with the logits (V,) of its last token and the number of bytes staged outside the cache for it.
    """
    # packs of similar lengths, since scores are padded to the longest prompt of a pack
    short = [p for p in prompts if len(p.tokens) <= max_tokens]
    for pack in _packs(sorted(short, key=lambda p: len(p.tokens)), max_tokens):
        whole = _Pack(cache, decoder, compression, pack)
        hidden = _forward(decoder, [t for p in pack for t in p.tokens], whole.positions, whole)
        # the last token of each prompt: its logits give the first completion token
        logits = decoder.logits(hidden[whole.starts + whole.lengths - 1])
        yield from ((p, row, whole.staged_bytes) for p, row in zip(pack, logits, strict=True))
    for prompt in prompts:
        if len(prompt.tokens) > max_tokens:
            chunks = _Chunks(cache, decoder, compression, prompt)
            # chunks of nearly equal length; only the last one has the logits that are needed
            for start, stop in _cuts(len(prompt.tokens), max_tokens):
                chunks.start, chunks.stop = start, stop
                positions = torch.arange(start, stop, device=cache.tokens.device)
                hidden = _forward(decoder, prompt.tokens[start:stop], positions, chunks)
            yield prompt, decoder.logits(hidden[stop - start - 1 : stop - start])[0], chunks.staged_bytes


def _packs(prompts: list[Prefill], max_tokens: int) -> Iterator[list[Prefill]]:
    pack: list[Prefill] = []
    for prompt in prompts:
        if pack and sum(len(p.tokens) for p in pack) + len(prompt.tokens) > max_tokens:
            yield pack
            pack = []
        pack.append(prompt)
    if pack:
        yield pack


def _cuts(length: int, max_tokens: int) -> list[tuple[int, int]]:
    """Split a length into nearly equal chunks."""
    count = -(-length // max_tokens)
    borders = [length * i // count for i in range(count + 1)]
    return list(pairwise(borders))


def _forward(decoder: Decoder, tokens: list[int], positions: Tensor, attend: _Pack | _Chunks) -> Tensor:
    """Hidden states of the tokens and of the padding behind them, which is token 0 at position 0."""
    padding = -len(tokens) % ROW_MULTIPLE
    ids = torch.tensor(tokens + [0] * padding, device=positions.device)
    return decoder(ids, F.pad(positions, (0, padding)), attend)


class _Pack:
    """Attention over several whole prompts, each causal within itself; each layer goes into the slots at once."""

    def __init__(self, cache: SlotCache, decoder: Decoder, compression: Compression, prompts: list[Prefill]) -> None:
        self.cache, self.decoder, self.compression, self.prompts = cache, decoder, compression, prompts
        self.staged_bytes, device = 0, cache.tokens.device
        self.lengths = torch.tensor([len(p.tokens) for p in prompts], device=device)  # (P,)
        self.starts = self.lengths.cumsum(0) - self.lengths  # (P,)
        self.positions = torch.cat([torch.arange(len(p.tokens), device=device) for p in prompts])  # (rows,)
        slots = torch.tensor([p.slot for p in prompts], device=device).repeat_interleave(self.lengths)
        # tokens whose queries are still in the ring when the prompt ends
        ring = cache.size.num_queries
        recent = self.positions >= (self.lengths.repeat_interleave(self.lengths) - ring)
        self._recent = recent.nonzero().squeeze(1)
        self._ring = slots[recent], self.positions[recent] % max(ring, 1)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> Tensor:
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        # padding rows stay zero: no prompt's range includes them
        out = torch.zeros_like(query)
        start, scale, state = 0, self.cache.geometry.scale, list[Tensor]()
        for prompt in self.prompts:
            own = slice(start, start + len(prompt.tokens))
            out[own] = causal_attention(query[own], key[own], value[own], scale)
            if self.cache.size.has_state:
                state.append(_no_numbers(self.cache, len(prompt.tokens)))
                piece = Piece(prompt.slot, query[own], key[own], value[own], hidden[own])
                _follow(self, layer, piece, state[-1])
            start = own.stop
        slots, places = self._ring
        # before the layer is stored: compressors score entries with the queries in the ring
        self.cache.queries[layer][slots, :, places] = query[self._recent].to(self.cache.queries.dtype)
        kind = self.cache.key_pool.dtype
        keys, values = (to_stored(t.transpose(0, 1), kind).contiguous() for t in (key, value))
        self.staged_bytes = keys.nbytes + values.nbytes
        packed = PackedPrompts(
            [p.slot for p in self.prompts], [len(p.tokens) for p in self.prompts], self.starts, keys, values,
            [p.limits[layer] for p in self.prompts], [p.room for p in self.prompts],
            state if self.cache.size.state_fields else None,
        )  # fmt: skip
        self.compression.store_prompts(self.cache, layer, packed)
        return out


class _Chunks:
    """Attention of one chunk of a long prompt over all chunks so far; keys and values are staged until the last one."""

    def __init__(self, cache: SlotCache, decoder: Decoder, compression: Compression, prompt: Prefill) -> None:
        self.cache, self.decoder, self.compression, self.prompt = cache, decoder, compression, prompt
        self.start = self.stop = 0  # the chunk
        g = cache.geometry
        shape = (g.num_layers, g.num_kv_heads, len(prompt.tokens), g.head_dim)
        self._keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self._values = torch.zeros_like(self._keys)
        self._state = [_no_numbers(cache, shape[2]) for _ in range(g.num_layers)]
        self.staged_bytes = self._keys.nbytes + self._values.nbytes

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> Tensor:
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        own, count = slice(self.start, self.stop), self.stop - self.start
        keys, values = self._keys[layer], self._values[layer]
        # this chunk's rows without the padding behind them join those of the earlier chunks
        keys[:, own], values[:, own] = key[:count].transpose(0, 1), value[:count].transpose(0, 1)
        out, scale = torch.zeros_like(query), self.cache.geometry.scale
        seen_keys, seen_values = (t[:, : self.stop].transpose(0, 1) for t in (keys, values))
        out[:count] = causal_attention(query[:count], seen_keys, seen_values, scale)
        if self.cache.size.has_state:
            piece = Piece(self.prompt.slot, query[:count], seen_keys, seen_values, hidden[:count])
            _follow(self, layer, piece, self._state[layer])
        ring = self.cache.size.num_queries
        if ring:
            # only the chunk's last queries can stay in the ring, until later chunks overwrite them
            recent = torch.arange(max(self.start, self.stop - ring), self.stop, device=query.device)
            slot, kind = self.prompt.slot, self.cache.queries.dtype
            self.cache.queries[layer, slot, :, recent % ring] = query[recent - self.start].transpose(0, 1).to(kind)
        # after the last chunk the layer is complete, and goes into the slot like that of a pack of one prompt
        if self.stop == len(self.prompt.tokens):
            kind, first = self.cache.key_pool.dtype, torch.zeros(1, dtype=torch.int64, device=query.device)
            packed = PackedPrompts(
                [self.prompt.slot], [self.stop], first, to_stored(keys, kind), to_stored(values, kind),
                [self.prompt.limits[layer]], [self.prompt.room],
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
    """Running numbers (H, T, C) for a new prompt."""
    shape = (cache.geometry.num_kv_heads, length, len(cache.size.state_fields))
    return torch.zeros(shape, dtype=torch.float32, device=cache.key_pool.device)


def _follow(attention: _Pack | _Chunks, layer: int, piece: Piece, numbers: Tensor) -> None:
    """Update running numbers (H, T, C) with a piece of a prompt."""
    compressor = attention.compression.compressor
    weights = attention.decoder.output_weights[layer] if compressor.needs_output_norms else None
    follow_prompt(compressor, attention.cache, layer, piece, numbers, weights)
