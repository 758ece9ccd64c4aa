"""Arenas: memory that the heads of a slot share, where their budgets differ."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.pools import gather_heads


class Arenas:
    """Memory that the heads of a slot share in each layer, laid out again at every compression.

    Budgets that differ by head move the borders between heads, inside one piece of memory per layer and slot whose
    size is fixed. Offsets and capacities of the pools change in place.

    Args:
        pools: Pools of all layers, (L, S, H), with the initial layout of every slot.
    """

    def __init__(self, pools: KVPools) -> None:
        self.pools = pools
        self._offsets, self._capacities = pools.offsets.clone(), pools.capacities.clone()
        self._starts = self._offsets[..., 0].clone()  # (L, S)
        self._sizes = self._capacities.sum(dim=-1)  # (L, S)

    @property
    def layout(self) -> list[Tensor]:
        """The tensors that describe the arenas and the layout of an empty slot."""
        return [self._offsets, self._capacities, self._starts, self._sizes]

    def reset(self, slots: Tensor) -> None:
        """Restore the layout of empty slots (B,): the same for every head."""
        self.pools.offsets[:, slots] = self._offsets[:, slots]
        self.pools.capacities[:, slots] = self._capacities[:, slots]

    def lay_out(self, layers: slice, slots: Tensor, room: Tensor) -> None:
        """Give the heads of empty slots (B,) room for (L', B, H) entries, one after the other.

        They fit: :meth:`Compressor.propose_eviction` refuses budgets whose sum is larger than a layer's.
        """
        # a head begins where the heads before it end
        within = room.cumsum(dim=-1) - room
        self.pools.offsets[layers, slots] = self._starts[layers][:, slots].unsqueeze(-1) + within
        self.pools.capacities[layers, slots] = room.to(torch.int32, copy=True)  # room may be a view of the capacities

    def move(self, slots: Tensor, room: Tensor, width: int, state_pool: Tensor | None) -> None:
        """Lay out slots (B,) again for (L, B, H) entries, and move their content.

        Every head has an entry at least, and ``width`` at most.
        """
        lengths = self.pools.lengths[:, slots]
        # rows of the live entries under the old layout and under the new one, in the same order; what is not live
        # repeats its head's first row in both, so that no mask has to be read
        before, _ = gather_heads(self.pools.offsets[:, slots], lengths, width)
        self.lay_out(slice(None), slots, room)
        after, _ = gather_heads(self.pools.offsets[:, slots], lengths, width)
        pools = [self.pools.keys, self.pools.values, self.pools.positions]
        for pool in pools if state_pool is None else [*pools, state_pool]:
            pool[after] = pool[before]  # the right side is a copy: places may overlap
