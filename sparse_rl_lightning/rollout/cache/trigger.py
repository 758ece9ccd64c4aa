"""When a slot is compressed and to how much: what the host works out from a sequence's own length alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_rl_lightning.compressors.base import Compressor

ENDLESS = torch.iinfo(torch.int64).max
"""Room of a slot that is never compressed."""


class Trigger:
    """The lengths at which a compressor's slots are compressed.

    A layer is full when it holds ``budget(t) + buffer`` entries, t being the tokens fed to the sequence. The first full
    layer has all layers of its slot compressed, each to its budget at t. Entries of a layer are a mean over its heads.
    It takes the compressor's schedule as it is now; L stands for layers.

    Args:
        compressor: Schedule, budget rule and buffer.
        num_layers: L.

    Raises:
        ValueError: If the rule leaves a head less than sinks and window at some length.
    """

    def __init__(self, compressor: Compressor, num_layers: int) -> None:
        c = compressor
        self.evicts, self.buffer, self.compress_prompt = c.evicts, c.buffer, c.compress_prompt
        self.schedule, self.num_layers = c.schedule, num_layers
        self._levels = [c.layer_budgets(num_layers, budget) for budget in c.schedule.budgets]
        self._by_layer = list(zip(*self._levels, strict=True))  # (L) of the budgets at all levels

    def budgets(self, length: int) -> list[int]:
        """(L) what a sequence of ``length`` tokens is compressed to."""
        return self._levels[self.schedule.level(length)]

    def capacities(self, longest_prompt: int, max_length: int) -> tuple[int, ...]:
        """(L) entries per slot and KV head that sequences of any length need, or of ``max_length`` without eviction."""
        if not self.evicts:
            return (max_length,) * self.num_layers
        held = 0 if self.compress_prompt else longest_prompt
        return tuple(max(*own, held) + self.buffer for own in self._by_layer)

    def limits(self, prompt_length: int) -> list[int]:
        """(L) lengths of a prompt from which on it is compressed at the end of its prefill."""
        if not self.evicts:
            return [ENDLESS] * self.num_layers
        held = self._stored_whole(prompt_length)
        return [max(budget, held) + self.buffer for budget in self.budgets(prompt_length)]

    def evicted_from_prompt(self, prompt_length: int) -> tuple[int, ...]:
        """(L) tokens of a fresh prompt that its slot does not hold."""
        pairs = zip(self.limits(prompt_length), self.budgets(prompt_length), strict=True)
        return tuple(prompt_length - budget if prompt_length >= limit else 0 for limit, budget in pairs)

    def evicted(self, length: int, before: Sequence[int]) -> tuple[int, ...]:
        """(L) tokens that a sequence has lost after a compression at ``length``.

        Args:
            length: Tokens fed.
            before: (L) what it had lost before.
        """
        return tuple(max(b, length - own) for b, own in zip(before, self.budgets(length), strict=True))

    def room(self, length: int, evicted: Sequence[int], prompt_length: int | None = None) -> int:
        """Tokens that may still be fed to a slot before it must be compressed.

        Args:
            length: Tokens fed so far.
            evicted: (L) how many of them are lost.
            prompt_length: Of a sequence that has not been compressed since its prefill: a prompt that is stored whole
                has the buffer to itself before it is compressed for the first time.
        """
        if not self.evicts:
            return ENDLESS
        floor = 0 if prompt_length is None else self._stored_whole(prompt_length)
        layers = set(zip(evicted, self._by_layer, strict=True))  # most are alike
        return min(self._full_at(length, lost, own, floor) for lost, own in layers) - length

    def _stored_whole(self, prompt_length: int) -> int:
        return 0 if self.compress_prompt else prompt_length

    def _full_at(self, length: int, lost: int, budgets: Sequence[int], floor: int) -> int:
        """The first length from ``length + 1`` on at which a layer is full."""
        starts = self.schedule.starts
        for level in range(self.schedule.level(length + 1), len(starts)):
            full = max(max(budgets[level], floor) + self.buffer + lost, starts[level], length + 1)
            if level + 1 == len(starts) or full < starts[level + 1]:
                return full
        raise AssertionError("the last level has no end")
