"""A compression that is timed: seconds per event, and what running state costs between events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.cache.slots import SlotCache


@dataclass
class Clock:
    """What compressing while decoding takes; medians, so that other work of the machine does not count."""

    events: int = 0  # one slot cut in all its layers and heads
    cuts: list[float] = field(default_factory=list)  # seconds per slot, of each time slots were cut
    notes: list[float] = field(default_factory=list)  # seconds per slot, layer and step, where there is running state
    num_layers: int = 1

    def events_per_second(self, steps: int) -> float:
        """Events per second, each with the running state of ``steps`` steps."""
        return 1 / (median(self.cuts) + steps * self.num_layers * median(self.notes or [0.0]))


@dataclass
class TimedCompression(Compression):
    """A compression that is timed, with what it costs to keep running state up to date."""

    clock: Clock = field(default_factory=Clock)

    def compress(
        self, cache: SlotCache, slots: list[int], lengths: list[int], room: list[int],
        turn_starts: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Compress, and count the seconds."""
        device = cache.geometry.device
        start = now(device)
        super().compress(cache, slots, lengths, room, turn_starts)
        self.clock.cuts.append((now(device) - start) / len(slots))
        self.clock.events += len(slots)

    def record_step(
        self, cache: SlotCache, layer: int, slots: list[int], positions: Tensor, probs: Tensor | None, hidden: Tensor,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        """Note and count the seconds of a step in one layer."""
        start = now(hidden.device)
        super().record_step(cache, layer, slots, positions, probs, hidden, weights)
        self.clock.notes.append((now(hidden.device) - start) / len(slots))


def now(device: torch.device) -> float:
    """Seconds, when everything that was queued on this device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
