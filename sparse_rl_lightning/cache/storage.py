"""SlotStorage: memory of a slot beside the entries that compressors see, filled, copied and saved with the slot.

Layers without full attention store their state here (``windows.py``, ``linear_states.py``), and so does whatever else
has to follow a sequence from slot to slot. A model without any of it has no storages, and pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class SlotStorage:
    """What a :class:`~sparse_rl_lightning.cache.slots.SlotCache` calls of each of its ``storages``."""

    purpose: str
    """Its name in the memory plan."""
    content: tuple[str, ...] = ()
    """Names of keys, values and states among the tensors of a saved slot."""
    pool_bytes = 0  # bytes of keys and values
    most_read = 0  # most entries of a head that attention may read in a step

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is allocated here."""
        raise NotImplementedError

    def full_entries(self, length: int) -> int:
        """Entries of a KV head in all layers kept here, after so many tokens."""
        return 0

    def begin(self, slots: Tensor) -> None:
        """Start new sequences in these slots (B,)."""

    def make_room(self, layer: int, slots: Tensor, evicted: Sequence[int], room: Sequence[int], heads: Tensor) -> None:
        """Prepare slots (P,) for a layer of prompts: ``heads`` (P, H) entries stay of those that lose some."""

    def compact(self, slots: Tensor, room: Tensor, width: int) -> None:
        """Follow an eviction from slots (B,), which take ``room`` (B,) tokens until the next."""

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots (B,) to as many others."""
        raise NotImplementedError

    def save(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copy what a slot holds after ``length`` tokens, for :meth:`restore`."""
        raise NotImplementedError

    def restore(self, slot: int, content: dict[str, Tensor]) -> None:
        """Fill a slot with the content from :meth:`save`."""
        raise NotImplementedError
