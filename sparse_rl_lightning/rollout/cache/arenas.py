"""Arenas: the heads of a slot share one piece of memory in each layer, and every compression shares it out anew."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.pools import gather_heads


class Arenas:
    """Where each head of each slot lives inside the slot's memory of a layer; changes offsets and capacities in place.

    Args:
        pools: Of all layers, (L, S, H), with the layout that every slot begins with.
    """

    def __init__(self, pools: KVPools) -> None:
        self.pools = pools
        self._offsets, self._capacities = pools.offsets.clone(), pools.capacities.clone()
        self._starts = self._offsets[..., 0].clone()  # (L, S)
        self._sizes = self._capacities.sum(dim=-1)  # (L, S)

    def reset(self, slot: int) -> None:
        """The layout of an empty slot: the same for every head."""
        self.pools.offsets[:, slot] = self._offsets[:, slot]
        self.pools.capacities[:, slot] = self._capacities[:, slot]

    def lay_out(self, layers: slice, slots: Tensor, room: Tensor) -> None:
        """Give the heads of empty slots (B,) room for (L', B, H) entries, one after the other."""
        assert bool((room.sum(dim=-1) <= self._sizes[layers][:, slots]).all()), "heads do not fit into their arena"
        within = room.cumsum(dim=-1) - room
        self.pools.offsets[layers, slots] = self._starts[layers][:, slots].unsqueeze(-1) + within
        self.pools.capacities[layers, slots] = room.to(torch.int32, copy=True)  # it may be a view of the capacities

    def move(self, slots: Tensor, room: Tensor, state_pool: Tensor | None) -> None:
        """Lay slots (B,) out anew for (L, B, H) entries and take along what they hold."""
        lengths = self.pools.lengths[:, slots]
        width = int(lengths.max())
        before, live = gather_heads(self.pools.offsets[:, slots], lengths, width)
        self.lay_out(slice(None), slots, room)
        after, _ = gather_heads(self.pools.offsets[:, slots], lengths, width)
        before, after = before[live], after[live]
        pools = [self.pools.keys, self.pools.values, self.pools.positions]
        for pool in pools if state_pool is None else [*pools, state_pool]:
            pool[after] = pool[before]  # the right side is a copy: places may overlap
