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
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.rollout.cache.slots import PackedPrompts, SlotCache
from sparse_rl_lightning.rollout.cache.trigger import Trigger
from sparse_rl_lightning.rollout.engine.decoder import Decoder
from sparse_rl_lightning.rollout.engine.running_state import as_range, columns, entry_numbers, follow_step, head_columns


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
        if c.evicts and long:
            part = prompt_state(cache, layer, prompts, long)
            limit = self._budgets([prompts.lengths[i] for i in long], device)[layer]
            scores[long, :, : part.valid.shape[-1]], budgets[long] = c.plan_eviction(part, limit)
        cache.store(layer, prompts, scores, budgets, c)
        if prompts.state is not None:
            _store_state(cache, layer, prompts.slots, prompts.state)

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

    def note_step(
        self, cache: SlotCache, decoder: Decoder, layer: int, slots: list[int], positions: Tensor, probs: Tensor | None,
        hidden: Tensor,
    ) -> None:  # fmt: skip
        """In a step, let a compressor with running state write down what the new tokens tell of a layer.

        Args:
            cache: With the step's keys and values of this layer in it.
            decoder: That feeds the tokens.
            layer: Layer index.
            slots: The rows of the step that are in use, the first ones.
            positions: (R,) of the tokens.
            probs: (n, Hq, N) attention paid by the rows in use, where it is needed.
            hidden: (R, E), what attention reads.
        """
        n = len(slots)
        follow_step(self.compressor, cache, decoder, layer, slots, positions[:n], probs, hidden[:n])


def slot_state(cache: SlotCache, layer: int, slots: list[int]) -> LayerState:
    """What a compressor sees of one layer of these slots."""
    pools, own = cache.layers[layer], as_range(slots)
    lengths = pools.lengths[own]
    if cache.arenas is not None:
        rows, valid = gather_heads(pools.offsets[own], lengths, int(lengths.max()))
        keys, values, positions = pools.keys[rows], pools.values[rows], pools.positions[rows]
    else:  # views where the slots are neighbours
        keys, values, positions = (
            cache.by_slot(pool, layer)[own] for pool in (pools.keys, pools.values, pools.positions)
        )
        valid = torch.arange(keys.shape[2], device=keys.device) < lengths.unsqueeze(-1)
    numbers, _, _ = entry_numbers(cache, layer, own)
    return _state(cache, layer, slots, keys, values, positions.long(), valid, numbers)


def prompt_state(cache: SlotCache, layer: int, prompts: PackedPrompts, chosen: list[int]) -> LayerState:
    """The chosen prompts as a compressor sees a slot, padded to the longest of them.

    Args:
        cache: Where they go.
        layer: Layer index.
        prompts: What was read.
        chosen: Which of them.
    """
    slots, lengths = [prompts.slots[i] for i in chosen], [prompts.lengths[i] for i in chosen]
    index = torch.arange(max(lengths), device=prompts.keys.device)
    held = torch.tensor(lengths, device=index.device)[:, None]
    rows = prompts.starts[chosen, None] + torch.minimum(index, held - 1)
    keys, values = (t[:, rows].transpose(0, 1) for t in (prompts.keys, prompts.values))  # (P, H, N, D)
    shape = keys.shape[:3]
    valid = (index < held)[:, None].expand(shape)
    numbers = None if prompts.state is None else _padded([prompts.state[i] for i in chosen])
    return _state(cache, layer, slots, keys, values, index.expand(shape), valid, numbers)


def _state(
    cache: SlotCache, layer: int, slots: list[int], keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor,
    numbers: Tensor | None,
) -> LayerState:  # fmt: skip
    g, own, size = cache.geometry, as_range(slots), cache.size
    keys, values = (to_computed(t, g.query_dtype) for t in (keys, values))
    tokens = cache.tokens[own].unsqueeze(1).expand(-1, g.num_kv_heads, -1)
    return LayerState(
        keys=keys, values=values, valid=valid, positions=positions, lengths=valid.sum(dim=-1),
        token_ids=tokens.gather(2, positions.clamp(0, tokens.shape[2] - 1)),
        prompt_lengths=cache.prompt_lengths[own], queries=cache.queries[layer, own],
        query_positions=_ring_positions(cache, own), sequence_keys=cache.sequence_keys[own],
        prompt_keys=cache.prompt_keys[own],
        layer_index=layer, scale=g.scale, inv_freq=g.inv_freq, attention_scaling=g.attention_scaling,
        state={} if numbers is None else columns(numbers, size.state_fields),
        head_state=head_columns(cache.head_state[layer, own], size.head_state_fields),
    )  # fmt: skip


def _store_state(cache: SlotCache, layer: int, slots: list[int], state: list[Tensor]) -> None:
    """Write the running numbers (P) of (H, T, C) of prompts beside those of their entries that were kept."""
    assert cache.state_pool is not None
    chosen, numbers = torch.tensor(slots, device=cache.key_pool.device), _padded(state)
    lengths = cache.lengths[layer, chosen]
    rows, live = gather_heads(cache.pools.offsets[layer, chosen], lengths, int(lengths.max()))
    kept = torch.where(live, cache.pools.positions[rows].long(), 0)
    kept_numbers = numbers.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, numbers.shape[-1]))
    cache.state_pool[rows[live]] = kept_numbers[live]


def _padded(numbers: list[Tensor]) -> Tensor:
    """(P, H, N, C) of (P) times (H, T, C)."""
    longest = max(own.shape[1] for own in numbers)
    return torch.stack([F.pad(own, (0, 0, 0, longest - own.shape[1])) for own in numbers])


def _ring_positions(cache: SlotCache, own: slice | list[int]) -> Tensor:
    """(S, A): which token each place of the query ring speaks of, -1 for none yet."""
    last = cache.seen[own][:, None] - 1
    ring = torch.arange(cache.size.num_queries, device=last.device)
    return (last - (last - ring) % max(cache.size.num_queries, 1)).clamp(min=-1)
