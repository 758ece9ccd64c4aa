"""Prefill: prompts go through the model packed one after the other without padding, long ones in chunks.

A prompt attends to all of itself, whatever its slot keeps in the end: its keys and values are staged outside the cache,
and each layer is compressed into the slot as soon as its last token is staged. For whole prompts that is one layer at a
time, so a pack stages one layer; a prompt in chunks stages all layers until its last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sparse_rl_lightning.cache.compression import Compression, Trigger
from sparse_rl_lightning.cache.linear_states import in_pieces
from sparse_rl_lightning.cache.running_state import Piece, follow_prompt
from sparse_rl_lightning.cache.slots import PackedPrompts, SlotCache
from sparse_rl_lightning.cache.windows import latest
from sparse_rl_lightning.ops.append import Turn
from sparse_rl_lightning.ops.pools import to_stored
from sparse_rl_lightning.ops.sinks import torch_attention
from sparse_rl_lightning.ops.uploads import upload
from sparse_rl_lightning.policies.routing import Routers, recording
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE, Decoder

WINDOW_BLOCK = 256  # queries that attend to a window at the same time, if it is shorter
HALF = (torch.bfloat16, torch.float16)
HAS_VARLEN = "num_splits" in signature(varlen_attn).parameters  # else results could depend on the batch


@dataclass(frozen=True)
class Prefill:
    """A prompt to be read into a slot."""

    tokens: list[int]
    slot: int
    limits: list[int]  # (L) lengths from which the prompt is compressed at its end
    evicted: tuple[int, ...]  # (L) tokens that are evicted then
    room: int  # tokens that its slot takes afterwards

    @property
    def held(self) -> list[int]:
        """Entries (L) of each head afterwards, a mean over the heads of a layer."""
        return [len(self.tokens) - lost for lost in self.evicted]

    @classmethod
    def of(cls, tokens: list[int], slot: int, trigger: Trigger) -> Prefill:
        """Create a prompt with the lengths of a compressor's trigger."""
        evicted, room = trigger.after_prompt(len(tokens))
        return cls(tokens, slot, trigger.limits(len(tokens)), evicted, room)


class ReadPrompt(NamedTuple):
    """A prompt that went through the model."""

    prompt: Prefill
    logits: Tensor  # (V,) of its last token
    staged_bytes: int  # staged outside the cache for it
    routing: Tensor | None  # (P, L, K) experts that read its tokens, if they are recorded


def prefill(
    cache: SlotCache,
    decoder: Decoder,
    compression: Compression,
    prompts: list[Prefill],
    max_tokens: int,
    routers: Routers | None = None,
) -> Iterator[ReadPrompt]:
    """Fill the slots of these prompts, at most ``max_tokens`` tokens in one forward pass.

    ``cache.begin`` was called for their slots. The chunks of a prompt depend on nothing but its own length. The choices
    of ``routers`` are recorded.
    """
    # packs of similar lengths, since scores are padded to the longest prompt of a pack
    short = [p for p in prompts if len(p.tokens) <= max_tokens]
    for pack in _packs(sorted(short, key=lambda p: len(p.tokens)), max_tokens):
        whole = _Pack(cache, decoder, compression, pack)
        recur = in_pieces(cache.linear, [(p.slot, len(p.tokens)) for p in pack])
        with recording(routers) as recorded:
            hidden = decoder(whole.ids, whole.positions, whole, recur)
        # the last token of each prompt: its logits give the first completion token
        logits, experts, start = decoder.logits(hidden[whole.last]), recorded(), 0
        for p, row in zip(pack, logits, strict=True):
            own = slice(start, start + len(p.tokens))
            yield ReadPrompt(p, row, whole.staged_bytes, None if experts is None else experts[own])
            start = own.stop
    for prompt in prompts:
        if len(prompt.tokens) > max_tokens:
            chunks = _Chunks(cache, decoder, compression, prompt)
            chosen: list[Tensor] = []
            # chunks of nearly equal length; only the last one has the logits that are needed
            for start, stop in _cuts(len(prompt.tokens), max_tokens):
                chunks.start, chunks.stop = start, stop
                ids, positions = upload(_rows([prompt.tokens[start:stop]], start), cache.tokens.device)
                recur = in_pieces(cache.linear, [(prompt.slot, stop - start)])
                with recording(routers) as recorded:
                    hidden = decoder(ids, positions, chunks, recur)
                experts = recorded()
                chosen += [] if experts is None else [experts[: stop - start]]
            logits = decoder.logits(hidden[stop - start - 1 : stop - start])[0]
            yield ReadPrompt(prompt, logits, chunks.staged_bytes, torch.cat(chosen) if chosen else None)


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

    def __init__(self, cache: SlotCache, decoder: Decoder, compression: Compression, prompts: list[Prefill]) -> None:
        self.cache, self.decoder, self.compression, self.prompts = cache, decoder, compression, prompts
        self.staged_bytes = 0
        self._lengths = lengths = [len(p.tokens) for p in prompts]
        slots, width = [p.slot for p in prompts], 0 if cache.windows is None else cache.windows.width
        # tokens whose queries are still in the ring when the prompt ends, and those still in the windows
        numbers = [
            *_rows([p.tokens for p in prompts]), slots, [0, *accumulate(lengths)],
            *latest(lengths, slots, cache.size.num_queries), *latest(lengths, slots, width),
        ]  # fmt: skip
        self.ids, self.positions, self._places, self._borders, *both = upload(numbers, cache.tokens.device)
        self._recent, self._within = both[:3], both[3:]
        self.last = self._borders[1:] - 1  # (P,) rows of last tokens
        self._borders32 = self._borders.to(torch.int32)

    def __call__(
        self, layer: int, projected: Tensor, turn: Turn, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        g, windows = self.cache.geometry, self.cache.windows
        query, key, value = turn.split(projected, g.num_kv_heads)
        place, window = g.places[layer], g.window_of(layer)
        out = packed_attention(query, key, value, self._lengths, self._borders32, g.scale, window, sinks)
        if windows is not None and window:
            rows, slots, places = self._within
            windows.store(place, slots, places, key[rows], value[rows])
            return out
        start, state = 0, list[Tensor]()
        for prompt in self.prompts if self.cache.size.has_state else ():
            own = slice(start, start + len(prompt.tokens))
            state.append(_no_numbers(self.cache, len(prompt.tokens)))
            piece = Piece(prompt.slot, query[own], key[own], value[own], hidden[own], sinks)
            _follow(self, place, piece, state[-1])
            start = own.stop
        rows, slots, places = self._recent
        # before the layer is stored: compressors score entries with the queries in the ring
        self.cache.queries[place][slots, :, places] = query[rows].to(self.cache.queries.dtype)
        kind = self.cache.key_pool.dtype
        keys, values = (to_stored(t.transpose(0, 1), kind).contiguous() for t in (key, value))
        self.staged_bytes = keys.nbytes + values.nbytes
        packed = PackedPrompts(
            self._lengths, self._places, self._borders, keys, values,
            [p.limits[place] for p in self.prompts], [p.room for p in self.prompts],
            state if self.cache.size.state_fields else None,
        )  # fmt: skip
        self.compression.store_prompts(self.cache, place, packed)
        return out


class _Chunks:
    """Attention of one chunk of a long prompt over all chunks so far; keys and values are staged until the last one."""

    def __init__(self, cache: SlotCache, decoder: Decoder, compression: Compression, prompt: Prefill) -> None:
        self.cache, self.decoder, self.compression, self.prompt = cache, decoder, compression, prompt
        self.start = self.stop = 0  # the chunk
        g = cache.geometry
        shape = (g.depth, g.num_kv_heads, len(prompt.tokens), g.head_dim)
        self._keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self._values = torch.zeros_like(self._keys)
        self._state = [_no_numbers(cache, shape[2]) for _ in range(g.num_layers)]
        self.staged_bytes = self._keys.nbytes + self._values.nbytes

    def __call__(
        self, layer: int, projected: Tensor, turn: Turn, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        g, windows = self.cache.geometry, self.cache.windows
        query, key, value = turn.split(projected, g.num_kv_heads)
        place, window = g.places[layer], g.window_of(layer)
        own, count = slice(self.start, self.stop), self.stop - self.start
        keys, values = self._keys[layer], self._values[layer]
        # this chunk's rows without the padding behind them join those of the earlier chunks
        keys[:, own], values[:, own] = key[:count].transpose(0, 1), value[:count].transpose(0, 1)
        out = torch.zeros_like(query)
        seen_keys, seen_values = (t[:, : self.stop].transpose(0, 1) for t in (keys, values))
        out[:count] = causal_attention(query[:count], seen_keys, seen_values, g.scale, window, sinks)
        if windows is not None and window:
            if self.stop == len(self.prompt.tokens):
                rows, slots, places = upload(latest([self.stop], [self.prompt.slot], windows.width), query.device)
                windows.store(place, slots, places, seen_keys[rows], seen_values[rows])
            return out
        if self.cache.size.has_state:
            piece = Piece(self.prompt.slot, query[:count], seen_keys, seen_values, hidden[:count], sinks)
            _follow(self, place, piece, self._state[place])
        ring = self.cache.size.num_queries
        if ring:
            # only the chunk's last queries can stay in the ring, until later chunks overwrite them
            recent = torch.arange(max(self.start, self.stop - ring), self.stop, device=query.device)
            slot, kind = self.prompt.slot, self.cache.queries.dtype
            self.cache.queries[place, slot, :, recent % ring] = query[recent - self.start].transpose(0, 1).to(kind)
        # after the last chunk the layer is complete, and goes into the slot like that of a pack of one prompt
        if self.stop == len(self.prompt.tokens):
            kind = self.cache.key_pool.dtype
            slots, borders = upload([[self.prompt.slot], [0, self.stop]], query.device)
            packed = PackedPrompts(
                [self.stop], slots, borders, to_stored(keys, kind), to_stored(values, kind),
                [self.prompt.limits[place]], [self.prompt.room],
                [self._state[place]] if self.cache.size.state_fields else None,
            )  # fmt: skip
            self.compression.store_prompts(self.cache, place, packed)
        return out


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], borders: Tensor, scale: float, window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of whole sequences, each causal within itself, in one launch where torch has a kernel for that.

    Args:
        query: Queries (R, Hq, D): sequences one after the other, then padding.
        key: Keys (R, H, D).
        value: Values (R, H, D).
        lengths: Lengths (P) of the sequences.
        borders: Rows (P + 1,), int32, where they begin, and the end of the last.
        scale: Factor of the logits.
        window: Number of tokens that a token sees, itself included; 0 for all before it.
        sinks: Learned sinks (Hq), which that kernel does not know.

    Returns:
        The result (R, Hq, D), zeros in the padding.
    """
    out, rows, longest = torch.zeros_like(query), sum(lengths), max(lengths)
    if query.device.type == "cuda" and value.dtype in HALF and HAS_VARLEN and sinks is None:
        q, k = query[:rows].to(value.dtype), key[:rows].to(value.dtype)
        # one split, so that a sequence's result is the same in any batch
        packed = varlen_attn(
            q, k, value[:rows], borders, borders, longest, longest, scale=scale, window_size=(window - 1, 0),
            enable_gqa=True, num_splits=1,
        )  # fmt: skip
        assert isinstance(packed, Tensor)
        out[:rows] = packed
        return out
    for start, stop in pairwise([0, *accumulate(lengths)]):
        out[start:stop] = causal_attention(query[start:stop], key[start:stop], value[start:stop], scale, window, sinks)
    return out


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attention of the last tokens of a sequence over all of it, or a window: (t, Hq, D) queries on (T, H, D) keys."""
    if 0 < window < len(key):  # no block of queries sees more than its own keys and a window before them
        block, before = max(window, WINDOW_BLOCK), len(key) - len(query)
        spans = [(i, min(i + block, len(query))) for i in range(0, len(query), block)]
        first = [max(0, before + start + 1 - window) for start, _ in spans]
        parts = [
            _attention(query[i:j], key[k : before + j], value[k : before + j], scale, window, sinks)
            for (i, j), k in zip(spans, first, strict=True)
        ]
        return torch.cat(parts)
    return _attention(query, key, value, scale, window, sinks)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    kind = query.dtype
    query, key, value = (t.transpose(0, 1).to(value.dtype) for t in (query, key, value))
    length, total = query.shape[1], key.shape[1]
    group = query.shape[0] // key.shape[0]
    mask = None
    if length < total or 0 < window < total:
        index = torch.arange(total, device=query.device)
        last = index[total - length :, None]
        mask = (index <= last) & (index > last - window) if window else index <= last
    # each KV head is repeated: the grouped form of torch's attention is slow on the CPU
    key, value = (t.repeat_interleave(group, dim=0)[None] for t in (key, value))
    out = torch_attention(query[None], key, value, mask, scale, sinks)
    return out[0].transpose(0, 1).to(kind)


def _no_numbers(cache: SlotCache, length: int) -> Tensor:
    """Running numbers (H, T, C) for a new prompt."""
    shape = (cache.geometry.num_kv_heads, length, len(cache.size.state_fields))
    return torch.zeros(shape, dtype=torch.float32, device=cache.key_pool.device)


def _follow(attention: _Pack | _Chunks, layer: int, piece: Piece, numbers: Tensor) -> None:
    """Update running numbers (H, T, C) with a piece of a prompt."""
    compressor, number = attention.compression.compressor, attention.cache.geometry.full_layers[layer]
    weights = attention.decoder.output_weights[number] if compressor.needs_output_norms else None
    follow_prompt(compressor, attention.cache, layer, piece, numbers, weights)
