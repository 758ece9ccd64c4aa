"""SlotCache: fixed memory for a fixed number of sequences, eviction in place, and the record of deaths.

Letters as in records.py. Per-slot state has one row more than there are slots: the place of rows that only pad a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.pools import accumulation_dtype, gather_heads
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import NEVER
from sparse_rl_lightning.retrieval.cache import PageCache
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout.cache.arenas import Arenas

_PER_SLOT = ("tokens", "seen", "prompt_lengths", "prompt_keys", "sequence_keys")
_PER_LAYER = ("lengths", "queries", "death", "head_state")


@dataclass(frozen=True)
class CacheSize:
    """What decides how much memory a cache takes and how it is laid out."""

    num_slots: int
    capacities: tuple[int, ...]  # (L) entries per slot and KV head that a sequence without end needs, a mean over heads
    num_queries: int  # most recent queries kept for scoring
    max_length: int  # longest sequence in tokens
    state_fields: tuple[str, ...] = ()  # running numbers per entry
    per_head: bool = False  # heads of a slot share its memory unequally
    retriever: Retriever | None = None  # reads some pages only
    record_pages: bool = False
    head_state_fields: tuple[tuple[str, int], ...] = ()  # running numbers per KV head, and how many of each
    keeps_probabilities: bool = False  # what one layer pays to its entries in a step, for running numbers

    @classmethod
    def of(
        cls, compressor: Compressor, geometry: CacheGeometry, num_slots: int, capacities: tuple[int, ...],
        max_length: int, retriever: Retriever | None = None, record_pages: bool = False,
    ) -> CacheSize:  # fmt: skip
        """What a compressor and a retriever need."""
        fields, head_fields = compressor.state_fields, tuple(compressor.head_state_fields(geometry.head_dim).items())
        return cls(
            num_slots, capacities, compressor.num_queries, max_length, fields,
            compressor.evicts and compressor.budget_rule.splits_heads, retriever, record_pages, head_fields,
            compressor.needs_attention and bool(fields or head_fields),  # else nobody asks for them
        )  # fmt: skip

    @property
    def has_state(self) -> bool:
        """Whether there are running numbers."""
        return bool(self.state_fields or self.head_state_fields)

    def most_entries(self, layer: int, num_kv_heads: int) -> int:
        """What no head of the layer can exceed."""
        return self.entries[layer] * (num_kv_heads if self.per_head else 1)

    @property
    def entries(self) -> tuple[int, ...]:
        """(L) entries per slot and KV head, a mean over the heads: never more than the longest sequence has tokens."""
        return tuple(min(capacity, self.max_length) for capacity in self.capacities)

    def covers(self, other: CacheSize) -> bool:
        """Whether a cache of this size can do the work of the other."""
        slots = other.num_slots <= self.num_slots and other.max_length <= self.max_length
        entries = all(theirs <= own for theirs, own in zip(other.capacities, self.capacities, strict=True))
        same = replace(other, num_slots=self.num_slots, max_length=self.max_length, capacities=self.capacities) == self
        return slots and entries and same

    def together(self, other: CacheSize) -> CacheSize:
        """What covers both where slots are alike, else this."""
        if replace(other, num_slots=self.num_slots, max_length=self.max_length) != self:
            return self
        slots, length = max(self.num_slots, other.num_slots), max(self.max_length, other.max_length)
        return replace(self, num_slots=slots, max_length=length)


@dataclass
class PackedPrompts:
    """One layer of freshly read prompts, one after the other in ``keys`` and ``values``."""

    slots: list[int]  # (P) where they go
    lengths: list[int]  # (P)
    starts: Tensor  # (P) int64, row of each prompt's first token
    keys: Tensor  # (H, R, D) rotated, of the pools' type
    values: Tensor  # (H, R, D)
    limits: list[int]  # (P) lengths from which on a prompt is compressed in this layer
    room: list[int]  # (P) tokens that its slot takes afterwards
    state: list[Tensor] | None = None  # (P) of (H, T, C) running numbers of the tokens, where the compressor has any


class SlotCache:
    """KV memory for a fixed number of sequences and entries, allocated once.

    Keys keep the rotation they were written with; ``positions`` remembers where they come from. An evicted
    entry's memory is reused by the next token, so nothing grows with the length of a sequence.
    """

    def __init__(self, geometry: CacheGeometry, size: CacheSize) -> None:
        g, slots, length = geometry, size.num_slots, size.max_length
        device = g.device
        self.geometry, self.size = g, size
        capacities = torch.tensor(size.entries, dtype=torch.int32, device=device)
        heads = (g.num_layers, slots, g.num_kv_heads)
        self.pools = KVPools.ragged(capacities[:, None, None].expand(heads).contiguous(), g.head_dim, g.kv_dtype)
        self.layers = [self.pools.layer(layer) for layer in range(g.num_layers)]
        self.key_pool, self.value_pool, self.lengths = self.pools.keys, self.pools.values, self.pools.lengths
        self.arenas = Arenas(self.pools) if size.per_head else None
        rows, fields = len(self.key_pool), len(size.state_fields)
        self.state_pool = torch.zeros(rows, fields, dtype=torch.float32, device=device) if fields else None
        width = sum(count for _, count in size.head_state_fields)
        self.head_state = torch.zeros(*heads, width, dtype=torch.float32, device=device)
        most = max(size.most_entries(layer, g.num_kv_heads) for layer in range(g.num_layers))
        paid = slots * g.num_heads * most if size.keeps_probabilities else 0
        self._probabilities = torch.zeros(paid, dtype=accumulation_dtype(g.query_dtype), device=device)
        ring = (g.num_layers, slots, g.num_heads, size.num_queries, g.head_dim)
        self.queries = torch.zeros(ring, dtype=g.query_dtype, device=device)
        self.death = torch.full((*heads, length), NEVER, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(slots + 1, length, dtype=torch.int64, device=device)
        self.seen = torch.zeros(slots + 1, dtype=torch.int64, device=device)  # tokens fed so far
        self.prompt_lengths = torch.zeros_like(self.seen)
        self.prompt_keys = torch.zeros_like(self.seen)
        self.sequence_keys = torch.zeros_like(self.seen)
        self.pages = None
        if size.retriever is not None:
            self.pages = PageCache(size.retriever, g, slots, size.entries, length, size.record_pages)

    def serves(self, geometry: CacheGeometry, size: CacheSize) -> bool:
        """Whether a rollout of this size can use this memory."""
        sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "kv_dtype", "query_dtype", "device")
        same = all(getattr(geometry, name) == getattr(self.geometry, name) for name in sizes)
        current = self.pages is None or self.pages.is_current
        return same and current and self.size.covers(size)  # sizes only compare where there are as many layers

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values, all capacities times the bytes per entry, and of what is kept of pages."""
        return self.pools.nbytes + (0 if self.pages is None else self.pages.nbytes)

    def most_entries(self, layer: int) -> int:
        """What no head of the layer can exceed."""
        return self.size.most_entries(layer, self.geometry.num_kv_heads)

    def probabilities(self, layer: int, num_rows: int) -> Tensor | None:
        """(n, Hq, N) room for the attention probabilities of a layer's rows, the same memory for all layers."""
        if not self.size.keeps_probabilities:
            return None
        shape = (num_rows, self.geometry.num_heads, self.most_entries(layer))
        return self._probabilities[: math.prod(shape)].view(shape)

    def by_slot(self, pool: Tensor, layer: int) -> Tensor:
        """One layer of a pool of entries, (S, H, N, ...), without a copy; where heads share a slot's memory equally."""
        assert self.arenas is None
        size, heads = self.size, self.geometry.num_kv_heads
        first, width = sum(size.entries[:layer]) * size.num_slots * heads, size.entries[layer]
        return pool[first : first + size.num_slots * heads * width].view(size.num_slots, heads, width, *pool.shape[1:])

    # ---------------------------------------------------------------- one layer, called from attention

    def append_and_attend(
        self, layer: int, slots: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
        probs: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write one token per slot, remember its query, and attend over all live entries or the pages that are read.

        Args:
            layer: Layer index.
            slots: (R,) int64, -1 for rows that pad the batch.
            query: (R, Hq, D) not yet rotated.
            key: (R, H, D) not yet rotated.
            value: (R, H, D).
            cos: (R, D), of the tokens' positions.
            sin: (R, D).
            probs: (n, Hq, N) to be filled with the probabilities of the first rows, which are those in use; N =
                ``most_entries(layer)``.

        Returns:
            (R, Hq, D), zeros in padding.
        """
        pools, kind = self.layers[layer], self.geometry.query_dtype
        own = query.to(kind, copy=True, memory_format=torch.contiguous_format)  # it is rotated in place
        key, value = (t.to(kind).contiguous() for t in (key, value))
        ops.append(pools, slots, self.seen[:-1], own, key, value, self.queries[layer], cos, sin)
        if self.pages is not None and self.pages.reads(layer):
            out = self.pages.attend(layer, pools, slots, own, self.geometry.scale)
        elif probs is None:
            out = ops.decode_attention(pools, slots, own, self.geometry.scale, self.most_entries(layer))
        else:
            used, out = slice(len(probs)), torch.zeros_like(own)
            out[used] = ops.decode_attention(
                pools, slots[used], own[used], self.geometry.scale, self.most_entries(layer), probs=probs
            )
        return out.to(query.dtype)

    def store(
        self, layer: int, prompts: PackedPrompts, scores: Tensor, budgets: Tensor, compressor: Compressor
    ) -> None:
        """Take the best entries of one layer of prompts into their slots.

        Args:
            layer: Layer index.
            prompts: What was read; ``begin`` was called for their slots.
            scores: (P, H, N) float32.
            budgets: (P, H) int32.
            compressor: Says what is pinned.
        """
        device, heads = self.key_pool.device, self.geometry.num_kv_heads
        slots = torch.tensor(prompts.slots, device=device)
        lengths = torch.tensor(prompts.lengths, dtype=torch.int32, device=device)[:, None].expand(-1, heads)
        if self.arenas is not None:
            long = [i for i, length in enumerate(prompts.lengths) if length >= prompts.limits[i]]
            if long:
                room = self._room([prompts.room[i] for i in long], slots[long])
                self.arenas.lay_out(
                    slice(layer, layer + 1), slots[long], (torch.minimum(budgets, lengths)[long] + room)[None]
                )
        first = torch.arange(heads, device=device) * prompts.keys.shape[1]
        source = KVPools(
            prompts.keys.flatten(0, 1), prompts.values.flatten(0, 1), self.pools.positions,
            offsets=(prompts.starts[:, None] + first)[None], capacities=self.pools.capacities[:1],
            lengths=lengths[None].contiguous(),
        )  # fmt: skip
        ops.evict(
            self.pools.single(layer), slots, scores[None], budgets[None].contiguous(), compressor.num_sinks,
            compressor.window, self.seen[:-1], self.death[layer : layer + 1], source=source,
        )  # fmt: skip
        if self.pages is not None:
            self.pages.refresh(layer, self.layers[layer], slots)

    # ---------------------------------------------------------------- whole slots

    def begin(self, slot: int, prompt: Sequence[int], prompt_key: int) -> None:
        """Empty a slot and give it to a new prompt, whose keys and values follow layer by layer."""
        if self.arenas is not None:
            self.arenas.reset(slot)
        self.lengths[:, slot] = self.head_state[:, slot] = 0
        self.death[:, slot] = NEVER
        self.seen[slot] = self.prompt_lengths[slot] = len(prompt)
        self.sequence_keys[slot] = self.prompt_keys[slot] = prompt_key
        self.tokens[slot, : len(prompt)] = torch.tensor(prompt, device=self.tokens.device)

    def compact(
        self, slots: list[int], scores: list[Tensor], budgets: list[Tensor], compressor: Compressor, room: list[int]
    ) -> None:
        """Evict all but the best entries of these slots, and make room for the next tokens.

        Args:
            slots: Each slot once.
            scores: (L) of (S, H, N) float32, N as large as a layer needs.
            budgets: (L) of (S, H) int32.
            compressor: Says what is pinned.
            room: Tokens that each slot must take.
        """
        chosen = torch.tensor(slots, device=self.key_pool.device)
        widest = max(layer.shape[-1] for layer in scores)
        ops.evict(
            self.pools, chosen, torch.stack([F.pad(layer, (0, widest - layer.shape[-1])) for layer in scores]),
            torch.stack(budgets), compressor.num_sinks, compressor.window, self.seen[:-1], self.death, self.state_pool,
        )  # fmt: skip
        if self.arenas is not None:
            self.arenas.move(chosen, self.lengths[:, chosen] + self._room(room, chosen), self.state_pool)
        self._refresh_pages(chosen)

    def held(self, slots: Tensor) -> Tensor:
        """(n,) live entries of these slots, a mean over layers and heads."""
        return self.lengths[:, slots].to(torch.float32).mean(dim=(0, 2))

    def read(self, slot: int) -> dict[str, Tensor]:
        """A copy of everything one slot holds, for :meth:`write`."""
        rows = self._live_rows(slot, self.lengths[:, slot])
        content = {name: pool[rows] for name, pool in self._entry_pools().items()}
        content |= {name: getattr(self, name)[:, slot].clone() for name in _PER_LAYER}
        content |= {name: getattr(self, name)[slot].clone() for name in _PER_SLOT}
        return content | ({} if self.arenas is None else {"room": self.pools.capacities[:, slot].clone()})

    def write(self, slot: int, content: dict[str, Tensor]) -> None:
        """Fill a slot with what :meth:`read` returned."""
        if self.arenas is not None:
            chosen = torch.tensor([slot], device=self.key_pool.device)
            self.arenas.lay_out(slice(None), chosen, content["room"][:, None])
        rows = self._live_rows(slot, content["lengths"])
        for name, pool in self._entry_pools().items():
            pool[rows] = content[name]
        for name in content.keys() & set(_PER_LAYER):  # older sessions had no numbers per head
            getattr(self, name)[:, slot] = content[name]
        for name in _PER_SLOT:
            getattr(self, name)[slot] = content[name]
        self._refresh_pages(torch.tensor([slot], device=self.key_pool.device))

    def fork(self, source: int, destinations: list[int]) -> None:
        """Copy a slot to others: a prompt to all its samples."""
        if not destinations:
            return
        there = torch.tensor(destinations, device=self.key_pool.device)
        if self.arenas is not None:
            room = self.pools.capacities[:, source]
            self.arenas.lay_out(slice(None), there, room[:, None].expand(-1, len(there), -1))
        ops.fork(self.pools, torch.full_like(there, source), there, self.queries, self.death, self.state_pool)
        self.head_state[:, there] = self.head_state[:, source : source + 1]
        for name in _PER_SLOT:
            tensor: Tensor = getattr(self, name)
            tensor[there] = tensor[source].clone()
        if self.pages is not None:
            self.pages.fork(source, there)

    def _room(self, tokens: list[int], slots: Tensor) -> Tensor:
        """(B, 1) places that a head of each slot (B,) needs for so many tokens more: there may not come so many."""
        room = torch.tensor(tokens, device=slots.device)
        return torch.minimum(room, self.size.max_length - self.seen[slots])[:, None]

    def _refresh_pages(self, slots: Tensor) -> None:
        """Entries of these slots (B,) have moved: summarise their pages anew."""
        for layer, pools in enumerate(self.layers):
            if self.pages is not None:
                self.pages.refresh(layer, pools, slots)

    def _live_rows(self, slot: int, lengths: Tensor) -> Tensor:
        rows, live = gather_heads(self.pools.offsets[:, slot], lengths, int(lengths.max()))
        return rows[live]

    def _entry_pools(self) -> dict[str, Tensor]:
        pools = {"keys": self.pools.keys, "values": self.pools.values, "positions": self.pools.positions}
        return pools if self.state_pool is None else pools | {"state": self.state_pool}
