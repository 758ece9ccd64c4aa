"""Sequences of a rollout: their logs while they run in a slot, and their data when they have finished.

Index t refers to token t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.cache.slots import Cuts, SlotCache
from sparse_rl_lightning.ops.draw import Drawn
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import ON_HOST, EvictionRecord, KVUsage, Rollout
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams

UNLIMITED = torch.iinfo(torch.int64).max


class SequenceLogs:
    """Logs of a decode step about the sequence in each slot, on the device and without waiting for it.

    The last row is for rows that only pad a batch.

    Args:
        num_slots: Number of slots S.
        length: Length of the longest sequence, plus the tokens that may be drawn past its end until the host knows.
        params: Sampling parameters, which determine the logs that are needed.
        device: Device of the logs.
    """

    def __init__(self, num_slots: int, length: int, params: SamplingParams, device: torch.device) -> None:
        # float32 is explicit: under precision=bf16-true Lightning makes bfloat16 the default
        shape = (num_slots + 1, length)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.behavior = torch.zeros_like(self.logprobs) if params.truncates else None
        top = (*shape, params.top_logprobs)
        self.topk_ids = torch.zeros(top, dtype=torch.int32, device=device)
        self.topk_logprobs = torch.zeros(top, dtype=torch.float32, device=device)
        # what a finished sequence takes along, by name: (S + 1, T, ...) of tokens that were drawn, or fed
        self.drawn = {"logprobs": self.logprobs, "topk_ids": self.topk_ids, "topk_logprobs": self.topk_logprobs}
        self.drawn |= {} if self.behavior is None else {"behavior": self.behavior}
        reports = params.top_logprobs > 0 and params.truncates
        self.support = torch.zeros(shape, dtype=torch.int32, device=device) if reports else None
        self.drawn |= {} if self.support is None else {"support": self.support}
        self.fed: dict[str, Tensor] = {}
        # indices of the first end token, and of the first token drawn from NaN or infinite logits
        self.end = torch.full((num_slots + 1,), UNLIMITED, dtype=torch.int64, device=device)
        self.broken = self.end.clone()

    def begin(self, slots: Tensor) -> None:
        """Start sequences in these slots (B,)."""
        self.end.index_fill_(0, slots, UNLIMITED)
        self.broken.index_fill_(0, slots, UNLIMITED)

    def record(self, slots: Tensor, at: Tensor, drawn: Drawn, end_ids: Tensor) -> None:
        """Log tokens that have just been drawn.

        Args:
            slots: Rows (n,) of the logs.
            at: Indices (n,) of the tokens.
            drawn: Tokens and their probabilities under the sampler.
            end_ids: Tokens (E,) that end a sequence.
        """
        self.logprobs[slots, at] = drawn.logprobs
        note_first(self.broken, slots, at, drawn.logprobs.isnan())
        if self.behavior is not None and drawn.behavior is not None:
            self.behavior[slots, at] = drawn.behavior
        if drawn.topk_ids is not None and drawn.topk_logprobs is not None:
            self.topk_ids[slots, at] = drawn.topk_ids
            self.topk_logprobs[slots, at] = drawn.topk_logprobs
        if self.support is not None and drawn.support is not None:
            self.support[slots, at] = drawn.support
        note_first(self.end, slots, at, (drawn.tokens[:, None] == end_ids).any(dim=-1))

    def finish_flags(self, errors: Tensor | None) -> Tensor:
        """A copy (3, S + 1) of what the host looks at: first end tokens, first broken tokens, errors of kernels."""
        faults = torch.zeros_like(self.end) if errors is None else errors.expand_as(self.end).to(torch.int64)
        return torch.stack([self.end, self.broken, faults])


@dataclass
class SequenceGroup:
    """A prompt and its samples."""

    prompt: list[int]
    key: int  # of the prompt's compression
    keys: list[int]  # random key of each sample
    num_waiting: int  # samples that are still waiting for a slot
    finished: dict[int, FinishedSequence] = field(default_factory=dict)  # by sample


@dataclass
class RunningSequence:
    """The host's state of the sequence in a slot, which needs no read from the device."""

    number: int  # prompt x num_generations + sample
    prompt_length: int
    last: int  # index of its last token by length: an end token or a stop string may end it earlier
    num_fed: int  # tokens fed
    room: int = 0  # tokens that may be fed before the slot must be compressed
    evicted: tuple[int, ...] = ()  # (L) tokens lost so far, a mean over heads
    cuts: Cuts = field(default_factory=list)  # compressions so far, that of the prompt included
    searched: int = 0  # tokens that need not be searched for stop strings any more

    def feed(self, count: int, trigger: Trigger) -> bool:
        """Count tokens that were fed; returns whether the slot is full and is compressed next."""
        self.num_fed += count
        self.room -= count
        if self.room:
            return False
        # as they will be after the compression
        self.evicted = trigger.evicted(self.num_fed, self.evicted)
        self.room = trigger.room(self.num_fed, self.evicted)
        return True

    @property
    def start(self) -> int:
        """The index of the first token of the text that is being drawn."""
        return self.prompt_length

    @property
    def limit(self) -> int:
        """The index of the last token of this text by length."""
        return self.last

    def begin(self, room: int, evicted: tuple[int, ...]) -> None:
        """Start after the prompt, of which ``evicted`` (L) tokens have been lost."""
        self.room, self.evicted = room, evicted
        self.cuts = [(self.prompt_length, sum(evicted))] if any(evicted) else []


@dataclass(frozen=True)
class FinishedSequence:
    """A sequence that has finished, independent of its slot."""

    prompt_length: int
    by_token: bool  # finished by an end token or a stop string, not by length
    tokens: Tensor  # (T,)
    logs: dict[str, Tensor]  # by name: logprobs, behavior, versions (T,); topk_ids, topk_logprobs (T, K); routing
    evictions: EvictionRecord | None  # of this sequence; None if deaths alone do not determine what was visible
    stored: Tensor  # () entries held at the end, a mean over layers and heads
    stored_integral: Tensor  # () summed over all decode steps
    read_integral: Tensor | None  # () entries read by them, if fewer

    @classmethod
    def copy(
        cls, cache: SlotCache, logs: SequenceLogs, slot: int, running: RunningSequence, end: int, by_token: bool
    ) -> Self:
        """Copy out a sequence whose last token has index ``end``, before its slot is reused.

        Changes of the slot after the end (the host checks only now and then) are left out.
        """
        prompt_length = running.prompt_length
        g, fed = cache.geometry, torch.arange(1, cache.size.max_length + 1, device=cache.held.device)
        windowed = len(g.window_layers) / g.depth  # share of the layers
        entries = cache.held[slot] / (g.depth * g.num_kv_heads)  # a mean over all layers and heads
        # the next step reads the entries held before, and its own token, for which windows drop another
        read = entries + (1 - windowed) + windowed * (fed + 1).clamp(max=g.window)
        # zeros where a log says nothing: in the prompt, or of the last token, which was never fed
        taken = {name: _within(log[slot, : end + 1], prompt_length, end + 1) for name, log in logs.drawn.items()}
        taken |= {name: _within(log[slot, : end + 1], 0, end) for name, log in logs.fed.items()}
        # most likely tokens, if there are any, take more memory than all else
        taken |= {name: taken[name].cpu() for name in ON_HOST if taken[name].numel()}
        return cls(
            prompt_length,
            by_token,
            tokens=cache.tokens[slot, : end + 1].clone(),
            logs=taken,
            evictions=cache.evictions_of(slot, end, running.cuts),
            stored=entries[end - 1] + windowed * min(end, g.window),  # the last token drawn was never fed
            stored_integral=read[prompt_length - 1 : end - 1].sum(),
            read_integral=cache.entries_read(slot, prompt_length, end),
        )

    @classmethod
    def assemble(
        cls, finished: Sequence[Self], geometry: CacheGeometry, peak_bytes: int, full_peak_bytes: int, prefill: int
    ) -> Rollout:
        """Combine these sequences into one rollout, in the given order.

        Args:
            finished: Sequences of one rollout.
            geometry: Layers of the model.
            peak_bytes: Bytes of the cache's pools.
            full_peak_bytes: Bytes of a full cache with as many slots.
            prefill: Maximum number of bytes staged outside the cache while prompts were read.
        """
        device = finished[0].tokens.device
        lengths = torch.tensor([len(sequence.tokens) for sequence in finished], device=device)
        prompt_lengths = torch.tensor([sequence.prompt_length for sequence in finished], device=device)
        index = torch.arange(int(lengths.max()), device=device)
        fed, prompt = (lengths - 1).float(), prompt_lengths.float()
        read = [sequence.read_integral for sequence in finished if sequence.read_integral is not None]
        evictions = [sequence.evictions for sequence in finished if sequence.evictions is not None]
        completion = (index >= prompt_lengths[:, None]) & (index < lengths[:, None])
        # each is freed when it is joined
        logs = {
            n: pad_sequence([sequence.logs.pop(n) for sequence in finished], batch_first=True)
            for n in [*finished[0].logs]
        }
        has_top = logs["topk_ids"].numel() > 0
        full, full_integral = _without_evictions(geometry, fed)
        usage = KVUsage(
            stored=torch.stack([sequence.stored for sequence in finished]),
            full=full,
            stored_integral=torch.stack([sequence.stored_integral for sequence in finished]),
            full_integral=full_integral - _without_evictions(geometry, prompt)[1],
            peak_bytes=peak_bytes,
            full_peak_bytes=full_peak_bytes,
            prefill_peak_bytes=prefill,
            read_integral=torch.stack(read) if read else None,
        )
        return Rollout(
            sequences=pad_sequence([sequence.tokens for sequence in finished], batch_first=True),
            prompt_lengths=prompt_lengths,
            completion_mask=completion,
            finished=torch.tensor([sequence.by_token for sequence in finished], device=device),
            sampler_logprobs=logs["logprobs"],
            behavior_logprobs=logs.get("behavior"),
            topk_ids=logs["topk_ids"] if has_top else None,
            topk_logprobs=logs["topk_logprobs"] if has_top else None,
            support=logs.get("support"),
            policy_versions=logs.get("versions"),
            routing=logs.get("routing"),
            evictions=EvictionRecord.cat(evictions) if evictions else None,
            kv=usage,
        )


def _without_evictions(geometry: CacheGeometry, fed: Tensor) -> tuple[Tensor, Tensor]:
    """The entries (B,) after so many tokens, a mean over all layers and heads, if only windows forget, and their sum.

    The sum (B,) is over the steps that feed these tokens one by one: 1, 2, ... entries, at most the window's.
    """
    limited, total = fed.clamp(max=geometry.window), fed * (fed + 1) / 2
    limited_total = limited * (limited + 1) / 2 + (fed - limited) * geometry.window
    share = len(geometry.window_layers) / geometry.depth
    return fed - share * (fed - limited), total - share * (total - limited_total)


def note_first(first: Tensor, slots: Tensor, at: Tensor, happened: Tensor) -> None:
    """Lower ``first`` (S + 1,) of these slots (n,) to the indices ``at`` (n,) of tokens where it ``happened`` (n,)."""
    first.scatter_reduce_(0, slots, torch.where(happened, at, UNLIMITED), "amin")


def _within(row: Tensor, first: int, last: int) -> Tensor:
    """A copy of a log (T, ...) with zeros before ``first``, and from ``last`` on."""
    copy = torch.zeros_like(row)
    copy[first:last] = row[first:last]
    return copy
