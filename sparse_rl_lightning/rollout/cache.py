"""SlotCache: fixed memory for a fixed number of sequences, eviction in place, and the record of deaths.

Letters as in types.py. Per-slot state has one row more than there are slots: the place of rows that only pad a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.rollout.geometry import CacheGeometry
from sparse_rl_lightning.types import NEVER, LayerState

_PER_SLOT = ("tokens", "seen", "prompt_lengths", "sequence_keys")


@dataclass(frozen=True)
class CacheSize:
    """What decides how much memory a cache takes."""

    num_slots: int
    capacities: tuple[int, ...]  # (L) entries per slot and KV head
    num_queries: int  # most recent queries kept for scoring
    max_length: int  # longest sequence in tokens

    def covers(self, other: CacheSize) -> bool:
        """Whether a cache of this size can do the work of the other."""
        slots = other.num_slots <= self.num_slots and other.max_length <= self.max_length
        entries = all(theirs <= own for theirs, own in zip(other.capacities, self.capacities, strict=True))
        return slots and entries and other.num_queries == self.num_queries


@dataclass
class PackedPrompts:
    """One layer of freshly read prompts, one after the other in ``keys`` and ``values``."""

    slots: list[int]  # (P) where they go
    lengths: list[int]  # (P)
    starts: Tensor  # (P) int64, row of each prompt's first token
    keys: Tensor  # (H, R, D) rotated, of the pools' type
    values: Tensor  # (H, R, D)


class SlotCache:
    """KV memory for a fixed number of sequences and entries, allocated once.

    Keys keep the rotation they were written with; ``positions`` remembers where they come from. An evicted
    entry's memory is reused by the next token, so nothing grows with the length of a sequence.
    """

    def __init__(self, geometry: CacheGeometry, size: CacheSize) -> None:
        g, slots, length = geometry, size.num_slots, size.max_length
        device = g.device
        self.geometry, self.size = g, size
        capacities = torch.tensor(size.capacities, dtype=torch.int32, device=device)
        heads = (g.num_layers, slots, g.num_kv_heads)
        self.pools = KVPools.ragged(capacities[:, None, None].expand(heads).contiguous(), g.head_dim, g.kv_dtype)
        self.layers = [self.pools.layer(layer) for layer in range(g.num_layers)]
        self.key_pool, self.value_pool, self.lengths = self.pools.keys, self.pools.values, self.pools.lengths
        ring = (g.num_layers, slots, g.num_heads, size.num_queries, g.head_dim)
        self.queries = torch.zeros(ring, dtype=g.kv_dtype, device=device)
        self.death = torch.full((*heads, length), NEVER, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(slots + 1, length, dtype=torch.int64, device=device)
        self.seen = torch.zeros(slots + 1, dtype=torch.int64, device=device)  # tokens fed so far
        self.prompt_lengths = torch.zeros_like(self.seen)
        self.sequence_keys = torch.zeros_like(self.seen)

    def serves(self, geometry: CacheGeometry, size: CacheSize) -> bool:
        """Whether a rollout of this size can use this memory."""
        own = self.geometry
        same = (geometry.kv_dtype, geometry.device) == (own.kv_dtype, own.device)
        # memory made under inference_mode cannot be written outside of it
        writable = torch.is_inference_mode_enabled() or not self.key_pool.is_inference()
        return same and writable and self.size.covers(size)

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys and values: the sum of all capacities times the bytes per entry."""
        return self.pools.nbytes

    # ---------------------------------------------------------------- one layer, called from attention

    def append_and_attend(
        self, layer: int, slots: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Write one token per slot, remember its query, and attend over all live entries, itself included.

        Args:
            layer: Layer index.
            slots: (R,) int64, -1 for rows that pad the batch.
            query: (R, Hq, D) not yet rotated.
            key: (R, H, D) not yet rotated.
            value: (R, H, D).
            cos: (R, D), of the tokens' positions.
            sin: (R, D).

        Returns:
            (R, Hq, D), zeros in padding.
        """
        pools, kind = self.layers[layer], self.key_pool.dtype
        own = query.to(kind, copy=True, memory_format=torch.contiguous_format)  # it is rotated in place
        key, value = (t.to(kind).contiguous() for t in (key, value))
        ops.append(pools, slots, self.seen[:-1], own, key, value, self.queries[layer], cos, sin)
        out = ops.attend(pools, slots, own, self.geometry.scale, self.size.capacities[layer])
        return out.to(query.dtype)

    def store_prompts(self, layer: int, prompts: PackedPrompts, compressor: Compressor, limits: list[int]) -> None:
        """Take one layer of prompts into their slots, compressed to the budget where they reach their limit.

        Args:
            layer: Layer index.
            prompts: What was read; ``begin`` was called for their slots, and their last queries are in the ring.
            compressor: Chooses what stays of a long prompt.
            limits: (P) prompt lengths from which on a prompt is compressed.
        """
        device, heads = self.key_pool.device, self.geometry.num_kv_heads
        lengths = torch.tensor(prompts.lengths, device=device)
        budgets = lengths.clone()
        scores = torch.zeros(len(prompts.slots), heads, max(prompts.lengths), dtype=torch.float32, device=device)
        long = [i for i, length in enumerate(prompts.lengths) if length >= limits[i]]
        if compressor.evicts and long:
            state = self._prompt_state(layer, prompts, long)
            scores[long, :, : state.valid.shape[-1]] = compressor.checked_score(state).to(torch.float32)
            budgets[long] = compressor.budget
        first = torch.arange(heads, device=device) * prompts.keys.shape[1]
        source = KVPools(
            prompts.keys.flatten(0, 1), prompts.values.flatten(0, 1), self.pools.positions,
            offsets=(prompts.starts[:, None] + first)[None], capacities=self.pools.capacities[:1],
            lengths=lengths.int()[None, :, None].expand(1, -1, heads).contiguous(),
        )  # fmt: skip
        ops.select_and_store(
            self.pools.single(layer), torch.tensor(prompts.slots, device=device), scores[None],
            budgets.int()[None, :, None].expand(1, -1, heads).contiguous(), compressor.num_sinks, compressor.window,
            self.seen[:-1], source, self.death[layer : layer + 1],
        )  # fmt: skip

    # ---------------------------------------------------------------- whole slots

    def begin(self, slot: int, prompt: Sequence[int], sequence_key: int) -> None:
        """Empty a slot and give it to a new prompt, whose keys and values follow layer by layer."""
        self.lengths[:, slot] = 0
        self.death[:, slot] = NEVER
        self.seen[slot] = self.prompt_lengths[slot] = len(prompt)
        self.sequence_keys[slot] = sequence_key
        self.tokens[slot, : len(prompt)] = torch.tensor(prompt, device=self.tokens.device)

    def compress(self, slots: list[int], compressor: Compressor) -> None:
        """Cut every layer and head of these slots to the budget, so that the next tokens find room."""
        chosen = torch.tensor(slots, device=self.key_pool.device)
        states = (self.layer_state(layer, slots) for layer in range(len(self.layers)))
        by_layer = [compressor.checked_score(state).to(torch.float32) for state in states]
        widest = max(self.size.capacities)
        scores = torch.stack([F.pad(layer, (0, widest - layer.shape[-1])) for layer in by_layer])
        budgets = torch.full(scores.shape[:3], compressor.budget, dtype=torch.int32, device=chosen.device)
        ops.select_and_compact(
            self.pools, chosen, scores, budgets, compressor.num_sinks, compressor.window, self.seen[:-1], self.death
        )

    def layer_state(self, layer: int, slots: list[int]) -> LayerState:
        """What a compressor sees of one layer of these slots."""
        own = _as_range(slots)  # views where the slots are neighbours
        pools, width, g = self.layers[layer], self.size.capacities[layer], self.geometry
        first = int(sum(self.size.capacities[:layer])) * self.size.num_slots * g.num_kv_heads
        span = slice(first, first + width * self.size.num_slots * g.num_kv_heads)
        shape = (self.size.num_slots, g.num_kv_heads, width)
        keys, values = (pool[span].view(*shape, g.head_dim)[own] for pool in (pools.keys, pools.values))
        valid = torch.arange(width, device=keys.device) < pools.lengths[own].unsqueeze(-1)
        positions = pools.positions[span].view(shape)[own].long()
        return self._state(layer, slots, keys, values, positions, valid)

    def held(self, slots: Tensor) -> Tensor:
        """(n,) live entries of these slots, a mean over layers and heads."""
        return self.lengths[:, slots].to(torch.float32).mean(dim=(0, 2))

    def read(self, slot: int) -> dict[str, Tensor]:
        """A copy of everything one slot holds, for :meth:`write`."""
        rows = self._live_rows(slot, self.lengths[:, slot])
        per_entry = {name: getattr(self.pools, name)[rows] for name in ("keys", "values", "positions")}
        per_layer = {name: getattr(self, name)[:, slot].clone() for name in ("lengths", "queries", "death")}
        return per_entry | per_layer | {name: getattr(self, name)[slot].clone() for name in _PER_SLOT}

    def write(self, slot: int, content: dict[str, Tensor]) -> None:
        """Fill a slot with what :meth:`read` returned."""
        rows = self._live_rows(slot, content["lengths"])
        for name in ("keys", "values", "positions"):
            getattr(self.pools, name)[rows] = content[name]
        for name in ("lengths", "queries", "death"):
            getattr(self, name)[:, slot] = content[name]
        for name in _PER_SLOT:
            getattr(self, name)[slot] = content[name]

    def fork(self, source: int, destinations: list[int]) -> None:
        """Copy a slot to others: a prompt to all its samples."""
        if not destinations:
            return
        there = torch.tensor(destinations, device=self.key_pool.device)
        ops.fork(self.pools, torch.full_like(there, source), there, self.queries, self.death)
        for name in _PER_SLOT:
            tensor: Tensor = getattr(self, name)
            tensor[there] = tensor[source].clone()

    # ---------------------------------------------------------------- inside

    def _live_rows(self, slot: int, lengths: Tensor) -> Tensor:
        rows, live = gather_heads(self.pools.offsets[:, slot], lengths, int(lengths.max()))
        return rows[live]

    def _prompt_state(self, layer: int, prompts: PackedPrompts, chosen: list[int]) -> LayerState:
        """The chosen prompts as the compressor sees a slot, padded to the longest of them."""
        slots, lengths = [prompts.slots[i] for i in chosen], [prompts.lengths[i] for i in chosen]
        index = torch.arange(max(lengths), device=prompts.keys.device)
        held = torch.tensor(lengths, device=index.device)[:, None]
        rows = prompts.starts[chosen, None] + torch.minimum(index, held - 1)
        keys, values = (t[:, rows].transpose(0, 1) for t in (prompts.keys, prompts.values))  # (P, H, N, D)
        shape = keys.shape[:3]
        valid = (index < held)[:, None].expand(shape)
        return self._state(layer, slots, keys, values, index.expand(shape), valid)

    def _state(
        self, layer: int, slots: list[int], keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor
    ) -> LayerState:
        g, own = self.geometry, _as_range(slots)
        tokens = self.tokens[own].unsqueeze(1).expand(-1, g.num_kv_heads, -1)
        return LayerState(
            keys=keys, values=values, valid=valid, positions=positions, lengths=valid.sum(dim=-1),
            token_ids=tokens.gather(2, positions.clamp(0, tokens.shape[2] - 1)),
            prompt_lengths=self.prompt_lengths[own], queries=self.queries[layer, own],
            query_positions=self._ring_positions(own), sequence_keys=self.sequence_keys[own],
            layer_index=layer, scale=g.scale, inv_freq=g.inv_freq, attention_scaling=g.attention_scaling,
        )  # fmt: skip

    def _ring_positions(self, own: slice | list[int]) -> Tensor:
        """(S, A): which token each place of the query ring speaks of, -1 for none yet."""
        last = self.seen[own][:, None] - 1
        ring = torch.arange(self.size.num_queries, device=last.device)
        return (last - (last - ring) % max(self.size.num_queries, 1)).clamp(min=-1)


def _as_range(slots: list[int]) -> slice | list[int]:
    """The same slots as a slice where they are neighbours in order, so that indexing makes no copy."""
    neighbours = slots == list(range(slots[0], slots[0] + len(slots)))
    return slice(slots[0], slots[0] + len(slots)) if neighbours else slots
