"""Arenas: memory that the heads of a slot share, where their budgets differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_rl_lightning.cache.storage import SlotStorage
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.pools import gather_heads


class Arenas(SlotStorage):
    """Memory that the heads of a slot share in each layer, laid out again at every compression.

    Budgets that differ by head move the borders between heads, inside one piece of memory per layer and slot whose
    size is fixed. Offsets and capacities of the pools change in place.

    Args:
        pools: Pools of all layers, (L, S, H), with the initial layout of every slot.
        state_pool: Running numbers of their entries.
        seen: Number of tokens (S + 1) fed to each slot.
        max_length: Longest sequence in tokens.
    """

    purpose = "positions"

    def __init__(self, pools: KVPools, state_pool: Tensor, seen: Tensor, max_length: int) -> None:
        self.pools, self._state_pool, self._seen, self._max_length = pools, state_pool, seen, max_length
        self._offsets, self._capacities = pools.offsets.clone(), pools.capacities.clone()
        self._starts = self._offsets[..., 0].clone()  # (L, S)
        self._sizes = self._capacities.sum(dim=-1)  # (L, S)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that describe the arenas and the layout of an empty slot."""
        return [self._offsets, self._capacities, self._starts, self._sizes]

    def begin(self, slots: Tensor) -> None:
        """Restore the layout of empty slots (B,): the same for every head."""
        self.pools.offsets[:, slots] = self._offsets[:, slots]
        self.pools.capacities[:, slots] = self._capacities[:, slots]

    def make_room(self, layer: int, slots: Tensor, evicted: Sequence[int], room: Sequence[int], heads: Tensor) -> None:
        """Give the heads of long prompts their share of the slot; shorter ones fit an empty slot's layout whole."""
        long = [i for i, count in enumerate(evicted) if count]
        if long:
            more = self._room(torch.tensor([room[i] for i in long], device=slots.device), slots[long])
            self.lay_out(slice(layer, layer + 1), slots[long], (heads[long] + more)[None])

    def compact(self, slots: Tensor, room: Tensor, width: int) -> None:
        """Lay out slots (B,) again, whose heads differ in length now, each with room until the next eviction."""
        self.move(slots, self.pools.lengths[:, slots] + self._room(room, slots), width)

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Give empty slots (B,) the layout of others."""
        self.lay_out(slice(None), destinations, self.pools.capacities[:, sources])

    def save(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copy the layout of a slot."""
        return {"room": self.pools.capacities[:, slot].clone()}

    def restore(self, slot: int, content: dict[str, Tensor]) -> None:
        """Give an empty slot the layout from :meth:`save`."""
        chosen = torch.tensor([slot], device=self.pools.keys.device)
        self.lay_out(slice(None), chosen, content["room"][:, None])

    def _room(self, room: Tensor, slots: Tensor) -> Tensor:
        """The number of entries (B, 1) that a head of each slot (B,) takes before the next compression, or its end."""
        # a sequence that is never compressed again has endless room (B,), but no more than max_length tokens
        return torch.minimum(room, self._max_length - self._seen[slots])[:, None]

    def lay_out(self, layers: slice, slots: Tensor, room: Tensor) -> None:
        """Give the heads of empty slots (B,) room for (L', B, H) entries, one after the other.

        They fit: :meth:`Compressor.propose_eviction` refuses budgets whose sum is larger than a layer's.
        """
        # a head begins where the heads before it end
        within = room.cumsum(dim=-1) - room
        self.pools.offsets[layers, slots] = self._starts[layers][:, slots].unsqueeze(-1) + within
        self.pools.capacities[layers, slots] = room.to(torch.int32, copy=True)  # room may be a view of the capacities

    def move(self, slots: Tensor, room: Tensor, width: int) -> None:
        """Lay out slots (B,) again for (L, B, H) entries, and move their content.

        Every head has an entry at least, and ``width`` at most.
        """
        lengths = self.pools.lengths[:, slots]
        # rows of the live entries under the old layout and under the new one, in the same order; what is not live
        # repeats its head's first row in both, so that no mask has to be read
        before, _ = gather_heads(self.pools.offsets[:, slots], lengths, width)
        self.lay_out(slice(None), slots, room)
        after, _ = gather_heads(self.pools.offsets[:, slots], lengths, width)
        for pool in (self.pools.keys, self.pools.values, self.pools.positions, self._state_pool):
            pool[after] = pool[before]  # the right side is a copy: places may overlap
