"""EvictionLog: which tokens of a slot died, and when.

Letters as in records.py; E events. A token's death is the number of a compression of its slot, narrower than a step,
and each compression has its step once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.records import NEVER


class EvictionLog:
    """The deaths of all tokens in all slots.

    Args:
        shape: Layers, slots, KV heads and longest sequence in tokens.
        dtype: Type that numbers the events of a slot, as in ops/pools.py.
        device: Where the cache is.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        _, num_slots, _, self.max_length = shape
        self.never = torch.iinfo(dtype).max
        self.death = torch.full(shape, self.never, dtype=dtype, device=device)  # (L, S, H, T) number of the event
        events = (num_slots, min(self.max_length, self.never))
        self.steps = torch.full(events, NEVER, dtype=torch.int32, device=device)  # (S, E) tokens fed before each event

    def begin(self, slots: Tensor) -> None:
        """Forget the deaths in these slots (B,)."""
        self.death.index_fill_(1, slots, self.never)
        self.steps.index_fill_(0, slots, NEVER)

    def of_slot(self, slot: int, end: int = NEVER) -> Tensor:
        """The death steps (L, H, T), int32, of the tokens in a slot up to index ``end``, without evictions after it."""
        steps = self.steps[slot]
        # the slot may have gone on for a few steps before the host noticed the end: those deaths are undone
        steps = F.pad(steps.masked_fill(steps > end, NEVER), (0, 1), value=NEVER)
        events = self.death[:, slot, :, : end + 1].clamp(max=len(steps) - 1)
        return steps.index_select(0, events.flatten().to(torch.int32)).view(events.shape)

    def restore(self, slot: int, death: Tensor) -> None:
        """Number death steps (L, H, T) of :meth:`of_slot`; a slot has as many numbers as a sequence has events."""
        last = self.max_length + 1  # behind all steps
        step = death.clamp(max=last).long()
        occurs = torch.zeros(last + 1, dtype=torch.bool, device=step.device)
        occurs.index_fill_(0, step.flatten(), True)
        self.steps[slot] = torch.nonzero_static(occurs[:last], size=self.steps.shape[1], fill_value=NEVER).squeeze(1)
        number = occurs.cumsum(0) - 1
        number[last:].fill_(self.never)
        self.death[:, slot] = number.to(self.death.dtype)[step]
