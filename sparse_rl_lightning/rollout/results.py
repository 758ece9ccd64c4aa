"""Collects what a rollout produces, sequence by sequence, and counts the memory it held."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.rollout.cache import SlotCache
from sparse_rl_lightning.rollout.sampling import SamplingParams
from sparse_rl_lightning.types import NEVER, EvictionRecord, KVUsage, Rollout


class Results:
    """Buffers for B sequences, filled while decoding and cut to the longest one at the end."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, cache: SlotCache, evicts: bool) -> None:
        g, device = cache.geometry, cache.geometry.device
        generations = params.num_generations
        self.cache = cache
        self.num_finished = self.num_tokens = 0
        self.prompt_lengths = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(generations)
        total = len(self.prompt_lengths)
        width = int(self.prompt_lengths.max()) + params.max_completion_length
        self.sequences = torch.zeros(total, width, dtype=torch.int64, device=device)
        # float32 is spelt out: under precision=bf16-true Lightning makes bfloat16 the default
        self.logprobs = torch.zeros(total, width, dtype=torch.float32, device=device)
        self.behavior = torch.zeros_like(self.logprobs) if params.truncates else None
        self.lengths = torch.zeros(total, dtype=torch.int64, device=device)
        self.finished = torch.zeros(total, dtype=torch.bool, device=device)
        self.death = torch.full((g.num_layers, total, g.num_kv_heads, width), NEVER, dtype=torch.int32, device=device)
        self.stored = torch.zeros(total, dtype=torch.float32, device=device)
        self.stored_integral = torch.zeros_like(self.stored)
        longest = width if evicts else cache.capacity  # a full cache may be left over from a longer rollout
        self.full_peak_bytes = g.num_layers * cache.num_slots * g.num_kv_heads * longest * g.bytes_per_entry

    def add(self, sequence_of: list[int], slots: Tensor, at: Tensor, logprobs: Tensor, behavior: Tensor | None) -> None:
        """Note the log-probabilities of the tokens just drawn at positions ``at`` (n,) of these slots (n,)."""
        sequences = torch.tensor(sequence_of, device=slots.device)[slots]
        self.logprobs[sequences, at] = logprobs
        if self.behavior is not None and behavior is not None:
            self.behavior[sequences, at] = behavior
        self.num_tokens += len(slots)

    def count_step(self, sequence_of: list[int]) -> None:
        """Add the entries that the decode step just done could read."""
        sequences = torch.tensor(sequence_of, device=self.stored.device)
        self.stored_integral[sequences] += self._entries(len(sequence_of))

    def close(self, sequence: int, slot: int, finished: bool) -> None:
        """Copy out a sequence that has ended, before its slot is given away."""
        cache = self.cache
        fed = int(cache.seen[slot])  # the last token drawn was never fed
        self.sequences[sequence, : fed + 1] = cache.tokens[slot, : fed + 1]
        self.death[:, sequence, :, :fed] = cache.death[:, slot, :, :fed]
        self.lengths[sequence] = fed + 1
        self.finished[sequence] = finished
        self.stored[sequence] = cache.lengths[:, slot].float().mean()
        self.num_finished += 1

    def rollout(self, prefill_peak_bytes: int) -> Rollout:
        """Everything as one typed object."""
        width = int(self.lengths.max())
        index = torch.arange(width, device=self.lengths.device)
        mask = (index >= self.prompt_lengths[:, None]) & (index < self.lengths[:, None])
        fed, prompt = (self.lengths - 1).float(), self.prompt_lengths.float()
        usage = KVUsage(
            stored=self.stored,
            full=fed,
            stored_integral=self.stored_integral,
            full_integral=(fed * (fed + 1) - prompt * (prompt + 1)) / 2,  # prompt + 1, ..., fed entries read
            peak_bytes=self.cache.pool_bytes,
            full_peak_bytes=self.full_peak_bytes,
            prefill_peak_bytes=prefill_peak_bytes,
        )
        return Rollout(
            sequences=self.sequences[:, :width],
            prompt_lengths=self.prompt_lengths,
            completion_mask=mask,
            finished=self.finished,
            sampler_logprobs=self.logprobs[:, :width],
            behavior_logprobs=None if self.behavior is None else self.behavior[:, :width],
            evictions=EvictionRecord(self.death[..., :width]),
            kv=usage,
        )

    def _entries(self, num_active: int) -> Tensor:
        """(n,) live entries per slot in use, a mean over layers and heads."""
        return self.cache.lengths[:, :num_active].float().mean(dim=(0, 2))
