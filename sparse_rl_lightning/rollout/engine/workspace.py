"""Workspace: the memory and the decode step that a sampler keeps from one call to the next."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.retrieval.cache import PageLayout
from sparse_rl_lightning.rollout.cache.compression import Compression
from sparse_rl_lightning.rollout.cache.memory import MemoryPlan, plan_slots, slot_bytes
from sparse_rl_lightning.rollout.cache.slots import CacheSize, SlotCache
from sparse_rl_lightning.rollout.engine.decoder import Decoder
from sparse_rl_lightning.rollout.engine.graphs import GraphedStep
from sparse_rl_lightning.rollout.engine.logs import Tracks
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Plan, Run
from sparse_rl_lightning.rollout.engine.step import Step
from sparse_rl_lightning.rollout.engine.stopping import StopStrings

if TYPE_CHECKING:
    from sparse_rl_lightning.rollout.sampler import RolloutSampler

logger = logging.getLogger(__name__)

CHECK_EVERY = {"cpu": 1}  # steps between two looks at which sequences have ended: looking is free on the CPU
CHECK_EVERY_ON_DEVICE = 8


class Workspace:
    """Cache, tracks, weights made for decoding and CUDA graphs, made anew only where a call needs others."""

    def __init__(self) -> None:
        self.cache: SlotCache | None = None
        self.memory_plan: MemoryPlan | None = None
        self.run: Run | None = None  # the last one: memory is its own until the next begins
        self._decoder: Decoder | None = None
        self._step: GraphedStep | None = None
        self._limit: int | float | None = None  # that the memory plan was made for

    def release(self) -> None:
        """Free everything."""
        self.cache = self.run = self._decoder = self._step = None

    def start(
        self, sampler: RolloutSampler, params: SamplingParams, total: int, longest_prompt: int, versioned: bool = False
    ) -> Run:
        """A run without prompts yet.

        Args:
            sampler: Whose settings to follow.
            params: How to draw.
            total: Sequences there will be.
            longest_prompt: Tokens of the longest prompt there will be.
            versioned: Whether weights change during the run.

        Raises:
            ValueError: If the sampler's memory limit does not allow one slot, stop strings lack a tokenizer, or the
                pages read take more to record than allowed.
        """
        stop = StopStrings(params.stop_strings, sampler.tokenizer) if params.stop_strings else None
        geometry = CacheGeometry.of(sampler.model, sampler.kv_dtype)
        check_every = CHECK_EVERY.get(geometry.device.type, CHECK_EVERY_ON_DEVICE)
        length = longest_prompt + params.max_completion_length + check_every - 1
        slots = min(sampler.num_slots or total, total)
        compression = Compression(sampler.compressor, geometry.num_layers)
        capacities = compression.trigger.capacities(longest_prompt, length)
        size = CacheSize.of(
            sampler.compressor, geometry, slots, capacities, length, sampler.retriever, sampler.record_pages > 0
        )
        if size.retriever is not None and size.record_pages:
            PageLayout(size.retriever, geometry, size.entries).check_record(total, length, sampler.record_pages)
        if sampler.memory_limit is not None:
            size = self._fit(size, geometry, params, sampler.memory_limit, versioned)
        self.run = None
        cache = self._cache_for(geometry, size, compression)
        step = self._step_for(sampler, compression, geometry, cache, params, versioned)
        self.run = Run(
            Plan(
                params, compression, step.step.end_ids, stop, size.num_slots, sampler.max_prefill_tokens,
                check_every,
            ),
            step,
        )  # fmt: skip
        return self.run

    def take_new_weights(self, sampler: RolloutSampler, run: Run) -> None:
        """Let a run in progress go on with the model's weights as they are now."""
        geometry = CacheGeometry.of(sampler.model, sampler.kv_dtype)
        plan, tracks = run.plan, run.tracks
        versioned = tracks.versions is not None
        step = self._step_for(sampler, plan.compression, geometry, run.cache, plan.params, versioned, tracks)
        run.go_on_with(step)

    def _step_for(
        self,
        sampler: RolloutSampler,
        compression: Compression,
        geometry: CacheGeometry,
        cache: SlotCache,
        params: SamplingParams,
        versioned: bool,
        tracks: Tracks | None = None,
    ) -> GraphedStep:
        """The step of the last call, with its graphs, where it does the same; the weights are taken over anew."""
        if self._decoder is not None and self._decoder.serves(sampler.model, geometry):
            self._decoder.refresh()
        else:
            self._step = self._decoder = None  # free copies of weights before new ones are made
            self._decoder = Decoder(sampler.model, geometry)
        params = params.for_drawing()
        last = None if self._step is None else self._step.step
        if last is not None and last.cache is cache and last.params == params:
            if tracks is None and (last.tracks.versions is not None) == versioned:
                tracks = last.tracks
            same = last.decoder is self._decoder and last.compression.compressor is compression.compressor
            if self._step is not None and last.tracks is tracks and same:
                if last.end_ids.tolist() == sampler.end_token_ids:
                    return self._step
        if tracks is None:
            slots, length, retrieves = cache.size.num_slots, cache.size.max_length, cache.pages is not None
            tracks = Tracks(slots, length, params, geometry.device, versioned, retrieves)
        end_ids = torch.tensor(sampler.end_token_ids, dtype=torch.int64, device=geometry.device)
        step = Step(self._decoder, cache, tracks, params, end_ids, compression)
        self._step = GraphedStep(step, sampler.cuda_graphs)
        return self._step

    def _fit(
        self, size: CacheSize, geometry: CacheGeometry, params: SamplingParams, limit: int | float, versioned: bool
    ) -> CacheSize:
        """As many of these slots as the memory limit allows."""
        slot = slot_bytes(geometry, size, params, versioned)
        before = self.memory_plan if limit == self._limit else None
        # the share of free memory is taken once: later it would count the pool that is in use as taken
        plan = plan_slots(slot, limit if before is None else before.limit, size.num_slots, geometry.device)
        if before is None or plan.why != before.why:
            logger.info("RolloutSampler: %s", plan.why)
        self.memory_plan, self._limit = plan, limit
        return replace(size, num_slots=plan.num_slots)

    def _cache_for(self, geometry: CacheGeometry, size: CacheSize, compression: Compression) -> SlotCache:
        """The cache of the last call where it is large enough, else a new one."""
        c = compression.compressor
        if self.cache is not None and self.cache.serves(geometry, size):
            # a slot may be larger than needed where its size depends on the prompts
            if size.capacities == self.cache.size.capacities or not (c.evicts and c.compress_prompt):
                self.cache.geometry = geometry
                return self.cache
        if self.cache is not None and self.memory_plan is None and size.capacities == self.cache.size.capacities:
            size = size.together(self.cache.size)  # calls of two sizes in turn do not allocate anew each time
        self._step = self.cache = None  # free the old pool before the new one is allocated
        self.cache = SlotCache(geometry, size)
        return self.cache
