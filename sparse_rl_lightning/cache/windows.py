"""WindowCache: the last W tokens of every slot in the layers with a sliding window.

The evictor of such a layer is fixed, so nothing is scored, moved or recorded: the token at position t has place t
modulo W, where it replaces the one that has just left the window. Attention does not depend on the order of entries.
All layers and heads of a slot are as full as its sequence is long, which ``seen`` of the cache says already.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.cache.storage import SlotStorage
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.pools import to_stored
from sparse_rl_lightning.policies.geometry import CacheGeometry

RINGS = ("window_keys", "window_values")
"""Names of keys and values in a saved slot."""


class WindowCache(SlotStorage):
    """Rings of keys and values, allocated once.

    Args:
        geometry: Sizes and windows of the model.
        seen: Number of tokens (S + 1) fed to each slot.
        max_length: Longest sequence in tokens; no ring is longer.
        errors: Where CUDA kernels report errors.
    """

    purpose, content = "windows", RINGS

    def __init__(self, geometry: CacheGeometry, seen: Tensor, max_length: int, errors: Tensor | None) -> None:
        g, self.geometry, self.seen, num_slots = geometry, geometry, seen[:-1], len(seen) - 1
        self.width = min(g.window, max_length)
        heads = (len(g.window_layers), num_slots, g.num_kv_heads)
        every_head = torch.full(heads, self.width, dtype=torch.int32)
        self.pools = replace(KVPools.ragged(every_head, g.head_dim, g.kv_dtype, g.device), errors=errors)
        shape = (*heads, self.width, g.head_dim)
        self.keys, self.values = self.pools.keys.view(shape), self.pools.values.view(shape)
        self._rings = dict(zip(RINGS, (self.keys, self.values), strict=True))
        self.lengths = torch.zeros(heads[1:], dtype=torch.int32, device=g.device)  # (S, H) entries, the step's included
        # of each layer: where a step writes, its lengths are the places, and what it reads
        self._written = [self.pools.layer(layer) for layer in range(heads[0])]
        self._read = [replace(layer, lengths=self.lengths) for layer in self._written]
        self._no_queries = torch.zeros(*heads[1:2], g.num_heads, 0, g.head_dim, dtype=g.query_dtype, device=g.device)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is allocated here."""
        p = self.pools
        return [p.keys, p.values, p.positions, p.offsets, p.capacities, p.lengths, self.lengths]

    def full_entries(self, length: int) -> int:
        """Entries of a KV head in all layers with a window, after so many tokens."""
        return len(self.geometry.window_layers) * min(length, self.geometry.window)

    @property
    def pool_bytes(self) -> int:  # type: ignore[override]  # depends on the sizes
        """Bytes of keys and values."""
        return self.pools.nbytes

    @property
    def most_read(self) -> int:  # type: ignore[override]  # likewise
        """The most entries of a head that attention may read in a step."""
        return self.width

    def begin_step(self) -> None:
        """Set the places that slots write to, and how much they read, from the positions of their new tokens."""
        self.pools.lengths.copy_((self.seen % self.width)[:, None])
        self.lengths.copy_((self.seen + 1).clamp(max=self.width)[:, None])

    def append_and_attend(
        self, layer: int, slots: Tensor, projected: Tensor, transform: QKTransform, sinks: Tensor | None = None
    ) -> Tensor:
        """Write one token per slot over the one that leaves the window, and attend over the window.

        Args:
            layer: Place of the layer among those with a window.
            slots: Slots (R,), int64, -1 for rows that pad the batch.
            projected: Queries, keys and values (R, Hq + 2 H, D), neither normalized nor rotated.
            transform: Norms and angles (R, D) for queries and keys.
            sinks: Learned sinks (Hq) of the layer.

        Returns:
            The result (R, Hq, D), zeros in padding.
        """
        g, dtype = self.geometry, projected.dtype
        projected, transform = transform.rounded(projected, g.num_kv_heads, g.query_dtype)
        query = ops.append(self._written[layer], slots, self.seen, projected, self._no_queries, *transform)
        return ops.decode_attention(self._read[layer], slots, query, g.scale, self.width, sinks=sinks).to(dtype)

    def store(self, layer: int, slots: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the last tokens of prompts: keys and values (n, H, D) at ``places`` (n,) of the rings of ``slots``."""
        self.keys[layer][slots, :, places] = to_stored(key, self.keys.dtype)
        self.values[layer][slots, :, places] = to_stored(value, self.values.dtype)

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots (B,) to others."""
        self.pools.lengths.copy_(self.seen.clamp(max=self.width)[:, None])
        ops.fork(self.pools, sources, destinations)

    def save(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copy the entries of a slot that has seen ``length`` tokens."""
        return {name: ring[:, slot, :, :length].clone() for name, ring in self._rings.items()}

    def restore(self, slot: int, content: dict[str, Tensor]) -> None:
        """Fill a slot with the content from :meth:`save`."""
        for name, ring in self._rings.items():
            ring[:, slot, :, : content[name].shape[2]] = content[name]
