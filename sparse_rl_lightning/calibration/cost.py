"""The cost model: seconds per decode step, bytes and best batch of dense, evicting and retrieving rollouts.

A step of B sequences that read ``entries`` tokens of the cache each takes::

    overhead + max(W / bandwidth, 2 P B / flops)
             + B entries max(kv / bandwidth, 4 layers heads head_dim / flops) / kv_share

with P weights (W bytes) that a step reads and kv bytes per token of the cache. The overhead is what a step, each of its
layers, and each sequence in a layer take beside that; the eviction of tokens is in it, the choice of pages is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.calibration.shapes import Hardware, ModelShape
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.retrievers import Retriever

Method = Compressor | Retriever
"""``FullKV()`` for dense rollouts, any other compressor for eviction, a retriever that reads some pages."""


@dataclass(frozen=True)
class Work:
    """Sequences of equal length that are decoded together."""

    batch: int
    prompt: int  # tokens in the cache when decoding begins
    length: int  # tokens to decode


@dataclass(frozen=True)
class CostModel:
    """Cost of the rollouts of a model on a machine."""

    shape: ModelShape
    hardware: Hardware

    # ---------------------------------------------------------------- time

    def linear_seconds(self, batch: int) -> float:
        """The seconds of a step's matrix products with the weights."""
        weights = self.shape.weights_read
        reading = weights * self.shape.weight_bytes / self.hardware.bandwidth
        return max(reading, 2 * weights * batch / self.hardware.flops)

    def attention_seconds(self, entries: float) -> float:
        """A step's attention over the cache, its tokens summed over the batch."""
        s = self.shape
        computing = 4 * s.num_layers * s.num_heads * s.head_dim / self.hardware.flops
        return max(s.kv_bytes_per_token / self.hardware.bandwidth, computing) * entries / self.hardware.kv_share

    def overhead_seconds(self, batch: int) -> float:
        """What a step takes whatever it reads and multiplies."""
        h, layers = self.hardware, self.shape.num_layers
        return h.step_overhead + layers * (h.layer_overhead + batch * h.sequence_overhead)

    def step_seconds(self, method: Method, work: Work) -> float:
        """The seconds of a decode step, averaged over all steps of the sequences."""
        entries = float(entries_read(method, work, self.shape.num_layers).mean())
        attention = self.attention_seconds(work.batch * entries)
        return self.overhead_seconds(work.batch) + self.linear_seconds(work.batch) + attention

    def tokens_per_second(self, method: Method, work: Work) -> float:
        """Tokens drawn per second."""
        return work.batch / self.step_seconds(method, work)

    def speedup(self, method: Method, work: Work, dense: Work | None = None) -> float:
        """Tokens per second of a method over those of a dense rollout.

        Args:
            method: The method.
            work: Sequences that it decodes.
            dense: Sequences that the dense rollout decodes, default the same; with less memory per
                sequence a method may decode more of them at once.
        """
        return self.tokens_per_second(method, work) / self.tokens_per_second(FullKV(), dense or work)

    # ---------------------------------------------------------------- memory

    def bytes_per_sequence(self, method: Method, prompt: int, length: int) -> int:
        """The bytes of cache that a sequence needs at its peak: its slot, or the whole cache and the page metadata."""
        layers, per_layer = self.shape.num_layers, self.shape.kv_bytes_per_token // self.shape.num_layers
        if isinstance(method, Retriever):
            return round((prompt + length) * (1 + _summary(method)) * layers * per_layer)
        longest = prompt + length
        return sum(min(entries, longest) for entries in Trigger(method, layers).capacities(prompt, longest)) * per_layer

    def best_batch(self, method: Method, limit: float, prompt: int, length: int, most: int | None = None) -> int:
        """The largest batch that fits into ``limit`` bytes of cache; the largest is the fastest.

        Args:
            method: The method.
            limit: Bytes of the cache.
            prompt: Tokens of the prompt.
            length: Tokens of the completion.
            most: Largest batch to consider.

        Raises:
            ValueError: If not even one sequence fits.
        """
        need = self.bytes_per_sequence(method, prompt, length)
        fits = int(limit // need)
        if fits < 1:
            raise UserError(f"Not even one sequence fits into {limit:,.0f} bytes: it needs {need:,}.")
        return fits if most is None else min(fits, most)


def entries_read(method: Method, work: Work, num_layers: int) -> Tensor:
    """The tokens (length,) float64 of the cache that a sequence reads in each decode step, a mean over layers."""
    lengths = torch.arange(work.prompt + 1, work.prompt + work.length + 1, dtype=torch.float64)
    if isinstance(method, Retriever):
        budgets = method.schedule.lookup(lengths)
        sparse = torch.where(lengths > budgets, budgets + lengths * _summary(method), lengths)
        dense = min(method.num_dense_layers / num_layers, 1.0)
        return dense * lengths + (1 - dense) * sparse
    if not method.evicts:
        return lengths
    trigger = Trigger(method, num_layers)
    lost, room = trigger.after_prompt(work.prompt)
    fed, end = work.prompt, work.prompt + work.length
    while fed < end:
        steps = min(room, end - fed)
        lengths[fed - work.prompt : fed - work.prompt + steps] -= sum(lost) / num_layers
        fed += steps
        lost = trigger.evicted(fed, lost)
        room = trigger.room(fed, lost)
    return lengths


def _summary(retriever: Retriever) -> float:
    """Size of a page's summary per token of the page, in tokens: a token is a key and a value, a summary only keys."""
    return 0.5 * retriever.num_vectors / retriever.page_size
