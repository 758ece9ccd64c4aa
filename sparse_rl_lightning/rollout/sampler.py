"""RolloutSampler: completions of prompts under a compressed KV cache, with a record of evictions."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.compressors.base import checked_method
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.policies.geometry import CacheGeometry, kv_type, model_sizes
from sparse_rl_lightning.policies.modes import sampling_mode
from sparse_rl_lightning.policies.routing import Routers
from sparse_rl_lightning.policies.support import check_full_layers, check_length
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrieval.cache import check_retriever, with_pages
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout.engine.decoders.base import signature
from sparse_rl_lightning.rollout.engine.decoders.choice import DecoderChoice, choose_decoder, decoder_bytes
from sparse_rl_lightning.rollout.engine.engine import CudaGraphs, Engine, EngineKey
from sparse_rl_lightning.rollout.engine.expert_log import RecordingEngine
from sparse_rl_lightning.rollout.engine.finished import StopStrings
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan, plan_slots, slot_bytes
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import Progress, Scheduler, steps_past_end, steps_per_check
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs
from sparse_rl_lightning.rollout.generation_kwargs import warn_of_generation_config
from sparse_rl_lightning.rollout.prompts import check_end_tokens, check_prompts, default_end_token_ids

logger = logging.getLogger(__name__)


class RolloutSampler:
    """Generates completions under a compressed KV cache and records the evictions.

    Needs only torch and transformers: it works in a script or a notebook without Lightning. Weights are read live, so
    the next call samples with the learner's last update. After an exception or Ctrl-C it can be used again.

    Args:
        model: Causal language model of transformers with rotary positions (docs/models.md).
        compressor: Compressor of the cache; default ``FullKV()``, which keeps everything.
        num_slots: Number of sequences decoded at the same time; further ones take the slots of finished ones.
            None gives every sequence its own slot.
        end_token_ids: Tokens that end a completion; default those of the model's generation config and the tokenizer's.
        max_prefill_tokens: Limit on the prompt tokens in one forward pass; longer prompts are read in chunks.
        tokenizer: Tokenizer, for its end token and for stop strings.
        kv_dtype: Type of stored keys and values, e.g. ``torch.bfloat16`` or ``"bfloat16"`` for half the memory of
            float32; default the type that the model computes in. Queries are rounded to it too before attention, but
            not to ``"float8_e4m3fn"`` (or ``"fp8"``), a byte per number: that is for storage only, and saturates at
            +-448.
        keep_pool: Whether the cache's memory, and copies of weights made for decoding, are kept between calls; False
            frees them for the learner after each.
        memory_limit: Memory limit of the slots, up to 1 as a share of the free memory, above that in bytes: no more
            slots are used than fit. On a GPU it is also the limit of weights copied for decoding. The choice and its
            reason are logged and available as ``memory_plan``.
        cuda_graphs: Whether to decode with CUDA graphs on a GPU; a step that cannot be captured runs eagerly, with a
            warning, or with ``"require"`` is an error.
        retriever: Retriever of the pages of the cache that each query reads; None reads everything. It saves time, not
            memory, and leaves ``rollout.evictions`` None. With an evicting compressor it chooses among the survivors.
        decoder: How the layers are run: ``"native"`` by this library, for Llama, Mistral, Qwen2 and Qwen3;
            ``"transformers"`` by its own forward pass, for any model; ``"auto"`` the first where it can be.
        head_in_float32: Whether the logits of a policy in 16 bits are float32, not rounded, as with the learner's
            option of this name; on CUDA GPUs and CPUs, with an output head that is a plain ``nn.Linear``.
        record_routing: Whether to record which experts read each token, prompts included, as ``rollout.routing``;
            learner and replay then let the tokens go to the same experts.

    Raises:
        ValueError: If the model has layers that cannot be evicted from, or an argument is out of range.

    Example::

        sampler = RolloutSampler(model, RKV(budget=512, buffer=128), num_slots=64)
        rollout = sampler.generate([[1, 2, 3]], SamplingParams(num_generations=8, seed=0))
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compressor: Compressor | None = None,
        num_slots: int | None = None,
        end_token_ids: Sequence[int] | None = None,
        max_prefill_tokens: int = 16384,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kv_dtype: torch.dtype | str | None = None,
        keep_pool: bool = True,
        cuda_graphs: CudaGraphs = True,
        memory_limit: float | None = None,
        retriever: Retriever | None = None,
        decoder: DecoderChoice = "auto",
        head_in_float32: bool = False,
        record_routing: bool = False,
    ) -> None:
        check_number("num_slots", num_slots, least=1, or_none=True, whole=True)
        check_number("max_prefill_tokens", max_prefill_tokens, least=1, whole=True)
        if cuda_graphs not in (True, False, "require"):
            raise UserError(f"cuda_graphs must be true, false or require, got cuda_graphs={cuda_graphs!r}.")
        geometry = CacheGeometry.of(model, kv_type(kv_dtype))  # refuses unsupported models
        self.model = model
        self.compressor = FullKV() if compressor is None else checked_method(compressor)
        self.compressor.check_model(model_sizes(model, geometry))
        self.retriever = retriever
        if retriever is not None:
            check_retriever(retriever, self.compressor, geometry)
        self.num_slots = num_slots
        if end_token_ids is None:
            self.end_token_ids = default_end_token_ids(model, tokenizer)
        else:
            self.end_token_ids = check_end_tokens(end_token_ids, model.config.vocab_size)
        warn_of_generation_config(model)
        self.max_prefill_tokens = max_prefill_tokens
        self.tokenizer = tokenizer
        self.kv_dtype = kv_type(kv_dtype)
        self.keep_pool = keep_pool
        self.cuda_graphs = cuda_graphs
        self.head_in_float32 = head_in_float32
        self.engine_type = RecordingEngine if record_routing else Engine
        self.recorded = Routers(model).shape if record_routing else None  # refuses models without known routers
        self.memory_limit = memory_limit
        self.decoder_kind = choose_decoder(model, decoder)
        logger.info("RolloutSampler: the layers of %s are run by decoder=%r.", type(model).__name__, self.decoder_kind)
        self.memory_plan: MemoryPlan | None = None  # number of slots that the limit allowed in the last call, and why
        self._engines: dict[EngineKey, Engine] = {}  # the last ones on the same memory, newest last
        self._geometry_read: tuple[object, CacheGeometry] | None = None  # what it was read for, and the geometry
        self._compression: tuple[list[object], Compression] | None = None  # the settings it has, and the compression
        self._warned = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        sequence_ids: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        """Draw ``params.num_generations`` completions for every prompt.

        Args:
            prompts: Token ids of each prompt.
            params: Sampling parameters.
            sequence_ids: Id of each of the B = prompts x num_generations sequences; with ``params.seed`` it
                determines the sequence's random numbers. Default 0 to B - 1.
            progress: Function called after every decode step (on a GPU after every few).

        Returns:
            The sequences with the sampler's log-probabilities, the evictions and the memory used; a prompt's samples
            are adjacent.

        Raises:
            ValueError: If there is no prompt, a prompt is empty, or prompt and completion exceed the model's context.
        """
        prompts = check_prompts(prompts, params, self.model)
        total = len(prompts) * params.num_generations
        numbers = torch.arange(total) if sequence_ids is None else torch.tensor(list(sequence_ids))
        if len(numbers) != total or numbers.is_floating_point():
            raise UserError(
                f"sequence_ids must name {total} sequences (prompts x num_generations), got {len(numbers)}."
            )
        try:
            with sampling_mode(self.model):
                before = self.memory_plan if self._engines else None  # others may have taken what was released
                key = self.engine_key(params, total, max(len(p) for p in prompts), before=before)
                self.memory_plan = key.memory_plan
                scheduler = self.scheduler(self.engine_for(key), params, key.size.num_slots)
                self._warn_if_nothing_is_evicted(scheduler, [len(p) for p in prompts])
                scheduler.add(prompts, sequence_keys(params.seed, numbers).tolist())
                while scheduler.has_unfinished:
                    scheduler.step()
                    if progress is not None:
                        progress(scheduler.progress)
                return scheduler.take(scheduler.complete)
        finally:
            if not self.keep_pool:
                self.release()

    def release(self) -> None:
        """Free the cache's memory and the copies of weights; the next call allocates them again."""
        self._engines = {}

    @property
    def engine(self) -> Engine | None:
        """The engine of the last call, None before the first and after :meth:`release`."""
        return next(reversed(self._engines.values()), None)

    @property
    def cache(self) -> SlotCache | None:
        """The cache of the last call, None before the first and after :meth:`release`."""
        return None if self.engine is None else self.engine.cache

    # ---------------------------------------------------------------- used by sessions too

    def engine_key(
        self,
        params: SamplingParams,
        num_sequences: int,
        longest_prompt: int,
        logs: type[SequenceLogs] = SequenceLogs,
        before: MemoryPlan | None = None,
    ) -> EngineKey:
        """Describe the engine that a rollout needs.

        Args:
            params: Sampling parameters.
            num_sequences: Number of sequences in the rollout.
            longest_prompt: Length of the longest prompt in tokens.
            logs: Class of the per-slot logs.
            before: Memory plan of the last call, if its memory is still held and will be freed or reused.

        Raises:
            ValueError: If the memory limit does not allow one slot.
        """
        slots = min(self.num_slots or num_sequences, num_sequences)
        longest = longest_prompt + params.max_completion_length
        g = self._geometry(longest)
        length = longest + steps_past_end(g.device)
        size, plan = self._compression_of(g).cache_size(g, slots, longest_prompt, length), None
        if self.retriever is not None:
            size = with_pages(size, self.retriever)
        if self.memory_limit is not None:
            decoder = decoder_bytes(self.model, g, length, self.decoder_kind, self.head_in_float32)
            logits = torch.promote_types(g.dtype, torch.float32) if self.head_in_float32 else g.dtype
            slot = slot_bytes(g, size, params, logs, self.model.config.vocab_size, decoder, logits, self.recorded)
            plan = plan_slots(slot, self.memory_limit, slots, g.device, before=before)
            size = replace(size, num_slots=plan.num_slots)
            if self.memory_plan is None or plan.num_slots != self.memory_plan.num_slots:
                logger.info("RolloutSampler: %s", plan.why)
        return EngineKey(
            geometry=g, size=size, params=params.for_drawing, compressor=self.compressor,
            end_token_ids=tuple(self.end_token_ids), cuda_graphs=self.cuda_graphs, logs=logs,
            decoder_kind=self.decoder_kind, memory_plan=plan, head_in_float32=self.head_in_float32,
        )  # fmt: skip

    def scheduler(
        self, engine: Engine, params: SamplingParams, num_slots: int, create: Callable[..., Scheduler] | None = None
    ) -> Scheduler:
        """Create the scheduler of a rollout on this engine, without prompts yet; ``create`` makes another class of it.

        Raises:
            ValueError: If there are stop strings but no tokenizer.
        """
        stop = StopStrings(params.stop_strings, self.tokenizer) if params.stop_strings else None
        arguments = (engine, params, num_slots, stop, self.max_prefill_tokens)
        return create(*arguments) if create else Scheduler(*arguments, steps_per_check(engine.key.geometry.device))

    def engine_for(self, key: EngineKey) -> Engine:
        """The engine of an earlier call if its key is equal, else a new one that reuses the parts that still fit.

        Engines that share neither memory nor weights with it are dropped, before anything is allocated. Of the others
        the last one is kept, if it has graphs: greedy and sampled decoding in turns keep the graphs of both.
        """
        engines, self._engines = self._engines, {}  # after any failure no engine is left that is not whole
        cache = decoder = None
        if engines:
            last = next(reversed(engines.values()))
            key = key.reuse_memory_of(last.key)
            if last.decoder.serves(self.model, key.geometry, key.head_in_float32):
                decoder = last.decoder
                decoder.refresh()
            if (key.geometry, key.size) == (last.key.geometry, last.key.size):
                cache = last.cache
            del last
        engines = {e.key: e for e in engines.values() if e.decoder is decoder and e.cache is cache}
        engine = engines.pop(key, None)
        beside = next((engine for engine in reversed(engines.values()) if engine.has_graphs), None)
        del engines
        if engine is None:
            engine = self.engine_type(self.model, key, cache, decoder, shares_memory_with=beside)
        else:
            engine.compression = self._compression_of(key.geometry)  # budgets may have been raised
        self._engines = {kept.key: kept for kept in (beside, engine) if kept is not None}
        return engine

    # ---------------------------------------------------------------- private

    def _geometry(self, longest: int) -> CacheGeometry:
        """The model's geometry for sequences of up to so many tokens, checked and read again if the model has changed.

        Raises:
            ValueError: If the model cannot be rolled out, or not to that length.
        """
        device = self.model.device.type
        mixed = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        chooses = self.compressor.evicts or self.retriever is not None
        read_for = (signature(self.model), mixed, longest, chooses)
        if self._geometry_read is None or self._geometry_read[0] != read_for:
            check_length(self.model, longest)
            if chooses:
                check_full_layers(self.model, longest, type(self.retriever or self.compressor).__name__)
            self._geometry_read = read_for, CacheGeometry.of(self.model, self.kv_dtype, longest)
        return self._geometry_read[1]

    def _compression_of(self, geometry: CacheGeometry) -> Compression:
        """The compressor applied to caches, anew if a setting of it was replaced since the last rollout."""
        settings, last = [self.compressor, geometry.num_layers, *vars(self.compressor).values()], self._compression
        if last is None or len(last[0]) != len(settings) or any(map(operator.is_not, last[0], settings)):
            self._compression = last = settings, Compression(self.compressor, geometry.num_layers)
        return last[1]

    def _warn_if_nothing_is_evicted(self, scheduler: Scheduler, lengths: list[int]) -> None:
        """Warn if no sequence can fill its slot: each slot is then as large as with a full cache."""
        if not self.compressor.evicts or self._warned:
            return
        trigger, completion = scheduler.engine.compression.trigger, scheduler.params.max_completion_length
        after = [trigger.after_prompt(length) for length in set(lengths)]
        if min(0 if any(lost) else room for lost, room in after) >= completion:
            self._warned = True
            capacity = min(trigger.capacities(max(lengths), max(lengths)))
            warnings.warn(
                f"Budget and buffer, {capacity} tokens, hold the longest prompt and completion "
                f"({max(lengths) + completion} tokens) whole: nothing will be evicted, and slots are as large as those "
                "of a full cache. Lower the compressor's budget or buffer to save memory.",
                stacklevel=3,
            )
