"""The largest rollout and the largest update that a fit can come to, to be tried before it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.rollout import Progress

if TYPE_CHECKING:
    from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO

DECODE_STEPS = 16  # where nothing is compressed
RECORD_COPIES = 2  # of the evictions: each sequence's own, and all together


class _Enough(Exception):
    """Ends a rollout that has shown what it needs."""


class LargestCase:
    """Full slots with the longest training prompt, and a micro-batch of nothing but longest sequences.

    Args:
        module: What is going to be fitted, attached to its trainer.
        num_prompts: Prompts per rollout.
    """

    def __init__(self, module: SparseGRPO, num_prompts: int) -> None:
        self.module, self.num_prompts = module, num_prompts
        self.row: dict[str, Any] = module.longest_row()
        self.prompt = module.encode([self.row])[0]
        self.length = len(self.prompt) + module.sampling.max_completion_length
        self.num_sequences = num_prompts * module.num_generations
        self.geometry = CacheGeometry.of(module.dense_policy)
        self.micro_batch = module.plan(max(1, round(num_prompts / module.oversampling))).micro_batch

    @property
    def num_slots(self) -> int:
        """Slots that a rollout uses, unless a memory limit allows fewer."""
        return min(self.module.sampler_options.num_slots or self.num_sequences, self.num_sequences)

    @property
    def decode_steps(self) -> int:
        """Decode steps until all slots are compressed for the first time."""
        compressor = self.module.compressor
        if not compressor.evicts:
            return DECODE_STEPS
        trigger, length = Trigger(compressor, self.geometry.num_layers), len(self.prompt)
        return trigger.room(length, trigger.evicted_from_prompt(length), prompt_length=length)

    def rollout(self) -> None:
        """Read the longest prompt into every slot, decode up to the first compression, and hold what a rollout holds.

        The record of evictions of all sequences is the largest part of what a rollout collects.
        """
        g, steps = self.geometry, min(self.decode_steps, self.module.sampling.max_completion_length - 1)
        position = torch.int16 if self.length < 2**15 else torch.int32

        def stop(progress: Progress) -> None:
            if progress.step >= steps:
                dead = self.num_sequences * self.length * g.num_layers * g.num_kv_heads
                torch.empty(RECORD_COPIES * dead, dtype=position, device=g.device)
                raise _Enough

        sampler, params = self.module.sampler(), replace(self.module.sampling, stop_strings=())
        ends, sampler.end_token_ids = sampler.end_token_ids, []  # slots stay full
        try:
            with self.module.trainer.precision_plugin.train_step_context():
                self.module.generate([self.row] * self.num_prompts, params, progress=stop)
        except _Enough:
            pass
        finally:
            sampler.end_token_ids = ends

    def update(self) -> None:
        """Forward and backward pass of the learner on the largest micro-batch; the gradients stay."""
        module, part = self.module, self._longest_sequences()
        with module.trainer.precision_plugin.train_step_context():
            part.ref_logprobs = module.reference_logprobs(part)
            output, _ = module.micro_batch_loss(part, module.objective.items(part))
        output.loss.backward()  # type: ignore[no-untyped-call]

    def _longest_sequences(self) -> Rollout:
        """A micro-batch with everything that callbacks may add to it."""
        device, shape = self.module.device, (self.micro_batch, self.length)
        tokens = (self.prompt * (self.length // len(self.prompt) + 1))[: self.length]
        mask = (torch.arange(self.length, device=device) >= len(self.prompt)).expand(shape)
        zeros, g = torch.zeros(shape, device=device), self.geometry
        alive = torch.full((g.num_layers, self.micro_batch, g.num_kv_heads, self.length), NEVER, device=device)
        return Rollout(
            sequences=torch.tensor(tokens, device=device).repeat(self.micro_batch, 1),
            prompt_lengths=torch.full(shape[:1], len(self.prompt), device=device),
            completion_mask=mask,
            finished=torch.ones(shape[:1], dtype=torch.bool, device=device),
            sampler_logprobs=zeros,
            replay_logprobs=zeros if self.module.keeps_evictions else None,
            evictions=EvictionRecord.from_dense(alive) if self.module.keeps_evictions else None,
            advantages=torch.ones(shape[:1], device=device),
            keep=mask,
            weights=zeros + 1,
            weight_reference=zeros + 1,
        )
