"""What a compressor sees: the entries of some slots, one layer at a time, several layers at once, or prompts.

Slots and layers are independent of each other, so to a compressor the same slots in several layers are just more slots.
That saves kernel launches per layer. A compressor that declares ``needs_layer_index`` sees one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.cache.running_state import columns, head_columns
from sparse_rl_lightning.cache.slots import PackedPrompts, SlotCache, SlotSelection
from sparse_rl_lightning.ops.pools import gather_heads, live_entries, to_computed
from sparse_rl_lightning.records import LayerState

BLOCK_BYTES = {"cpu": 2**23}  # of the entries that are looked at together: they should stay in a CPU's cache
BLOCK_BYTES_ON_DEVICE = 2**28
BYTES_BESIDE_SCORES = 32  # positions, token and masks of an entry whose score is known


def blocks(cache: SlotCache, num_slots: int, has_scores: bool, one_by_one: bool) -> Iterator[tuple[range, range]]:
    """Cut layers and slots into blocks whose heads have equal room, small enough to be looked at together.

    Args:
        cache: Cache of the slots.
        num_slots: Number of slots, cut only where one layer of them is too much.
        has_scores: Whether scores are known, so that keys and values are not looked at.
        one_by_one: Whether every layer has separate blocks.
    """
    g, entries = cache.geometry, cache.most_entries
    most = BLOCK_BYTES.get(g.device.type, BLOCK_BYTES_ON_DEVICE)
    start = 0
    while start < g.num_layers:
        nbytes = g.num_kv_heads * entries[start] * (BYTES_BESIDE_SCORES if has_scores else g.bytes_per_entry)
        fitting = max(most // nbytes, 1)  # slots, of one layer or of several
        count = -(-num_slots // -(-num_slots // fitting))  # slots of a block, alike
        last = start + (1 if one_by_one else max(fitting // num_slots, 1))
        stop = start + 1
        while stop < min(last, g.num_layers) and entries[stop] == entries[start]:
            stop += 1
        for first in range(0, num_slots, count):
            yield range(start, stop), range(first, min(first + count, num_slots))
        start = stop


def block_state(cache: SlotCache, layers: range, chosen: SlotSelection, has_scores: bool = False) -> LayerState:
    """The state of slots in some layers of equal room, as compressors see it: (layers x slots) in place of slots.

    Args:
        cache: Cache of the slots.
        layers: Layers, one after the other.
        chosen: Slots.
        has_scores: Whether scores are known: keys, values and queries then have no channels, and no numbers are there.
    """
    size, within, channels = cache.size, slice(layers.start, layers.stop), 0 if has_scores else None
    key_pool, value_pool, queries = (t[..., :channels] for t in (cache.key_pool, cache.pools.values, cache.queries))
    state_pool = None if has_scores else cache.state_pool
    lengths = chosen.of_layers(cache.lengths[within])
    # heads of different sizes are not evenly spaced: gather a padded copy; `valid` excludes the padding
    if cache.size.per_head:
        rows, valid = gather_heads(chosen.of_layers(cache.pools.offsets[within]), lengths, chosen.width)
        keys, values, positions = (pool[rows] for pool in (key_pool, value_pool, cache.pools.positions))
        numbers = None if state_pool is None else state_pool[rows]
    else:  # views, if all slots are chosen, or neighbors in one layer
        keys, values, positions = (
            chosen.of_layers(cache.by_layer(pool, layers)) for pool in (key_pool, value_pool, cache.pools.positions)
        )
        valid = live_entries(lengths, keys.shape[2])
        numbers = None if state_pool is None else chosen.of_layers(cache.by_layer(state_pool, layers))
    head_numbers = chosen.of_layers(cache.head_state[within]) if size.head_state_fields else None
    positions = positions.long()
    return _state(
        cache, layers, chosen.places.repeat(len(layers)),
        chosen.of_layers(queries[within]), keys, values, positions, valid, numbers, head_numbers,
        chosen.turns_of(positions),
    )  # fmt: skip


def prompt_state(
    cache: SlotCache, layer: int, prompts: PackedPrompts, chosen: list[int], on_device: Tensor
) -> LayerState:
    """The state of the chosen prompts, in the form of slots, padded to the longest of them.

    Args:
        cache: Cache that they are stored in.
        layer: Layer index.
        prompts: Prompts that were read.
        chosen: Indices of the prompts.
        on_device: The same, (P',) int64.
    """
    index = torch.arange(max(prompts.lengths[i] for i in chosen), device=prompts.keys.device)
    lengths = prompts.borders.diff()[on_device, None]
    # behind its end a prompt repeats its last token, so that no row of the next prompt is read
    rows = prompts.borders[on_device, None] + torch.minimum(index, lengths - 1)
    keys, values = (t[:, rows].transpose(0, 1) for t in (prompts.keys, prompts.values))  # (P, H, N, D)
    shape = keys.shape[:3]
    valid = (index < lengths)[:, None].expand(shape)
    numbers = None if prompts.state is None else padded([prompts.state[i] for i in chosen])
    slots = prompts.places[on_device]
    head_numbers = cache.head_state[layer, slots] if cache.size.head_state_fields else None
    return _state(
        cache, range(layer, layer + 1), slots, cache.queries[layer, slots], keys, values, index.expand(shape), valid,
        numbers, head_numbers,
    )  # fmt: skip


def _state(
    cache: SlotCache, layers: range, slots: Tensor, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor,
    valid: Tensor, numbers: Tensor | None, head_numbers: Tensor | None, turns: Tensor | None = None,
) -> LayerState:  # fmt: skip
    """The state of rows (S,) of slots, which may be repeated."""
    g, size = cache.geometry, cache.size
    keys, values = (to_computed(t, g.query_dtype) for t in (keys, values))
    last = cache.seen[slots][:, None] - 1
    ring = torch.arange(size.num_queries, device=last.device)
    # each place of the query ring has the newest position that is the place modulo the ring's size, -1 for none yet
    query_positions = (last - (last - ring) % max(size.num_queries, 1)).clamp(min=-1)
    return LayerState(
        keys=keys, values=values, valid=valid, positions=positions, lengths=valid.sum(dim=-1),
        # positions of free memory are arbitrary, so they are clamped before the lookup
        token_ids=cache.tokens[slots[:, None, None], positions.clamp(0, cache.tokens.shape[1] - 1)],
        prompt_lengths=cache.prompt_lengths[slots], queries=queries, query_positions=query_positions,
        sequence_keys=cache.sequence_keys[slots], prompt_keys=cache.prompt_keys[slots],
        layer=g.full_layers[layers.start] if len(layers) == 1 else "rows of several layers",
        scale=g.scale, inv_freq=g.inv_freq, attention_scaling=g.attention_scaling,
        state={} if numbers is None else columns(numbers, size.state_fields),
        head_state={} if head_numbers is None else head_columns(head_numbers, size.head_state_fields), turns=turns,
    )  # fmt: skip


def padded(numbers: list[Tensor]) -> Tensor:
    """Stack (P) times (H, T, C) to (P, H, N, C)."""
    longest = max(prompt.shape[1] for prompt in numbers)
    return torch.stack([F.pad(prompt, (0, 0, 0, longest - prompt.shape[1])) for prompt in numbers])
