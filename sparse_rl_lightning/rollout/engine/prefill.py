"""Prefill: prompts go through the model packed one after the other without padding, long ones in chunks.

A prompt attends to its full length even if its slot keeps only a part: its keys and values are staged outside the
cache, and each layer is compressed into the slot as soon as its last token is staged. For whole prompts that is one
layer at a time, so a pack stages one layer; a prompt in chunks stages all layers until its last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.cache.running_state import Piece, update_after_prompt
from sparse_rl_lightning.cache.slots import PackedPrompts, SlotCache, latest
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.attention import causal_attention, packed_attention
from sparse_rl_lightning.ops.pools import to_stored
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.mixed_layers import ChunkMode


@dataclass(frozen=True)
class Prefill:
    """A prompt to prefill into a slot."""

    tokens: list[int]
    slot: int
    evicted: tuple[int, ...]  # (L) tokens that are evicted at its end
    room: int  # tokens that its slot takes afterwards

    @property
    def num_entries(self) -> list[int]:
        """Entries (L) of each head afterwards, a mean over the heads of a layer."""
        return [len(self.tokens) - lost for lost in self.evicted]

    @classmethod
    def of(cls, tokens: list[int], slot: int, trigger: Trigger) -> Prefill:
        """Create a prompt with the lengths of a compressor's trigger."""
        return cls(tokens, slot, *trigger.after_prompt(len(tokens)))


ReadPrompt: TypeAlias = tuple[Prefill, Tensor, int]
"""A prompt that went through the model, the logits (V,) of its last token, and the bytes staged outside the cache."""


def prefill(engine: Engine, prompts: list[Prefill], max_tokens: int) -> Iterator[ReadPrompt]:
    """Fill the slots of these prompts, at most ``max_tokens`` tokens in one forward pass.

    ``cache.begin`` was called for their slots. The chunks of a prompt depend on nothing but its own length.
    """
    # packs of similar lengths, since scores are padded to the longest prompt of a pack
    short = [p for p in prompts if len(p.tokens) <= max_tokens]
    for pack in _packs(sorted(short, key=lambda p: len(p.tokens)), max_tokens):
        whole = _Pack(engine, pack)
        hidden = engine.run(whole.ids, whole.positions, engine.with_all_layers(whole))
        # the last token of each prompt: its logits give the first completion token
        logits = engine.decoder.logits(hidden[whole.last])
        for p, row in zip(pack, logits, strict=True):
            yield p, row, whole.staged_bytes
    for prompt in prompts:
        if len(prompt.tokens) > max_tokens:
            yield from filter(None, read_in_chunks(engine, prompt, max_tokens))


def read_in_chunks(engine: Engine, prompt: Prefill, max_tokens: int) -> Iterator[ReadPrompt | None]:
    """Read a long prompt in chunks of nearly equal length, and yield after each: None, or the prompt after the last."""
    chunks = _Chunks(engine, prompt)
    attend = engine.with_all_layers(chunks)
    length, count = len(prompt.tokens), -(-len(prompt.tokens) // max_tokens)
    for start, stop in pairwise(length * index // count for index in range(count + 1)):
        chunks.take(start, stop)
        ids, positions = upload(_rows([prompt.tokens[start:stop]], start), engine.cache.tokens.device)
        hidden = engine.run(ids, positions, attend)
        if stop < length:
            yield None
    logits, staged = engine.decoder.logits(hidden[stop - start - 1 : stop - start])[0], attend.staged_bytes
    del chunks, attend  # what is staged is freed before the next
    yield prompt, logits, staged


def _packs(prompts: list[Prefill], max_tokens: int) -> Iterator[list[Prefill]]:
    pack: list[Prefill] = []
    for prompt in prompts:
        if pack and sum(len(p.tokens) for p in pack) + len(prompt.tokens) > max_tokens:
            yield pack
            pack = []
        pack.append(prompt)
    if pack:
        yield pack


def _rows(texts: list[list[int]], first: int = 0) -> list[list[int]]:
    """Ids and positions of the rows of a forward pass: texts one after the other, and token 0 at position 0 as padding.

    ``first`` is the position of every text's first token.
    """
    ids = [token for text in texts for token in text]
    positions = [position for text in texts for position in range(first, first + len(text))]
    padding = [0] * (-len(ids) % ROW_MULTIPLE)
    return [ids + padding, positions + padding]


class _Pack:
    """Attention over several whole prompts, each causal within itself; each layer goes into the slots at once."""

    mode: Literal["pack"] = "pack"

    def __init__(self, engine: Engine, prompts: list[Prefill]) -> None:
        self.cache, self.prompts, self._engine = engine.cache, prompts, engine
        self.staged_bytes = 0
        self.lengths, slots = [len(p.tokens) for p in prompts], [p.slot for p in prompts]
        self.pieces = [(p.slot, 0, len(p.tokens)) for p in prompts]
        # tokens whose queries are still in the ring when the prompt ends
        numbers = [
            *_rows([p.tokens for p in prompts]), slots, [0, *accumulate(self.lengths)],
            *latest(self.lengths, slots, self.cache.size.num_queries),
        ]  # fmt: skip
        self.ids, self.positions, self._places, self._borders, *self._recent = upload(numbers, self.cache.tokens.device)
        self.last = self._borders[1:] - 1  # (P,) rows of last tokens
        self.borders = self._borders.to(torch.int32)

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer of full attention."""
        cache, g = self.cache, self.cache.geometry
        query, key, value = transform.split(projected, g.num_kv_heads)
        out = packed_attention(query, key, value, self.lengths, self.borders, g.scale, sinks=sinks)
        state = self._running_numbers(layer, query, key, value, hidden, sinks) if cache.size.has_state else []
        rows, slots, places = self._recent
        # before the layer is stored: compressors score entries with the queries in the ring
        cache.queries[layer][slots, :, places] = query[rows].to(cache.queries.dtype)
        dtype = cache.key_pool.dtype
        keys, values = (to_stored(t.transpose(0, 1), dtype).contiguous() for t in (key, value))
        self.staged_bytes = keys.nbytes + values.nbytes
        packed = PackedPrompts(
            self.lengths, self._places, self._borders, keys, values,
            [p.evicted[layer] for p in self.prompts], [p.room for p in self.prompts],
            state if cache.size.state_fields else None,
        )  # fmt: skip
        self._engine.compression.store_prompts(cache, layer, packed)
        return out

    def _running_numbers(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, sinks: Tensor | None
    ) -> list[Tensor]:
        """The running numbers (P) of (H, T, C) of each prompt."""
        start, state = 0, list[Tensor]()
        for slot, _, count in self.pieces:
            rows = slice(start, start + count)
            piece = Piece(slot, query[rows], key[rows], value[rows], hidden[rows], sinks)
            state.append(_no_numbers(self.cache, count))
            _update_state(self._engine, layer, piece, state[-1])
            start = rows.stop
        return state


class _Chunks:
    """Attention of one chunk of a long prompt over all chunks so far; keys and values are staged until the last one."""

    mode: ChunkMode = "chunk"

    def __init__(self, engine: Engine, prompt: Prefill) -> None:
        self.cache, self.prompt, self._engine = engine.cache, prompt, engine
        g = self.cache.geometry
        shape = (g.num_layers, g.num_kv_heads, len(prompt.tokens), g.head_dim)
        self._keys = torch.empty(shape, dtype=g.dtype, device=g.device)
        self._values = torch.empty_like(self._keys)
        self._state = [_no_numbers(self.cache, shape[2]) for _ in range(g.num_layers)]
        self.staged_bytes = self._keys.nbytes + self._values.nbytes

    def take(self, start: int, stop: int) -> None:
        """Go on to the chunk of these tokens."""
        self.start, self.stop, self.is_last = start, stop, stop == len(self.prompt.tokens)
        self.pieces = [(self.prompt.slot, start, stop)]

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer of full attention."""
        cache, g, start, stop = self.cache, self.cache.geometry, self.start, self.stop
        query, key, value = transform.split(projected, g.num_kv_heads)
        count, keys, values = stop - start, self._keys[layer], self._values[layer]
        # this chunk's rows without the padding behind them join those of the earlier chunks
        keys[:, start:stop], values[:, start:stop] = key[:count].transpose(0, 1), value[:count].transpose(0, 1)
        out = torch.zeros_like(query)
        seen_keys, seen_values = (t[:, :stop].transpose(0, 1) for t in (keys, values))
        out[:count] = causal_attention(query[:count], seen_keys, seen_values, g.scale, sinks=sinks)
        if cache.size.has_state:
            piece = Piece(self.prompt.slot, query[:count], seen_keys, seen_values, hidden[:count], sinks)
            _update_state(self._engine, layer, piece, self._state[layer])
        ring = cache.size.num_queries
        if ring:
            # only the chunk's last queries can stay in the ring, until later chunks overwrite them
            recent = torch.arange(max(start, stop - ring), stop, device=query.device)
            slot, dtype = self.prompt.slot, cache.queries.dtype
            cache.queries[layer, slot, :, recent % ring] = query[recent - start].transpose(0, 1).to(dtype)
        # after the last chunk the layer is complete, and goes into the slot like that of a pack of one prompt
        if self.is_last:
            dtype = cache.key_pool.dtype
            slots, borders = upload([[self.prompt.slot], [0, stop]], query.device)
            packed = PackedPrompts(
                [stop], slots, borders, to_stored(keys, dtype), to_stored(values, dtype),
                [self.prompt.evicted[layer]], [self.prompt.room],
                [self._state[layer]] if cache.size.state_fields else None,
            )  # fmt: skip
            self._engine.compression.store_prompts(cache, layer, packed)
        return out


def _no_numbers(cache: SlotCache, length: int) -> Tensor:
    """Running numbers (H, T, C) for a new prompt."""
    shape = (cache.geometry.num_kv_heads, length, len(cache.size.state_fields))
    return torch.zeros(shape, dtype=torch.float32, device=cache.key_pool.device)


def _update_state(engine: Engine, layer: int, piece: Piece, numbers: Tensor) -> None:
    """Update running numbers (H, T, C) with a piece of a prompt."""
    update_after_prompt(
        engine.compression.compressor, engine.cache, layer, piece, numbers, engine.output_weights(layer)
    )
