"""Running state: numbers per entry and per head that a compressor accumulates, updated with every new token.

A decode step brings one token per slot, whose numbers are in the cache. A prompt is processed in blocks while it is
read, and its numbers are kept outside the cache until it is known which of its entries are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.cache.slots import SlotCache, as_range
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops.attention import entries_share
from sparse_rl_lightning.ops.pools import accumulation_dtype, gather_heads, to_computed, to_stored
from sparse_rl_lightning.records import StateUpdate

BLOCK_NUMBERS = {"cpu": 2**19}  # size of a block of a prompt, which stays in a CPU's cache
BLOCK_NUMBERS_ON_DEVICE = 2**24


@dataclass(frozen=True)
class Piece:
    """The tokens of one prompt in one layer that have just been read, after those read before."""

    slot: int
    query: Tensor  # (Q, Hq, D) rotated
    keys: Tensor  # (T, H, D) rotated, of all tokens so far, the piece last; or of the piece alone
    values: Tensor  # (T, H, D)
    hidden: Tensor  # (Q, E)
    sinks: Tensor | None = None  # (Hq) learned ones of the layer


def update_after_prompt(
    compressor: Compressor, cache: SlotCache, layer: int, piece: Piece, numbers: Tensor, weights: Tensor | None
) -> None:
    """Update a compressor's running numbers with the tokens of a piece, block by block.

    Args:
        compressor: Compressor with running state.
        cache: Cache with the prompt's slot and the numbers of its heads.
        layer: Layer index.
        piece: Piece of the prompt, in order.
        numbers: Numbers (H, T', C) of all the prompt's tokens, written in place.
        weights: Output projection (Hq, D, E) of the layer, if the compressor needs it.
    """
    g, device, slots = cache.geometry, numbers.device, slice(piece.slot, piece.slot + 1)
    before = len(piece.keys) - len(piece.query)
    for first, last in _blocks(len(piece.query), g.num_heads * max(len(piece.keys), piece.hidden.shape[1]), device):
        stop, new = before + last, slice(before + first, before + last)
        keys, values = (
            to_computed(to_stored(t[new].transpose(0, 1)[None], g.kv_dtype), g.query_dtype)
            for t in (piece.keys, piece.values)
        )
        requested = {}
        if compressor.needs_attention:
            requested["mass"] = _paid(piece.query[first:last], piece.keys[:stop], g.scale, piece.sinks)
        _update(
            compressor, cache, weights, layer, slots, numbers[None, :, :stop], cache.head_state[layer, slots],
            torch.full((1, g.num_kv_heads), stop, dtype=torch.int32, device=device),
            torch.arange(new.start, new.stop, device=device)[None], keys, values, piece.hidden[None, first:last],
            requested,
        )  # fmt: skip


def update_after_step(
    compressor: Compressor, cache: SlotCache, layer: int, slots: list[int], positions: Tensor, probs: Tensor | None,
    hidden: Tensor, weights: Tensor | None,
) -> None:  # fmt: skip
    """Update a compressor's running numbers with the tokens of a decode step.

    Args:
        compressor: Compressor with running state.
        cache: Cache that already has the step's keys and values of this layer.
        layer: Layer index.
        slots: Slots in use, in the order of the rows.
        positions: Positions (S,) of the tokens.
        probs: Attention probabilities (S, Hq, N), if needed.
        hidden: Hidden states (S, E).
        weights: Output projection (Hq, D, E) of the layer, if needed.
    """
    g, pools, chosen = cache.geometry, cache.layers[layer], as_range(slots)
    lengths = pools.lengths[chosen]
    newest = (pools.offsets[chosen] + lengths - 1).unsqueeze(-1)  # (S, H, 1)
    cache.state_pool[newest] = 0.0  # the row may still have the numbers of an evicted entry
    numbers, rows, valid = entry_numbers(cache, layer, chosen)
    head_numbers = cache.head_state[layer, chosen]
    keys, values = (to_computed(pool[newest], g.query_dtype) for pool in (pools.keys, pools.values))
    requested = {}
    if probs is not None:
        mass = probs.view(len(slots), g.num_kv_heads, -1, probs.shape[2]).sum(dim=2)
        requested["mass"] = mass[:, :, None, : numbers.shape[2]].to(torch.float32)
    _update(
        compressor, cache, weights, layer, chosen, numbers, head_numbers, lengths, positions[:, None], keys, values,
        hidden[:, None], requested,
    )  # fmt: skip
    if rows is not None and valid is not None:
        cache.state_pool[rows[valid]] = numbers[valid]
    if isinstance(chosen, list):  # indexing with a list made a copy
        cache.head_state[layer, chosen] = head_numbers
        if rows is None and cache.size.state_fields:
            cache.by_slot(cache.state_pool, layer)[chosen] = numbers


def update_after_chunk(
    compressor: Compressor, cache: SlotCache, layer: int, piece: Piece, new: Tensor, positions: Tensor, seen: Tensor,
    weights: Tensor | None,
) -> None:  # fmt: skip
    """Update a compressor's running numbers with several tokens that were written behind the entries of a slot.

    Args:
        compressor: Compressor with running state.
        cache: Cache that already has the tokens' keys and values of this layer.
        layer: Layer index.
        piece: The tokens, with the keys and values of all entries of the slot.
        new: Rows (H, Q) of the pools where the tokens are.
        positions: Positions (Q,) of the tokens.
        seen: Entries (H, Q, T) that each query sees, or (1, Q, T) for all heads.
        weights: Output projection (Hq, D, E) of the layer, if needed.
    """
    g, pools, slots = cache.geometry, cache.layers[layer], slice(piece.slot, piece.slot + 1)
    cache.state_pool[new] = 0.0  # the rows may still have the numbers of evicted entries
    numbers, rows, valid = entry_numbers(cache, layer, slots)
    keys, values = (to_computed(pool[new], g.query_dtype)[None] for pool in (pools.keys, pools.values))
    requested = {}
    if compressor.needs_attention:
        mass = _paid(piece.query, piece.keys, g.scale, piece.sinks, seen)
        requested["mass"] = F.pad(mass, (0, numbers.shape[2] - mass.shape[3]))
    _update(
        compressor, cache, weights, layer, slots, numbers, cache.head_state[layer, slots], pools.lengths[slots],
        positions[None], keys, values, piece.hidden[None], requested,
    )  # fmt: skip
    if rows is not None and valid is not None:
        cache.state_pool[rows[valid]] = numbers[valid]


def entry_numbers(
    cache: SlotCache, layer: int, slots: slice | list[int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The running numbers (S, H, N, C) of the entries of some slots; a view if they are neighbors with equal heads.

    If heads differ in size, also the rows (S, H, N) of the pool, and a mask of the live ones.
    """
    pools = cache.layers[layer]
    if not cache.size.state_fields:  # numbers per head alone: nothing to look for on the device
        return cache.head_state.new_zeros(*pools.lengths[slots].shape, cache.most_entries[layer], 0), None, None
    if not cache.size.per_head:
        return cache.by_slot(cache.state_pool, layer)[slots], None, None
    lengths = pools.lengths[slots]
    rows, valid = gather_heads(pools.offsets[slots], lengths, int(lengths.max()))
    return cache.state_pool[rows], rows, valid


def columns(numbers: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Running numbers (S, H, N, C) by name, views of (S, H, N)."""
    return dict(zip(names, numbers.unbind(-1), strict=True))


def head_columns(numbers: Tensor, fields: Sequence[tuple[str, int]]) -> dict[str, Tensor]:
    """Numbers (S, H, C) per head by name, views of (S, H, C')."""
    names, widths = [name for name, _ in fields], [width for _, width in fields]
    return dict(zip(names, torch.split(numbers, widths, -1), strict=True))


# ---------------------------------------------------------------- private


def _update(
    compressor: Compressor, cache: SlotCache, weights: Tensor | None, layer: int, slots: slice | list[int],
    numbers: Tensor, head_numbers: Tensor, lengths: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
    hidden: Tensor, requested: dict[str, Tensor],
) -> None:  # fmt: skip
    size = cache.size
    with torch.autocast(numbers.device.type, enabled=False):  # mixed-precision training would round sums to bf16
        if compressor.needs_hidden_states:
            requested["hidden_states"] = hidden.to(torch.float32)
        if weights is not None:
            requested["output_norms"] = output_norms(values, weights)
        update = StateUpdate(
            MappingProxyType(columns(numbers, size.state_fields)),
            MappingProxyType(head_columns(head_numbers, size.head_state_fields)),
            lengths, positions, keys, values, cache.prompt_lengths[slots], cache.geometry.full_layers[layer],
            MappingProxyType(requested),
        )  # fmt: skip
        compressor.update_state(update)


def output_norms(values: Tensor, weights: Tensor) -> Tensor:
    """The 1-norms of W v (S, Hq, Q), float32, for values (S, H, Q, D) and weights (Hq, D, E)."""
    by_head = values.to(weights.dtype).repeat_interleave(len(weights) // values.shape[1], dim=1)
    return (by_head @ weights).abs().sum(dim=-1).to(torch.float32)


def _paid(query: Tensor, keys: Tensor, scale: float, sinks: Tensor | None, seen: Tensor | None = None) -> Tensor:
    """Attention (1, H, Q, T), float32, from the last tokens (Q, Hq, D) to keys (T, H, D), summed over each group.

    ``seen`` (H, Q, T) are the keys that a query sees, default all before its own and that.
    """
    wide, count = accumulation_dtype(keys.dtype), len(query)
    grouped = query.to(keys.dtype).to(wide).view(count, keys.shape[1], -1, keys.shape[2]).permute(1, 2, 0, 3)
    with torch.autocast(keys.device.type, enabled=False):
        logits: Tensor = grouped @ keys.to(wide).permute(1, 2, 0).unsqueeze(1) * scale  # (H, G, Q, T)
    if seen is None:
        later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., -count:].masked_fill_(later, -torch.inf)
    else:
        logits = logits.masked_fill(~seen.unsqueeze(1), -torch.inf)
    probs = logits.softmax(dim=-1)
    if sinks is not None:
        probs = probs * entries_share(logits.logsumexp(dim=-1), sinks.view(*grouped.shape[:2], 1)).unsqueeze(-1)
    return probs.sum(dim=1)[None].to(torch.float32)


def _blocks(count: int, numbers: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """The first and last token of blocks of ``count`` tokens, each of which takes ``numbers`` numbers."""
    size = max(1, BLOCK_NUMBERS.get(device.type, BLOCK_NUMBERS_ON_DEVICE) // numbers)
    return ((first, min(first + size, count)) for first in range(0, count, size))
