"""Compression: what a compressor sees of the cache, and what its verdict does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops.float8 import to_computed
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.rollout.cache import PackedPrompts, SlotCache
from sparse_rl_lightning.rollout.trigger import Trigger
from sparse_rl_lightning.types import LayerState


@dataclass(frozen=True)
class Compression:
    """A compressor at work on a cache."""

    compressor: Compressor
    num_layers: int

    @cached_property
    def trigger(self) -> Trigger:
        """When slots are compressed and to how much."""
        return Trigger(self.compressor, self.num_layers)

    # ---------------------------------------------------------------- at work

    def store_prompts(self, cache: SlotCache, layer: int, prompts: PackedPrompts) -> None:
        """Take one layer of prompts into their slots, compressed where they reach their limit.

        Args:
            cache: Where they go; their last queries are in its ring.
            layer: Layer index.
            prompts: What was read.
        """
        c, heads, device = self.compressor, cache.geometry.num_kv_heads, cache.key_pool.device
        budgets = torch.tensor(prompts.lengths, dtype=torch.int32, device=device)[:, None].expand(-1, heads).clone()
        scores = torch.zeros(len(prompts.slots), heads, max(prompts.lengths), dtype=torch.float32, device=device)
        long = [i for i, length in enumerate(prompts.lengths) if length >= prompts.limits[i]]
        seen = list(range(len(prompts.slots))) if c.state_fields else long
        state = prompt_state(cache, layer, prompts, seen) if seen else None
        if state is not None and prompts.mass is not None:
            width = state.valid.shape[-1]
            c.update_state(state, torch.stack([F.pad(mass, (0, width - mass.shape[-1])) for mass in prompts.mass]))
        if c.evicts and long:
            assert state is not None
            part = state if seen == long else prompt_state(cache, layer, prompts, long, state)
            limit = self._budgets([prompts.lengths[i] for i in long], device)[layer]
            scores[long, :, : part.valid.shape[-1]], budgets[long] = c.plan_eviction(part, limit)
        cache.store(layer, prompts, scores, budgets, c)
        if state is not None and c.state_fields:
            _store_state(cache, layer, prompts.slots, state)

    def compress(self, cache: SlotCache, slots: list[int], lengths: list[int], room: list[int]) -> None:
        """Cut every layer and head of these slots to its budget, so that the next tokens find room.

        Args:
            cache: Where they are.
            slots: Each once.
            lengths: Tokens fed to the sequence in each slot.
            room: Tokens that each slot takes before it is compressed again.
        """
        plans = [
            self.compressor.plan_eviction(slot_state(cache, layer, slots), budget)
            for layer, budget in enumerate(self._budgets(lengths, cache.key_pool.device))
        ]
        scores, budgets = [scores for scores, _ in plans], [budgets for _, budgets in plans]
        cache.compact(slots, scores, budgets, self.compressor, room)

    def _budgets(self, lengths: list[int], device: torch.device) -> Sequence[int | Tensor]:
        """(L) budgets of sequences of these lengths: a number where they agree, else (S,) for each layer."""
        rows = [self.trigger.budgets(length) for length in lengths]
        if all(row == rows[0] for row in rows):
            return rows[0]
        return list(torch.tensor(rows, device=device).T)

    def note_attention(self, cache: SlotCache, slots: list[int], probs: list[Tensor]) -> None:
        """After a step, let the compressor write down the attention that was paid.

        Args:
            cache: With the step's tokens in it and counted.
            slots: The rows of the step that are in use.
            probs: (L) of (R, Hq, N), the first rows for ``slots``.
        """
        assert cache.state_pool is not None
        chosen = torch.tensor(slots, device=cache.key_pool.device)
        newest = cache.pools.offsets[:, chosen] + cache.lengths[:, chosen] - 1
        cache.state_pool[newest] = 0.0  # the place may hold the numbers of an evicted entry
        for layer, paid in enumerate(probs):
            state = slot_state(cache, layer, slots)
            mass = paid[: len(slots)].view(len(slots), cache.geometry.num_kv_heads, -1, paid.shape[2]).sum(dim=2)
            self.compressor.update_state(state, mass[..., : state.valid.shape[-1]])
            rows, valid = gather_heads(cache.pools.offsets[layer, chosen], state.lengths, state.valid.shape[-1])
            cache.state_pool[rows[valid]] = _columns(cache, state)[valid]


def slot_state(cache: SlotCache, layer: int, slots: list[int]) -> LayerState:
    """What a compressor sees of one layer of these slots."""
    pools, size, heads = cache.layers[layer], cache.size, cache.geometry.num_kv_heads
    own = _as_range(slots)
    lengths = pools.lengths[own]
    if size.per_head:
        rows, valid = gather_heads(pools.offsets[own], lengths, int(lengths.max()))
        keys, values, positions = pools.keys[rows], pools.values[rows], pools.positions[rows]
        running = None if cache.state_pool is None else cache.state_pool[rows]
    else:
        width = size.entries[layer]
        first = sum(size.entries[:layer]) * size.num_slots * heads
        span, shape = slice(first, first + size.num_slots * heads * width), (size.num_slots, heads, width)
        # views where the slots are neighbours
        keys, values = (pool[span].view(*shape, -1)[own] for pool in (pools.keys, pools.values))
        positions = pools.positions[span].view(shape)[own]
        valid = torch.arange(width, device=keys.device) < lengths.unsqueeze(-1)
        running = None if cache.state_pool is None else cache.state_pool[span].view(*shape, -1)[own]
    state = {} if running is None else {n: running[..., i].clone() for i, n in enumerate(size.state_fields)}
    return _state(cache, layer, slots, keys, values, positions.long(), valid, state)


def prompt_state(
    cache: SlotCache, layer: int, prompts: PackedPrompts, chosen: list[int], known: LayerState | None = None
) -> LayerState:
    """The chosen prompts as a compressor sees a slot, padded to the longest of them.

    Args:
        cache: Where they go.
        layer: Layer index.
        prompts: What was read.
        chosen: Which of them.
        known: The state of all prompts, whose running numbers are taken over.
    """
    slots, lengths = [prompts.slots[i] for i in chosen], [prompts.lengths[i] for i in chosen]
    index = torch.arange(max(lengths), device=prompts.keys.device)
    held = torch.tensor(lengths, device=index.device)[:, None]
    rows = prompts.starts[chosen, None] + torch.minimum(index, held - 1)
    keys, values = (t[:, rows].transpose(0, 1) for t in (prompts.keys, prompts.values))  # (P, H, N, D)
    shape = keys.shape[:3]
    valid = (index < held)[:, None].expand(shape)
    if known is None:
        state = {name: torch.zeros(shape, device=index.device) for name in cache.size.state_fields}
    else:
        state = {name: own[chosen, :, : len(index)] for name, own in known.state.items()}
    return _state(cache, layer, slots, keys, values, index.expand(shape), valid, state)


def _state(
    cache: SlotCache, layer: int, slots: list[int], keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor,
    state: dict[str, Tensor],
) -> LayerState:  # fmt: skip
    g, own = cache.geometry, _as_range(slots)
    keys, values = (to_computed(t, g.query_dtype) for t in (keys, values))
    tokens = cache.tokens[own].unsqueeze(1).expand(-1, g.num_kv_heads, -1)
    return LayerState(
        keys=keys, values=values, valid=valid, positions=positions, lengths=valid.sum(dim=-1),
        token_ids=tokens.gather(2, positions.clamp(0, tokens.shape[2] - 1)),
        prompt_lengths=cache.prompt_lengths[own], queries=cache.queries[layer, own],
        query_positions=_ring_positions(cache, own), sequence_keys=cache.sequence_keys[own],
        prompt_keys=cache.prompt_keys[own],
        layer_index=layer, scale=g.scale, inv_freq=g.inv_freq, attention_scaling=g.attention_scaling, state=state,
    )  # fmt: skip


def _store_state(cache: SlotCache, layer: int, slots: list[int], state: LayerState) -> None:
    """Write the running numbers of prompts beside those of their entries that were kept."""
    assert cache.state_pool is not None
    chosen = torch.tensor(slots, device=cache.key_pool.device)
    lengths = cache.lengths[layer, chosen]
    rows, live = gather_heads(cache.pools.offsets[layer, chosen], lengths, int(lengths.max()))
    kept = cache.pools.positions[rows].long()
    columns = _columns(cache, state)
    numbers = columns.gather(2, torch.where(live, kept, 0).unsqueeze(-1).expand(-1, -1, -1, columns.shape[-1]))
    cache.state_pool[rows[live]] = numbers[live]


def _columns(cache: SlotCache, state: LayerState) -> Tensor:
    """(S, H, N, C) running numbers as they stand in the pool."""
    return torch.stack([state.state[name] for name in cache.size.state_fields], dim=-1)


def _ring_positions(cache: SlotCache, own: slice | list[int]) -> Tensor:
    """(S, A): which token each place of the query ring speaks of, -1 for none yet."""
    last = cache.seen[own][:, None] - 1
    ring = torch.arange(cache.size.num_queries, device=last.device)
    return (last - (last - ring) % max(cache.size.num_queries, 1)).clamp(min=-1)


def _as_range(slots: list[int]) -> slice | list[int]:
    """The same slots as a slice where they are neighbours in order, so that indexing makes no copy."""
    neighbours = slots == list(range(slots[0], slots[0] + len(slots)))
    return slice(slots[0], slots[0] + len(slots)) if neighbours else slots
