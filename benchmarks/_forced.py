"""Given texts fed through a compressed cache, token by token, with all logits: what eviction does to the same words.

The rollout's own cache, decode step and compressions do the work; only the drawn token is replaced by the text's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.rollout.cache import CacheSize, SlotCache
from sparse_rl_lightning.rollout.compression import Compression
from sparse_rl_lightning.rollout.decoder import Decoder
from sparse_rl_lightning.rollout.geometry import CacheGeometry
from sparse_rl_lightning.rollout.graphs import GraphedStep
from sparse_rl_lightning.rollout.preparation import eval_mode
from sparse_rl_lightning.rollout.run import Plan, Run
from sparse_rl_lightning.rollout.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.step import Step
from sparse_rl_lightning.rollout.tracks import Tracks


@dataclass
class Clock:
    """What compressing while decoding takes; medians, so that other work of the machine does not count."""

    events: int = 0  # one slot cut in all its layers and heads
    cuts: list[float] = field(default_factory=list)  # seconds per slot, of each time slots were cut
    notes: list[float] = field(default_factory=list)  # seconds per slot and step, where there is running state

    def events_per_second(self, steps: int) -> float:
        """Events per second, each with the running state of so many steps."""
        return 1 / (median(self.cuts) + steps * median(self.notes or [0.0]))


@dataclass(frozen=True)
class TimedCompression(Compression):
    """A compression that is timed, with what it costs to keep running state up to date."""

    clock: Clock = field(default_factory=Clock)

    def compress(self, cache: SlotCache, slots: list[int], lengths: list[int], room: list[int]) -> None:
        """Cut and count."""
        start = time.perf_counter()
        super().compress(cache, slots, lengths, room)
        self.clock.cuts.append((time.perf_counter() - start) / len(slots))
        self.clock.events += len(slots)

    def note_attention(self, cache: SlotCache, slots: list[int], probs: list[Tensor]) -> None:
        """Of every step, where a compressor has state."""
        start = time.perf_counter()
        super().note_attention(cache, slots, probs)
        self.clock.notes.append((time.perf_counter() - start) / len(slots))


@dataclass(frozen=True)
class ForcedStep(Step):
    """A decode step that writes the next token of a text down instead of drawing one."""

    texts: Tensor  # (S, T) sequence i in slot i
    logits: Tensor  # (S, T, V) to be filled; index t speaks of token t

    def draw(self, logits: Tensor, places: Tensor) -> None:
        """Keep the logits, go on with the text."""
        own = places < len(self.texts)  # the others pad the batch
        slots, at = places[own], self.cache.seen[places[own]]
        self.logits[slots, at] = logits[own]
        self.cache.tokens[slots, at] = self.texts[slots, at]


@dataclass(frozen=True)
class Forced:
    """What a compressed cache makes of given texts."""

    logits: Tensor  # (B, T, V), zeros in the prompts
    clock: Clock


@torch.no_grad()
def forced_logits(
    model: PreTrainedModel,
    compressor: Compressor,
    texts: Tensor,
    prompt_length: int,
    ids: Sequence[int] | None = None,
    seed: int = 0,
) -> Forced:
    """Logits of every token behind the prompt, each given the text before it as far as the cache remembers it.

    Equal to what ``RolloutSampler`` would compute had it drawn these texts, with the same seed and sequence ids.

    Args:
        model: The policy.
        compressor: What a full slot keeps.
        texts: (B, T) token ids; what pads a text on the right is decoded like the rest and changes nothing before it.
        prompt_length: Tokens that are read at once; where they do not fit a slot, their compression is not timed.
        ids: Numbers of the sequences, default 0 to B - 1.
        seed: With the ids it fixes the lots of random eviction.
    """
    count, length = texts.shape
    geometry = CacheGeometry.of(model)
    params = SamplingParams(max_completion_length=length - prompt_length, seed=seed)
    compression = TimedCompression(compressor, geometry.num_layers)
    capacities = compression.trigger.capacities(prompt_length, length)
    size = CacheSize(
        count, capacities, compressor.num_queries, length, compressor.state_fields,
        compressor.evicts and compressor.budget_rule.splits_heads,
    )  # fmt: skip
    cache = SlotCache(geometry, size)
    nothing_ends = torch.zeros(0, dtype=torch.int64)
    logits = torch.zeros(count, length, model.config.vocab_size)
    with eval_mode(model):
        step = ForcedStep(
            Decoder(model, geometry), cache, Tracks(count, length, params, geometry.device), params, nothing_ends,
            compression, texts, logits,
        )  # fmt: skip
        run = Run(Plan(params, compression, nothing_ends, None, count, 16384, 1), GraphedStep(step, enabled=False))
        keys = sequence_keys(seed, torch.arange(count) if ids is None else torch.tensor(list(ids)))
        run.add(texts[:, :prompt_length].tolist(), keys.tolist())
        for _ in run:
            pass
    return Forced(logits, compression.clock)
