"""Passes through models whose layers are not all of full attention.

A pass (a decode step, packed prompts, a chunk of a long prompt, tokens that extend a slot) is wrapped once: layers of
full attention go on to the pass itself, numbered among their own kind, those with a sliding window to the form of it
that is here, and linear layers go on from the states of its slots. A model without such layers is never wrapped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.cache.linear_states import EachRow, InPieces, LinearStates, Run
from sparse_rl_lightning.cache.slots import latest
from sparse_rl_lightning.cache.windows import WindowCache
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.attention import causal_attention, packed_attention, visible_attention
from sparse_rl_lightning.ops.pools import to_computed, to_stored
from sparse_rl_lightning.ops.transfers import upload


class MixedPass:
    """The attention of a pass for every layer of a model, and the pass of its linear layers.

    Args:
        own: Pass of the layers of full attention: an ``Attend`` with ``kind``, ``cache`` and, but for a decode step,
            ``pieces``.
    """

    def __init__(self, own: Any) -> None:
        self.own, self.geometry = own, own.cache.geometry
        windows: WindowCache | None = own.cache.other(WindowCache)
        self._windows = None if windows is None else WINDOWED[own.kind](windows, own)
        self._linear: LinearStates | None = own.cache.other(LinearStates)

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer, whose index is that among all layers that have a cache."""
        window, place = self.geometry.window_of(layer), self.geometry.places[layer]
        if self._windows is None or not window:
            out: Tensor = self.own(place, projected, transform, hidden, sinks)
            return out
        return self._windows(place, window, projected, transform, sinks)

    def recur(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """Run a linear layer as :class:`~sparse_rl_lightning.cache.linear_states.Recur` says."""
        assert self._linear is not None
        states = self._linear
        rows = EachRow(states, self.own.rows.places) if self.own.kind == "step" else InPieces(states, self.own.pieces)
        return rows(layer, hidden, run)

    @property
    def staged_bytes(self) -> int:
        """Bytes that are staged outside the cache."""
        own: int = self.own.staged_bytes
        return own + (0 if self._windows is None else self._windows.staged_bytes)


class _WindowPass(ABC):
    """A pass in the layers with a window; ``layer`` is the index among them."""

    staged_bytes = 0

    def __init__(self, windows: WindowCache, own: Any) -> None:
        self.windows, self.own, self.geometry = windows, own, windows.geometry

    @abstractmethod
    def __call__(
        self, layer: int, window: int, projected: Tensor, transform: QKTransform, sinks: Tensor | None
    ) -> Tensor:
        """Attend within windows, and write keys and values into the rings: (R, Hq, D)."""

    def _store_last(self, layer: int, slot: int, stop: int, keys: Tensor, values: Tensor) -> None:
        """Write the last of the tokens (n, H, D) before position ``stop`` into the ring of a slot."""
        keys, values = keys[-self.windows.width :], values[-self.windows.width :]
        places = torch.arange(stop - len(keys), stop, device=keys.device) % self.windows.width
        self.windows.store(layer, torch.full_like(places, slot), places, keys, values)


class _Step(_WindowPass):
    def __init__(self, windows: WindowCache, own: Any) -> None:
        super().__init__(windows, own)
        windows.begin_step()

    def __call__(
        self, layer: int, window: int, projected: Tensor, transform: QKTransform, sinks: Tensor | None
    ) -> Tensor:
        return self.windows.append_and_attend(layer, self.own.rows.slots, projected, transform, sinks)


class _Pack(_WindowPass):
    def __init__(self, windows: WindowCache, own: Any) -> None:
        super().__init__(windows, own)
        # tokens that are still in the windows when the prompt ends
        self._within = upload(latest(own.lengths, own.slots, windows.width), self.geometry.device)

    def __call__(
        self, layer: int, window: int, projected: Tensor, transform: QKTransform, sinks: Tensor | None
    ) -> Tensor:
        g, own, (rows, slots, places) = self.geometry, self.own, self._within
        query, key, value = transform.split(projected, g.num_kv_heads)
        self.windows.store(layer, slots, places, key[rows], value[rows])
        return packed_attention(query, key, value, own.lengths, own.borders, g.scale, window, sinks)


class _Chunks(_WindowPass):
    def __init__(self, windows: WindowCache, own: Any) -> None:
        super().__init__(windows, own)
        g = self.geometry
        none = torch.zeros(0, g.num_kv_heads, g.head_dim, dtype=g.dtype, device=g.device)
        self._last = [(none, none)] * len(g.window_layers)  # keys and values that the next chunk can see

    @property
    def staged_bytes(self) -> int:  # type: ignore[override]  # grows up to the last chunk
        return sum(last.nbytes for both in self._last for last in both)

    def __call__(
        self, layer: int, window: int, projected: Tensor, transform: QKTransform, sinks: Tensor | None
    ) -> Tensor:
        g, (start, stop), prompt = self.geometry, self.own.span, self.own.prompt
        query, key, value = transform.split(projected, g.num_kv_heads)
        count = stop - start
        keys, values = (
            torch.cat([last, new[:count].to(last.dtype)])
            for last, new in zip(self._last[layer], (key, value), strict=True)
        )
        out = torch.zeros_like(query)
        out[:count] = causal_attention(query[:count], keys, values, g.scale, window, sinks)
        if stop == len(prompt.tokens):
            self._store_last(layer, prompt.slot, stop, keys, values)
        else:  # copies: views would hold the whole chunk
            self._last[layer] = keys[-self.windows.width :].clone(), values[-self.windows.width :].clone()
        return out


class _Extension(_WindowPass):
    def __call__(
        self, layer: int, window: int, projected: Tensor, transform: QKTransform, sinks: Tensor | None
    ) -> Tensor:
        query, key, value = transform.split(projected, self.geometry.num_kv_heads)
        out = torch.zeros_like(query)
        for chunk, (first, last) in zip(self.own.chunks, self.own.rows, strict=True):
            own = slice(first, last)
            out[own] = self._extend(layer, window, chunk, query[own], key[own], value[own], sinks)
        return out

    def _extend(
        self, layer: int, window: int, chunk: Any, query: Tensor, new_keys: Tensor, new_values: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write a chunk over the oldest entries of its slot's ring, and attend over both: (Q, Hq, D)."""
        g, windows, width = self.geometry, self.windows, self.windows.width
        ring = torch.arange(max(0, chunk.start - width), chunk.start, device=query.device)  # positions held

        def in_order(held: Tensor, new: Tensor) -> Tensor:
            parts = held[layer, chunk.slot][:, ring % width], to_stored(new.transpose(0, 1), held.dtype)
            return to_computed(torch.cat(parts, dim=1), g.query_dtype)

        keys, values = in_order(windows.keys, new_keys), in_order(windows.values, new_values)
        at = torch.cat([ring, chunk.start + torch.arange(chunk.count, device=query.device)])
        own = at[-chunk.count :, None]
        seen = ((at <= own) & (at > own - window))[None]
        out = visible_attention(query.to(g.query_dtype), keys, values, seen, g.scale, sinks)
        self._store_last(layer, chunk.slot, chunk.stop, new_keys, new_values)
        return out.to(query.dtype)


WINDOWED: dict[str, type[_WindowPass]] = {"step": _Step, "pack": _Pack, "chunks": _Chunks, "extension": _Extension}
"""The form of each kind of pass in layers with a window."""
