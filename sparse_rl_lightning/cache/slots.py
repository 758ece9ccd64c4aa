"""SlotCache: fixed memory for a fixed number of sequences, and eviction in place.

Letters as in records.py. Three things are distinct here that a growing cache may mix up: the position of a token in its
sequence (``seen``, ``positions``), the number of entries that a head holds (``lengths``), and their place in the pools
(``offsets``). Evictions change the second and never the first.

Per-slot tensors have one row more than there are slots. Decode batches are padded to a few sizes, and rows that only
pad a batch need a place to write: in ops they have slot -1, in indexing that last row, which is never read.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.cache.arenas import Arenas
from sparse_rl_lightning.cache.linear_states import LinearStates
from sparse_rl_lightning.cache.storage import SlotStorage
from sparse_rl_lightning.cache.windows import WindowCache
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.evictions import EvictionLog, EvictionRecord
from sparse_rl_lightning.ops import CachedEntries, KVPools
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.pools import EVENT_TYPES, MOST_EVENTS, accumulation_dtype, gather_heads
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.policies.geometry import CacheGeometry

StorageKind = TypeVar("StorageKind", bound=SlotStorage)
_PER_LAYER = ("lengths", "queries", "head_state")

Cuts: TypeAlias = list[tuple[int, int]]
"""Compressions of a sequence, oldest first: tokens fed by then, and lost by then in all layers, a mean over heads."""


@dataclass(frozen=True)
class CacheSize:
    """The sizes that determine the memory and the layout of a cache."""

    num_slots: int
    capacities: tuple[int, ...]  # (L) entries per slot and KV head that a sequence without end needs, a mean over heads
    num_queries: int  # most recent queries kept for scoring
    max_length: int  # longest sequence in tokens
    state_fields: tuple[str, ...] = ()  # running numbers per entry
    per_head: bool = False  # heads of a slot share its memory unequally
    head_state_fields: tuple[tuple[str, int], ...] = ()  # running numbers per KV head, with the count of each
    keeps_probabilities: bool = False  # of attention in a step, for running numbers
    event_dtype: torch.dtype = torch.int32  # that numbers the compressions of a slot, as in ops/pools.py

    @classmethod
    def of(
        cls, compressor: Compressor, geometry: CacheGeometry, num_slots: int, capacities: tuple[int, ...],
        max_length: int, most_events: int,
    ) -> CacheSize:  # fmt: skip
        """Determine the size that a compressor needs, whose slots are compressed ``most_events`` times at most."""
        fields, head_fields = compressor.state_fields, tuple(compressor.head_state_fields(geometry.head_dim).items())
        return cls(
            num_slots, capacities, compressor.num_queries, max_length, fields,
            compressor.evicts and compressor.budget_rule.splits_heads, head_fields,
            compressor.needs_attention and bool(fields or head_fields),  # otherwise they are not used
            EVENT_TYPES[bisect_left(MOST_EVENTS[:-1], most_events)],  # the widest for all beyond: no memory holds it
        )  # fmt: skip

    @property
    def has_state(self) -> bool:
        """Whether there are running numbers."""
        return bool(self.state_fields or self.head_state_fields)

    @property
    def entries(self) -> tuple[int, ...]:
        """The entries (L) per slot and KV head, a mean over the heads, at most the longest sequence's tokens."""
        return tuple(min(capacity, self.max_length) for capacity in self.capacities)

    def covers(self, needed: CacheSize) -> bool:
        """Whether a cache of this size can be used where another is needed."""
        slots = needed.num_slots <= self.num_slots and needed.max_length <= self.max_length
        entries = all(theirs <= ours for theirs, ours in zip(needed.capacities, self.capacities, strict=True))
        events = needed.event_dtype.itemsize <= self.event_dtype.itemsize
        same = self == replace(
            needed, num_slots=self.num_slots, max_length=self.max_length, capacities=self.capacities,
            event_dtype=self.event_dtype,
        )  # fmt: skip
        return slots and entries and events and same

    def enlarged(self, size: CacheSize, capacities: tuple[int, ...]) -> CacheSize:
        """This size with room for the slots, tokens and numbers of events of another too, and these capacities."""
        return replace(
            self, num_slots=max(self.num_slots, size.num_slots), max_length=max(self.max_length, size.max_length),
            capacities=capacities, event_dtype=max(self.event_dtype, size.event_dtype, key=lambda t: t.itemsize),
        )  # fmt: skip

    def allocate(self, geometry: CacheGeometry) -> SlotCache:
        """Allocate a cache of this size for a model."""
        return SlotCache(geometry, self)


@dataclass
class PackedPrompts:
    """One layer of newly read prompts, one after the other in ``keys`` and ``values``."""

    lengths: list[int]  # (P)
    places: Tensor  # (P) int64, slot of each prompt
    borders: Tensor  # (P + 1) int64, row of each prompt's first token, and the end of the last
    keys: Tensor  # (H, R, D) rotated, of the pools' type
    values: Tensor  # (H, R, D)
    evicted: list[int]  # (P) tokens that a prompt loses at its end in this layer, a mean over heads
    room: list[int]  # (P) tokens that its slot takes afterwards
    state: list[Tensor] | None = None  # (P) of (H, T, C) running numbers of the tokens, if the compressor has any

    def counts(self, num_heads: int) -> Tensor:
        """The length (P, H), int32, of every head."""
        return self.borders.diff().to(torch.int32)[:, None].expand(-1, num_heads)


class SlotCache:
    """KV memory for a fixed number of sequences and entries, allocated once.

    Keys keep the rotation they were written with; ``positions`` has the index of their tokens. An evicted
    entry's memory is reused by the next token, so nothing grows with the length of a sequence. Addresses never change
    either, since CUDA graphs read them.
    """

    per_slot: tuple[str, ...] = ("tokens", "seen", "prompt_lengths", "prompt_keys", "sequence_keys", "held")
    """Tensors (S + 1, ...) that belong to the sequence in a slot and move with it."""
    attends_at_once = True
    """False where something has to happen between appending a token and attending to it."""

    def __init__(self, geometry: CacheGeometry, size: CacheSize) -> None:
        g, slots, length = geometry, size.num_slots, size.max_length
        device = g.device
        self.geometry, self.size = g, size
        # entries: all layers in one pool, each head of each slot a run of rows; `layers` are views of it
        capacities = torch.tensor(size.entries, dtype=torch.int32)
        heads = (g.num_layers, slots, g.num_kv_heads)
        every_head = capacities[:, None, None].expand(heads).contiguous()
        self.pools = KVPools.ragged(every_head, g.head_dim, g.kv_dtype, device)
        self.layers = [self.pools.layer(layer) for layer in range(g.num_layers)]
        self.key_pool, self.value_pool, self.lengths = self.pools.keys, self.pools.values, self.pools.lengths
        # running numbers: per entry next to the pools, per head next to the lengths; most compressors have 0 of each
        rows, fields = len(self.key_pool), len(size.state_fields)
        self.state_pool = torch.zeros(rows, fields, dtype=torch.float32, device=device)
        width = sum(count for _, count in size.head_state_fields)
        self.head_state = torch.zeros(*heads, width, dtype=torch.float32, device=device)
        # where heads share an arena, one of them may take all of it
        shared = g.num_kv_heads if size.per_head else 1
        self.most_entries = [entries * shared for entries in size.entries]  # of a head
        # attention probabilities of one step, written by one layer after the other
        paid = slots * g.num_heads * max(self.most_entries, default=0) if size.keeps_probabilities else 0
        self._probabilities = torch.zeros(paid, dtype=accumulation_dtype(g.query_dtype), device=device)
        # the most recent queries of every slot: compressors score with them
        ring = (g.num_layers, slots, g.num_heads, size.num_queries, g.head_dim)
        self.queries = torch.zeros(ring, dtype=g.query_dtype, device=device)
        self.deaths = EvictionLog((*heads, length), size.event_dtype, device)
        # per sequence, with the row for padding
        self.tokens = torch.zeros(slots + 1, length, dtype=torch.int64, device=device)
        self.seen = torch.zeros(slots + 1, dtype=torch.int64, device=device)  # tokens fed so far
        self.prompt_lengths = torch.zeros_like(self.seen)
        self.prompt_keys = torch.zeros_like(self.seen)
        self.sequence_keys = torch.zeros_like(self.seen)
        # entries of all heads and full-attention layers together, by token, after it was fed
        self.held = torch.zeros(slots + 1, length, dtype=torch.int32, device=device)
        self.storages: list[SlotStorage] = []
        if size.per_head:
            self.storages.append(Arenas(self.pools, self.state_pool, self.seen, length))
        if g.window:
            self.storages.append(WindowCache(g, self.seen, length, self.pools.errors))
        if g.linear is not None:
            self.storages.append(LinearStates.allocate(g.linear, slots + 1, device))

    def storage(self, wanted: type[StorageKind]) -> StorageKind | None:
        """The storage of this class, None if the model needs none."""
        return next((storage for storage in self.storages if isinstance(storage, wanted)), None)

    def parts(self) -> dict[str, list[Tensor]]:
        """Every tensor of this cache by its purpose: the memory plan counts their bytes."""
        p = self.pools
        positions = [p.positions, p.offsets, p.capacities, p.lengths]
        counters = [self.tokens, self.seen, self.prompt_lengths, self.prompt_keys, self.sequence_keys, self.held]
        tensors = {
            "keys and values": [p.keys, p.values],
            "positions": positions,
            "running numbers": [self.head_state, self.state_pool],
            "queries": [self.queries],
            "the eviction record": [self.deaths.death, self.deaths.steps],
            "attention probabilities": [self._probabilities],
            "tokens and counters": counters if p.errors is None else [*counters, p.errors],
        }
        for storage in self.storages:
            tensors[storage.purpose] = [*tensors.get(storage.purpose, []), *storage.tensors]
        return tensors

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values, all capacities times the bytes per entry."""
        return self.pools.nbytes + sum(storage.pool_bytes for storage in self.storages)

    def full_bytes(self, length: int) -> int:
        """Bytes of keys and values of as many slots, each with a full cache of so many tokens."""
        g = self.geometry
        entries = g.num_layers * length + sum(storage.full_entries(length) for storage in self.storages)
        return self.size.num_slots * g.num_kv_heads * entries * g.bytes_per_entry

    @property
    def most_read(self) -> int:
        """The most entries of a head that attention may read in a step."""
        return max([*self.most_entries, *(storage.most_read for storage in self.storages)])

    @property
    def can_capture(self) -> bool:
        """Whether a decode step can be part of a CUDA graph: running state is updated by Python."""
        return not self.size.has_state

    def probabilities(self, layer: int, num_rows: int) -> Tensor | None:
        """Memory (n, Hq, N) for the attention probabilities of a layer's rows, shared by all layers."""
        if not self.size.keeps_probabilities:
            return None
        shape = (num_rows, self.geometry.num_heads, self.most_entries[layer])
        return self._probabilities[: math.prod(shape)].view(shape)

    def by_slot(self, pool: Tensor, layer: int) -> Tensor:
        """A view (S, H, N, ...) of one layer of a pool of entries; only if heads share a slot's memory equally."""
        return self.by_layer(pool, range(layer, layer + 1))[0]

    def by_layer(self, pool: Tensor, layers: range) -> Tensor:
        """The same of layers of equal size, one after the other: (L', S, H, N, ...)."""
        assert not self.size.per_head
        size, heads = self.size, self.geometry.num_kv_heads
        # pools are ordered by layer, slot, head; layers may differ in width
        rows, width = size.num_slots * heads, size.entries[layers.start]
        first = sum(size.entries[: layers.start]) * rows
        shape = (len(layers), size.num_slots, heads, width, *pool.shape[1:])
        return pool[first : first + len(layers) * rows * width].view(shape)

    # ---------------------------------------------------------------- one layer, called from attention

    def append_and_attend(
        self, layer: int, slots: Tensor, projected: Tensor, transform: QKTransform, probs: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Append one token per slot, store its query, and attend over the slot's entries, that token included.

        Args:
            layer: Layer index.
            slots: Slots (R,), int64, -1 for rows that pad the batch.
            projected: Queries, keys and values (R, Hq + 2 H, D), neither normalized nor rotated.
            transform: Norms and angles (R, D) for queries and keys.
            probs: Output (n, Hq, ``most_entries[layer]``) for the probabilities of the first rows, those in use.
            sinks: Learned sinks (Hq) of the layer.

        Returns:
            The result (R, Hq, D), zeros in padding.
        """
        g, pools, dtype = self.geometry, self.layers[layer], projected.dtype
        projected, transform = transform.rounded(projected, g.num_kv_heads, g.query_dtype)
        seen = self.seen[:-1]  # without the row for padding: ops know padding by slot -1
        if self.attends_at_once and probs is None and sinks is None:
            most = self.most_entries[layer]
            out = ops.append_attend(pools, slots, seen, projected, self.queries[layer], transform, g.scale, most)
        else:
            query = ops.append(pools, slots, seen, projected, self.queries[layer], *transform)
            out = self._attend(layer, slots, query, probs, sinks)
        return out if out.dtype == dtype else out.to(dtype)

    def _attend(self, layer: int, slots: Tensor, query: Tensor, probs: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Attention (R, Hq, D) of rotated queries, whose tokens have just been appended, over all live entries."""
        pools, scale, most = self.layers[layer], self.geometry.scale, self.most_entries[layer]
        if probs is None:
            return ops.decode_attention(pools, slots, query, scale, most, sinks=sinks)
        # probabilities are wanted for the rows in use only; the padding stays zero
        used, out = slice(len(probs)), torch.zeros_like(query)
        out[used] = ops.decode_attention(pools, slots[used], query[used], scale, most, probs=probs, sinks=sinks)
        return out

    def store(
        self, layer: int, prompts: PackedPrompts, scores: Tensor, budgets: Tensor, compressor: Compressor
    ) -> None:
        """Store the best entries of one layer of prompts in their slots.

        Long prompts are never in the slot as a whole: the best entries are chosen in the staging memory, and only they
        are copied. The others die at the prompt's length, as if they had been there and been evicted.

        Args:
            layer: Layer index.
            prompts: Prompts that were read; ``begin`` was called for their slots.
            scores: Scores (P, H, N), float32.
            budgets: Budgets (P, H), int32.
            compressor: Compressor, which determines the pinned entries.
        """
        device, heads = self.key_pool.device, self.geometry.num_kv_heads
        slots, lengths = prompts.places, prompts.counts(heads)
        for storage in self.storages:
            storage.make_room(layer, slots, prompts.evicted, prompts.room, torch.minimum(budgets, lengths))
        # the staged prompts as separate pools: head h begins h times the staged rows further on
        first = torch.arange(heads, device=device) * prompts.keys.shape[1]
        source = KVPools(
            prompts.keys.flatten(0, 1), prompts.values.flatten(0, 1), self.pools.positions,
            offsets=(prompts.borders[:-1, None] + first)[None], capacities=self.pools.capacities[:1],
            lengths=lengths[None].contiguous(),
        )  # fmt: skip
        only = slice(layer, layer + 1)
        ops.evict(
            self.pools.layer(only), slots, scores[None], budgets[None].contiguous(), compressor.num_sinks,
            compressor.window, self.seen[:-1], self.deaths.death[only], source=source, event_steps=self.deaths.steps,
        )  # fmt: skip

    # ---------------------------------------------------------------- a decode step

    def entries_of(self, places: Tensor) -> CachedEntries:
        """The entries of slots (B,) in all layers, for the ops that score them."""
        return CachedEntries(
            self.pools, places, self.seen[:-1], self.queries, self.prompt_lengths[:-1], self.prompt_keys[:-1],
            self.sequence_keys[:-1], self.state_pool, self.geometry.scale, max(self.most_entries),
        )  # fmt: skip

    def begin_step(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and positions (R,) that these slots feed next."""
        positions = self.seen[places]
        return self.tokens[places, positions], positions

    def end_step(self, slots: Tensor, places: Tensor, positions: Tensor) -> Tensor:
        """Count the tokens that were fed, and return the indices (R,) at which the next ones are written.

        Args:
            slots: Slots (R,), -1 for rows that pad the batch.
            places: Rows (R,) of per-slot tensors, for padding the last one.
            positions: Positions (R,) of the tokens.
        """
        after = positions + 1
        self.seen[places] = after
        self.seen[-1:].zero_()  # padding stays at its first token
        self.held[places, positions] = self.entries_held(slots.clamp(min=0))
        return after

    def record_held(self, slots: Tensor) -> None:
        """Update ``held`` of these slots (n,), whose entries changed after their last token was fed."""
        self.held[slots, self.seen[slots] - 1] = self.entries_held(slots)

    def entries_held(self, slots: Tensor) -> Tensor:
        """The number of live entries (n,), int32, of these slots in all layers and heads together."""
        return self.lengths[:, slots].sum(dim=(0, 2), dtype=torch.int32)

    # ---------------------------------------------------------------- data of a finished sequence

    def evictions_of(self, slot: int, end: int, cuts: Cuts) -> EvictionRecord | None:
        """The record of a sequence whose last token has index ``end``, without evictions after its end.

        Args:
            slot: Slot of the sequence.
            end: Index of its last token.
            cuts: Compressions of the slot so far.
        """
        death = self.deaths.of_slot(slot, end)[:, None]
        if self.size.per_head:  # heads lose what their own budgets say, which the host does not know
            return EvictionRecord.from_dense(death)
        compressions = [(length, lost) for length, lost in cuts if length <= end]  # each of them lost something
        num_dead = compressions[-1][1] * self.geometry.num_kv_heads if compressions else 0
        (steps,) = upload([[length for length, _ in compressions]], death.device)
        return EvictionRecord.of_sequence(death, steps, num_dead)

    def entries_read(self, slot: int, prompt_length: int, end: int) -> Tensor | None:
        """The number of entries () that the decode steps of a sequence read, if fewer than they held; else None."""
        return None

    # ---------------------------------------------------------------- whole slots

    def begin(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], prompt_keys: Sequence[int]) -> None:
        """Empty slots and assign them to new prompts, whose keys and values follow layer by layer."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        places, counts, keys, tokens = upload([slots, lengths, prompt_keys, padded], self.tokens.device)
        for storage in self.storages:
            storage.begin(places)
        self.deaths.begin(places)
        self.lengths.index_fill_(1, places, 0)
        self.head_state.index_fill_(1, places, 0)
        self.seen[places] = self.prompt_lengths[places] = counts
        self.sequence_keys[places] = self.prompt_keys[places] = keys
        self.tokens[places, :longest] = tokens

    def compact(
        self, chosen: SlotSelection, scores: Tensor, budgets: Tensor, compressor: Compressor, room: Tensor
    ) -> None:
        """Evict all but the best entries of these slots, and make room for the next tokens.

        The survivors keep their order and close up at the front of each head; an evicted token's death is the number of
        tokens fed so far: the query of the last one still saw it, the next will not.

        Args:
            chosen: Slots (B).
            scores: Scores (L, B, H, N), float32, N as large as the longest head needs.
            budgets: Budgets (L, B, H), int32.
            compressor: Compressor, which determines the pinned entries.
            room: Number of tokens (B,), int64, that each slot must take.
        """
        if compressor.score_field:
            within = (slice(None), chosen.places)
            rows, live = gather_heads(self.pools.offsets[within], self.lengths[within], scores.shape[-1])
            self.state_pool[rows[live], compressor.state_fields.index(compressor.score_field)] = scores[live]
        ops.evict(
            self.pools, chosen.places, scores, budgets, compressor.num_sinks, compressor.window, self.seen[:-1],
            self.deaths.death, self.state_pool, held=self.held[:-1], event_steps=self.deaths.steps,
        )  # fmt: skip
        for storage in self.storages:
            storage.compact(chosen.places, room, chosen.width)

    def save(self, slot: int, length: int, num_entries: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Copy everything that a slot holds after ``length`` tokens, for :meth:`restore`.

        ``num_entries`` (L) of each head, if the host knows them, save a wait for the device.
        """
        # of the entries only the live ones are copied, so that a saved slot is no larger than necessary
        rows = self._live_rows(slot, self.lengths[:, slot], num_entries)
        content = {name: pool[rows] for name, pool in self._entry_pools().items()}
        content |= {name: getattr(self, name)[:, slot].clone() for name in _PER_LAYER}
        content |= {name: getattr(self, name)[slot].clone() for name in self.per_slot}
        content["death"] = self.deaths.of_slot(slot)  # as steps: caches may differ in how they number events
        for storage in self.storages:
            content |= storage.save(slot, length)
        return content

    def restore(self, slot: int, content: dict[str, Tensor], num_entries: Sequence[int] | None = None) -> None:
        """Fill a slot with the content from :meth:`save`; ``num_entries`` as there."""
        for storage in self.storages:  # first: a layout of heads determines the rows that the entries go to
            storage.restore(slot, content)
        rows = self._live_rows(slot, content["lengths"], num_entries)
        for name, pool in self._entry_pools().items():
            pool[rows] = content[name]
        for name in _PER_LAYER:
            getattr(self, name)[:, slot] = content[name]
        for name in self.per_slot:
            getattr(self, name)[slot] = content[name]
        self.deaths.restore(slot, content["death"])

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots (B,) to as many others: prompts to their samples. No slot is in both."""
        for storage in self.storages:
            storage.fork(sources, destinations)
        # the op copies entries, queries and deaths; the small per-slot tensors follow
        ops.fork(self.pools, sources, destinations, self.queries, self.deaths.death, self.state_pool)
        self.head_state[:, destinations] = self.head_state[:, sources]
        self.deaths.steps[destinations] = self.deaths.steps[sources]
        for name in self.per_slot:
            tensor: Tensor = getattr(self, name)
            tensor[destinations] = tensor[sources]

    def content_bytes(self, content: dict[str, Tensor]) -> int:
        """Bytes of keys, values and states of a saved slot."""
        names = ["keys", "values", *(name for storage in self.storages for name in storage.content)]
        return sum(content[name].nbytes for name in names if name in content)

    def _live_rows(self, slot: int, lengths: Tensor, num_entries: Sequence[int] | None) -> Tensor:
        if num_entries is None or self.size.per_head:
            width = int(lengths.max()) if len(lengths) else 0  # no layers where all have windows
            rows, live = gather_heads(self.pools.offsets[:, slot], lengths, width)
            return rows[live]
        rows, live = gather_heads(self.pools.offsets[:, slot], lengths, max(num_entries, default=0))
        count = sum(num_entries) * self.geometry.num_kv_heads
        return rows.flatten()[torch.nonzero_static(live.flatten(), size=count).squeeze(1)]

    def _entry_pools(self) -> dict[str, Tensor]:
        p = self.pools
        return {"keys": p.keys, "values": p.values, "positions": p.positions, "state": self.state_pool}


@dataclass(frozen=True)
class SlotSelection:
    """Some slots of a cache, each once."""

    places: Tensor  # (B) int64, on the device
    index: slice | Tensor  # the same to index with, without a copy if they are neighbors
    width: int  # most entries of a head of theirs, where heads differ in room
    turn_starts: Tensor | None = None  # (B, n) int64 index of the first token of each turn, in conversations

    @classmethod
    def of(cls, slots: list[int], places: Tensor, width: int, turn_starts: Tensor | None = None) -> SlotSelection:
        """These slots, which ``places`` (B,) has on the device."""
        neighbors = as_range(slots)
        return cls(places, neighbors if isinstance(neighbors, slice) else places, width, turn_starts)

    def part(self, rows: range) -> SlotSelection:
        """The slots of some rows, one after the other."""
        tensors = ((name, value) for name, value in vars(self).items() if isinstance(value, Tensor))
        changes: dict[str, Any] = {name: value[rows.start : rows.stop] for name, value in tensors}
        if isinstance(self.index, slice):
            changes["index"] = slice(self.index.start + rows.start, self.index.start + rows.stop)
        return replace(self, **changes)

    def turns_of(self, positions: Tensor) -> Tensor | None:
        """The numbers of the turns of tokens at these positions (L' x B, H, N), 0 for the prompt, in conversations."""
        if self.turn_starts is None:
            return None
        starts = self.turn_starts.repeat(len(positions) // len(self.turn_starts), 1)
        return torch.searchsorted(starts, positions.flatten(1), right=True).view_as(positions)

    def of_layers(self, tensor: Tensor) -> Tensor:
        """The rows of these slots in a tensor (L', S, ...), layer by layer: (L' x B, ...)."""
        return tensor[:, self.index].flatten(0, 1)


def as_range(slots: list[int]) -> slice | list[int]:
    """Convert slots to a slice if they are neighbors in order, so that indexing makes no copy."""
    neighbors = slots == list(range(slots[0], slots[0] + len(slots)))
    return slice(slots[0], slots[0] + len(slots)) if neighbors else slots


def latest(lengths: Sequence[int], slots: Sequence[int], size: int) -> list[list[int]]:
    """The last ``size`` tokens of prompts that stand one after the other: row, slot, and place in a ring of that size.

    Args:
        lengths: Lengths of the prompts.
        slots: Slots of the prompts.
        size: Size of the ring.
    """
    rows, owners, places, start = list[int](), list[int](), list[int](), 0
    for length, slot in zip(lengths, slots, strict=True):
        positions = range(max(0, length - size), length)
        rows += [start + position for position in positions]
        owners += [slot] * len(positions)
        places += [position % size for position in positions]
        start += length
    return [rows, owners, places]
