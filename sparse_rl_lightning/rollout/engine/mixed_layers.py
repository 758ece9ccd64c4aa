"""Passes through models whose layers are not all of full attention.

A pass (a decode step, packed prompts, a chunk of a long prompt, tokens that extend a slot) is wrapped once: layers of
full attention go on to the pass itself, numbered among their own kind, those with a sliding window to the form of it
that is here, and linear layers go on from the states of its slots. A model without such layers is never wrapped.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.cache.linear_states import LinearStates, Run, recur_pieces, recur_rows
from sparse_rl_lightning.cache.slots import SlotCache, latest
from sparse_rl_lightning.cache.windows import WindowCache
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.attention import causal_attention, packed_attention, visible_attention
from sparse_rl_lightning.ops.pools import to_computed, to_stored
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.rollout.engine.decoders.base import Attend

Pieces: TypeAlias = list[tuple[int, int, int]]
"""Slot, first position and position behind the last of each text in a pass, one after the other."""
ChunkMode: TypeAlias = Literal["chunk", "extension"]
States: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a pass."""


class StepPass(Attend, Protocol):
    """A decode step: each row is the next token of another slot."""

    mode: Literal["step"]
    cache: SlotCache
    slots: Tensor
    places: Tensor


class PackPass(Attend, Protocol):
    """Whole prompts."""

    mode: Literal["pack"]
    cache: SlotCache
    pieces: Pieces
    borders: Tensor


class ChunkPass(Attend, Protocol):
    """One chunk after the other of a long prompt, or tokens that enter slots in use."""

    mode: ChunkMode
    cache: SlotCache
    pieces: Pieces
    staged_bytes: int


FullPass: TypeAlias = StepPass | PackPass | ChunkPass
"""The attention of a pass in layers of full attention."""


class MixedPass:
    """The attention of a pass for every layer of a model, and the pass of its linear layers.

    Args:
        full: Pass of the layers of full attention.
    """

    def __init__(self, full: FullPass) -> None:
        self.full, self.geometry = full, full.cache.geometry
        self._windows: WindowCache | None = full.cache.storage(WindowCache)
        self._linear: LinearStates | None = full.cache.storage(LinearStates)
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, keys and values that a next chunk can see
        if self._windows is not None and full.mode == "step":
            self._windows.begin_step()
        elif self._windows is not None and full.mode == "pack":
            # tokens that are still in the windows when the prompt ends
            slots, _, lengths = zip(*full.pieces, strict=True)
            self._within = upload(latest(lengths, slots, self._windows.width), self.geometry.device)

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer, whose index is that among all layers that have a cache."""
        full, window, index = self.full, self.geometry.window_of(layer), self.geometry.index_in_group[layer]
        if self._windows is None or not window:
            return full(index, projected, transform, hidden, sinks)
        if full.mode == "step":
            return self._windows.append_and_attend(index, full.slots, projected, transform, sinks)
        states = transform.split(projected, self.geometry.num_kv_heads)
        if full.mode == "pack":
            return self._read_pack(full, self._windows, index, window, states, sinks)
        if full.mode == "chunk":
            return self._read_chunk(full, self._windows, index, window, states, sinks)
        return self._extend(full, self._windows, index, window, states, sinks)

    def recur(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """Run a linear layer as :data:`~sparse_rl_lightning.cache.linear_states.Recur` says."""
        assert self._linear is not None
        if self.full.mode == "step":
            return recur_rows(self._linear, self.full.places, layer, hidden, run)
        pieces = [(slot, stop - start) for slot, start, stop in self.full.pieces]
        return recur_pieces(self._linear, pieces, layer, hidden, run)

    @property
    def staged_bytes(self) -> int:
        """Bytes that are staged outside the cache for a prompt in chunks; they grow up to its last chunk."""
        assert self.full.mode == "chunk"
        return self.full.staged_bytes + sum(last.nbytes for both in self._last.values() for last in both)

    # ---------------------------------------------------------------- layers with a window, by their index among them

    def _read_pack(
        self, full: PackPass, windows: WindowCache, layer: int, window: int, states: States, sinks: Tensor | None
    ) -> Tensor:
        lengths = [stop for *_, stop in full.pieces]
        rows, slots, places = self._within
        windows.store(layer, slots, places, states[1][rows], states[2][rows])
        return packed_attention(*states, lengths, full.borders, self.geometry.scale, window, sinks)

    def _read_chunk(
        self, full: ChunkPass, windows: WindowCache, layer: int, window: int, states: States, sinks: Tensor | None
    ) -> Tensor:
        (query, *new), ((slot, start, stop),), width = states, full.pieces, windows.width
        count, out = stop - start, torch.zeros_like(query)
        keys, values = (tensor[:count].to(self.geometry.dtype) for tensor in new)
        if layer in self._last:
            keys, values = (torch.cat(both) for both in zip(self._last[layer], (keys, values), strict=True))
        out[:count] = causal_attention(query[:count], keys, values, self.geometry.scale, window, sinks)
        _store_last(windows, layer, slot, stop, keys, values)
        self._last[layer] = keys[-width:].clone(), values[-width:].clone()  # copies: views would hold the whole chunk
        return out

    def _extend(
        self, full: ChunkPass, windows: WindowCache, layer: int, window: int, states: States, sinks: Tensor | None
    ) -> Tensor:
        """Write each piece over the oldest entries of its slot's ring, and attend over both."""
        g, width, first, out = self.geometry, windows.width, 0, torch.zeros_like(states[0])
        for slot, start, stop in full.pieces:
            count = stop - start
            rows = slice(first, first + count)
            query, key, value = (tensor[rows] for tensor in states)
            positions = torch.arange(max(0, start - width), stop, device=query.device)
            in_ring = positions[:-count] % width
            keys, values = (
                torch.cat([ring[layer, slot][:, in_ring], to_stored(new.transpose(0, 1), ring.dtype)], dim=1)
                for ring, new in ((windows.keys, key), (windows.values, value))
            )
            keys, values = to_computed(keys, g.query_dtype), to_computed(values, g.query_dtype)
            at = positions[-count:, None]
            seen = ((positions <= at) & (positions > at - window))[None]
            out[rows] = visible_attention(query.to(g.query_dtype), keys, values, seen, g.scale, sinks).to(query.dtype)
            _store_last(windows, layer, slot, stop, key, value)
            first = rows.stop
        return out


def _store_last(windows: WindowCache, layer: int, slot: int, stop: int, keys: Tensor, values: Tensor) -> None:
    """Write the last of the tokens (n, H, D) before position ``stop`` into the ring of a slot."""
    keys, values = keys[-windows.width :], values[-windows.width :]
    places = torch.arange(stop - len(keys), stop, device=keys.device) % windows.width
    windows.store(layer, torch.full_like(places, slot), places, keys, values)
