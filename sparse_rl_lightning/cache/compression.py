"""Compression: when a slot is full, to which budget it is cut, what a compressor sees, and what its answer changes.

The host decides when. A decode step adds one entry to every head and a compression leaves the budget for the
sequence's length, so a slot's room follows from that length alone, without asking the device. The compressor decides
which entries to evict: it sees :class:`~sparse_rl_lightning.records.LayerState`, views of the pools if the slots are
neighbors, and returns scores and budgets (``compressors/base.py``). The cache moves entries and records deaths
(:meth:`~sparse_rl_lightning.cache.slots.SlotCache.compact`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparse_rl_lightning.cache.running_state import update_after_step
from sparse_rl_lightning.cache.slots import CacheSize, PackedPrompts, SlotCache, SlotSelection
from sparse_rl_lightning.cache.states import block_state, blocks, padded, prompt_state
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.policies.geometry import CacheGeometry

ENDLESS = torch.iinfo(torch.int64).max
"""Room of a slot that is never compressed."""


class Trigger:
    """The lengths at which a compressor's slots are compressed.

    A layer is full when it has ``budget(t) + buffer`` entries, where t is the number of tokens fed to the sequence.
    When the first layer is full, all layers of its slot are compressed, each to its budget at t. The number of entries
    of a layer is a mean over its heads. The compressor's schedule is taken as it is now; L is the number of layers.

    Args:
        compressor: Compressor with schedule, budget rule and buffer.
        num_layers: Number of layers L.

    Raises:
        ValueError: If the rule leaves a head less than sinks and window at some length.
    """

    def __init__(self, compressor: Compressor, num_layers: int) -> None:
        c = compressor
        self.evicts, self.buffer, self.compress_prompt = c.evicts, c.buffer, c.compress_prompt
        self.num_layers, self._starts = num_layers, c.schedule.starts
        # budgets change with the length in steps, the schedule's levels
        self._levels = [c.layer_budgets(num_layers, budget) for budget in c.schedule.budgets]
        self._by_layer = list(zip(*self._levels, strict=True))  # (L) of the budgets at all levels

    def budgets(self, length: int) -> list[int]:
        """The budgets (L) of a sequence of ``length`` tokens."""
        return self._levels[self._level(length)]

    def capacities(self, longest_prompt: int, max_length: int) -> tuple[int, ...]:
        """The entries (L) per slot and KV head for sequences of any length, or of ``max_length`` without eviction."""
        if not self.evicts:
            return (max_length,) * self.num_layers
        # a prompt that is stored whole may exceed every budget; decoding adds at most the buffer before a compression
        prompt = 0 if self.compress_prompt else longest_prompt
        return tuple(max(*budgets, prompt) + self.buffer for budgets in self._by_layer)

    def most_events(self, max_length: int) -> int:
        """The most compressions of a sequence of up to ``max_length`` tokens, a few more where budgets change."""
        if not self.evicts:
            return 0
        # the first is at budget + buffer tokens or later, the next a buffer later, or where another level begins
        events = max(0, max_length - min(map(min, self._levels))) // self.buffer
        if self.compress_prompt:  # whose end may fill the smallest layers alone; the next are full a token later
            above = [sorted(set(budgets))[1] for budgets in self._levels if len(set(budgets)) > 1]
            later = [max(0, max_length - budget) // self.buffer for budget in above]
            events = max([events, *(1 + number for number in later if number)])
        return events + len(self._levels) - 1

    def after_prompt(self, prompt_length: int) -> tuple[tuple[int, ...], int]:
        """The number of tokens (L) of a new prompt that are evicted at its end, and the room of its slot then."""
        if not self.evicts:
            return (0,) * self.num_layers, ENDLESS
        # stored whole, a prompt can never reach its own length plus the buffer: no compression at its end
        floor = 0 if self.compress_prompt else prompt_length
        limits = [(budget, max(budget, floor) + self.buffer) for budget in self.budgets(prompt_length)]
        evicted = tuple(prompt_length - budget if prompt_length >= limit else 0 for budget, limit in limits)
        return evicted, self.room(prompt_length, evicted, floor)

    def evicted(self, length: int, before: Sequence[int]) -> tuple[int, ...]:
        """The number of tokens (L) that a sequence has lost after a compression at ``length``.

        Args:
            length: Number of tokens fed.
            before: Number of tokens (L) lost before.
        """
        # a budget that grew leaves a layer below it: nothing is evicted there, and what was lost stays lost
        return tuple(max(b, length - budget) for b, budget in zip(before, self.budgets(length), strict=True))

    def room(self, length: int, evicted: Sequence[int], floor: int = 0) -> int:
        """The number of tokens that may be fed to a slot before it must be compressed.

        Args:
            length: Number of tokens fed so far.
            evicted: Number of tokens (L) lost so far.
            floor: Least budget: a prompt that is stored whole has the buffer to itself before the first compression.
        """
        if not self.evicts:
            return ENDLESS
        layers = set(zip(evicted, self._by_layer, strict=True))  # most layers are alike
        return min(self._full_at(length, lost, budgets, floor) for lost, budgets in layers) - length

    def smallest_budget(self, first: int, last: int) -> int:
        """The smallest budget of a layer at the lengths from ``first`` to ``last``."""
        return min(min(budgets) for budgets in self._levels[self._level(first) : self._level(last) + 1])

    def _level(self, length: int) -> int:
        """The index of the level of the schedule that ``length`` falls into, from 0."""
        return max(bisect_right(self._starts, length) - 1, 0)

    def _full_at(self, length: int, lost: int, budgets: Sequence[int], floor: int) -> int:
        """The first length from ``length + 1`` on at which a layer is full."""
        starts = self._starts
        # full means length - lost = budget + buffer, with the budget at that very length: a result beyond the start of
        # the next level would use a budget that no longer applies, so that level is tried
        for level in range(self._level(length + 1), len(starts)):
            full = max(max(budgets[level], floor) + self.buffer + lost, starts[level], length + 1)
            if level + 1 == len(starts) or full < starts[level + 1]:
                return full
        raise AssertionError("the last level has no end")


def native_scores(compressor: Compressor, cache: SlotCache, places: Tensor) -> Tensor | None:
    """Scores (L, B, H, N), float32, of slots (B,) from ops on all layers; heads are equally long.

    Nothing is read from a GPU: scores that are NaN are reported by ``evict``. On a CPU None is returned for them: the
    general path then scores again, and names the layer.
    """
    scores = compressor.score_cached(cache.entries_of(places)).to(torch.float32)
    return None if scores.device.type == "cpu" and bool(scores.isnan().any()) else scores


@dataclass(frozen=True)
class CompressionEvent:
    """The slots that are compressed now, and to how much."""

    chosen: SlotSelection
    budgets: list[list[int]]  # (B) of (L), of each slot at its length
    on_device: Tensor  # (L, B) int64, the same

    def layer_budgets(self, layers: range) -> int | Tensor:
        """The budget of these layers, or (L' x B,) where slots or layers differ."""
        numbers = (row[layer] for row in self.budgets for layer in layers)
        return common(numbers, self.on_device[layers.start : layers.stop].flatten())

    def part(self, rows: range) -> CompressionEvent:
        """The event of some of its rows of slots."""
        return CompressionEvent(
            self.chosen.part(rows), self.budgets[rows.start : rows.stop], self.on_device[:, rows.start : rows.stop]
        )


def common(values: Iterable[int], each: Tensor) -> int | Tensor:
    """The number that all of these values are; if they differ, the tensor of each."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else each


@dataclass
class Compression:
    """A compressor applied to a cache: all evictions go through it. Its trigger stays: other budgets need another."""

    compressor: Compressor
    num_layers: int

    @cached_property
    def trigger(self) -> Trigger:
        """The lengths at which slots are compressed, and their budgets."""
        return Trigger(self.compressor, self.num_layers)

    def cache_size(self, geometry: CacheGeometry, num_slots: int, longest_prompt: int, longest: int) -> CacheSize:
        """The size of a cache whose sequences have up to ``longest`` tokens, ``longest_prompt`` of them in prompts."""
        capacities = self.trigger.capacities(longest_prompt, longest)
        events = self.trigger.most_events(longest)
        return CacheSize.of(self.compressor, geometry, num_slots, capacities, longest, events)

    def store_prompts(self, cache: SlotCache, layer: int, prompts: PackedPrompts) -> None:
        """Store one layer of prompts in their slots, compressed if they reach their limit.

        Prompts below it are stored whole: their budget is their length, so that the scores do not matter.

        Args:
            cache: Cache of the slots; the prompts' last queries are in its ring.
            layer: Layer index.
            prompts: Prompts that were read.
        """
        c, heads, device = self.compressor, cache.geometry.num_kv_heads, cache.key_pool.device
        budgets = prompts.counts(heads).clone()
        scores = torch.zeros(len(prompts.lengths), heads, max(prompts.lengths), dtype=torch.float32, device=device)
        # only these are scored; for the others zero scores and a budget of the full length keep everything
        long = [i for i, count in enumerate(prompts.evicted) if count]
        if long:
            kept = [prompts.lengths[i] - prompts.evicted[i] for i in long]
            chosen, budgets_there = upload([long, kept], device)
            state = prompt_state(cache, layer, prompts, long, chosen)
            scores[chosen, :, : state.valid.shape[-1]], budgets[chosen] = c.plan_eviction(
                state, common(kept, budgets_there)
            )
        cache.store(layer, prompts, scores, budgets, c)
        if prompts.state is not None:
            numbers = padded(prompts.state)
            if c.score_field:  # 0 where a prompt was not scored
                numbers[..., c.state_fields.index(c.score_field)] = scores
            _store_state(cache, layer, prompts.places, numbers)

    def compress(
        self, cache: SlotCache, slots: list[int], lengths: list[int], room: list[int],
        turn_starts: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Cut every layer and head of these slots to its budget, so that the next tokens have room.

        Args:
            cache: Cache of the slots.
            slots: Slot indices, each once.
            lengths: Number of tokens fed to the sequence in each slot.
            room: Number of tokens that each slot takes before the next compression.
            turn_starts: Index of the first token of every turn of each sequence, the policy's and observations, if
                observations are protected.
        """
        budgets = [self.trigger.budgets(length) for length in lengths]
        by_layer, turns = list(zip(*budgets, strict=True)), turn_starts or []
        most = max((len(starts) for starts in turns), default=0)
        ragged = [[*starts, *[ENDLESS] * (most - len(starts))] for starts in turns]
        on_device, room_there, budgets_there, starts = upload([slots, room, by_layer, ragged], cache.key_pool.device)
        c = self.compressor
        # ops number the layers of full attention, where a model may have others in between
        is_numbered = not c.needs_layer_index or cache.geometry.full_layers == tuple(range(self.num_layers))
        native = native_scores(c, cache, on_device) if c.scores_natively and is_numbered else None
        is_open = turn_starts is None and not c.protect_prompt and not c.protect_token_ids
        if native is not None and is_open and not cache.size.per_head:
            kept = torch.empty(native.shape[:3], dtype=torch.int32, device=native.device)
            kept.copy_(budgets_there.unsqueeze(-1))
            cache.compact(SlotSelection.of(slots, on_device, 0), native, kept, c, room_there)
            return
        # one read, and only where heads differ in length
        width = int(cache.lengths[:, on_device].max()) if cache.size.per_head else 0
        chosen = SlotSelection.of(slots, on_device, width, starts if turns else None)
        event = CompressionEvent(chosen, budgets, budgets_there)
        # all layers are scored before the first entry moves: one op then evicts from all of them
        scores, kept = self._plan(cache, event, native)
        cache.compact(event.chosen, scores, kept, c, room_there)

    def _plan(self, cache: SlotCache, event: CompressionEvent, native: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores (L, B, H, N) and budgets (L, B, H) of all layers, several of them at once where that can be."""
        heads, device, has_scores = cache.geometry.num_kv_heads, cache.key_pool.device, native is not None
        # layers may differ in width: zeros up to the widest, beyond every layer's live entries
        shape = (self.num_layers, len(event.budgets), heads, event.chosen.width or max(cache.most_entries))
        scores, refused = torch.zeros(shape, dtype=torch.float32, device=device), list[Tensor]()
        budgets = torch.empty(shape[:-1], dtype=torch.int32, device=device)
        for layers, rows in blocks(cache, shape[1], has_scores, self.compressor.needs_layer_index and not has_scores):
            block, at = event.part(rows), (slice(layers.start, layers.stop), slice(rows.start, rows.stop))
            state = block_state(cache, layers, block.chosen, has_scores)
            into = scores[at][..., : state.valid.shape[-1]]
            block_scores = None if native is None else native[at][..., : into.shape[-1]].flatten(0, 1)
            plan = self.compressor.propose_eviction(state, block.layer_budgets(layers), block_scores)
            into.copy_(plan.scores.reshape(into.shape))
            budgets[at] = plan.budgets.reshape(into.shape[:-1])
            refused.append(plan.is_refused)
        if bool(torch.stack(refused).any()):  # the one read of an event
            for layer in range(self.num_layers):  # the first layer that cannot be cut raises
                layers = range(layer, layer + 1)
                self.compressor.plan_eviction(block_state(cache, layers, event.chosen), event.layer_budgets(layers))
        return scores, budgets

    def record_step(
        self, cache: SlotCache, layer: int, slots: list[int], positions: Tensor, probs: Tensor | None, hidden: Tensor,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        """Update running numbers with the tokens of a decode step, one layer at a time.

        Args:
            cache: Cache that already has the step's keys and values of this layer.
            layer: Layer index.
            slots: Slots of the rows in use, which come first.
            positions: Positions (R,) of the tokens.
            probs: Attention probabilities (n, Hq, N) of the rows in use, if needed.
            hidden: Hidden states (R, E), the input of attention.
            weights: Output projection (Hq, D, E) of the layer, if needed.
        """
        n = len(slots)
        update_after_step(self.compressor, cache, layer, slots, positions[:n], probs, hidden[:n], weights)


def _store_state(cache: SlotCache, layer: int, slots: Tensor, numbers: Tensor) -> None:
    """Write the running numbers (P, H, N, C) of prompts to the places of the entries that their slots keep."""
    lengths = cache.lengths[layer, slots]
    rows, live = gather_heads(cache.pools.offsets[layer, slots], lengths, int(lengths.max()))
    # an entry's position is its index in the prompt, so it finds the number that belongs to it
    kept = torch.where(live, cache.pools.positions[rows].long(), 0)
    kept_numbers = numbers.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, numbers.shape[-1]))
    cache.state_pool[rows[live]] = kept_numbers[live]
