"""RolloutSampler: completions of prompts under a compressed KV cache, with what the cache forgot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.ops.float8 import FLOAT8
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrieval.cache import check_retriever
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout.cache.memory import MemoryPlan
from sparse_rl_lightning.rollout.cache.slots import SlotCache
from sparse_rl_lightning.rollout.checks import (
    check_end_tokens,
    check_prompts,
    default_end_token_ids,
    drawing,
)
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import Progress, Run
from sparse_rl_lightning.rollout.engine.workspace import Workspace


class RolloutSampler:
    """Generates completions under a compressed KV cache and records what the cache forgot.

    Needs torch and transformers only: it works in a script or a notebook without Lightning. Weights are read live, so
    the learner's last update is what the next call samples from. After an exception or Ctrl-C it can be used again.

    Args:
        model: A transformers causal language model: Qwen2, Qwen3, Llama or another full-attention rotary decoder.
        compressor: What a full slot keeps; default ``FullKV()``, everything.
        num_slots: Sequences decoded at the same time; further ones wait and take the place of finished ones.
            None gives every sequence its own slot.
        end_token_ids: Tokens that end a completion; default those of the model's generation config.
        max_prefill_tokens: Prompts are read in batches of at most this many tokens, longer ones in chunks.
        tokenizer: Needed for stop strings only.
        kv_dtype: What keys and values are kept in, e.g. ``torch.bfloat16`` or ``"bfloat16"`` for half the memory of
            float32; default what the model computes in. Queries are rounded to it too before they meet the keys, but
            not to ``"float8_e4m3fn"`` (or ``"fp8"``), a byte per number: that is for storage only, and saturates at
            +-448.
        keep_pool: Keep the cache's memory, and copies of weights made for decoding, between calls; False frees them
            for the learner after each.
        memory_limit: Bytes that slots may take, or a float up to 1.0 for a share of the free memory: no more slots are
            used than fit. What was chosen and why is logged and stands in :attr:`memory_plan`.
        cuda_graphs: Decode from CUDA graphs on a GPU; where a step cannot be captured it runs eagerly, with a warning.
        retriever: Which pages of what is kept each query reads; None reads everything. It saves time, not memory, and
            leaves ``rollout.evictions`` None. With an evicting compressor it chooses among the survivors.
        record_pages: Bytes that a record of the pages read may take, ``rollout.pages``; 0 records none. For tests and
            short runs: it can cost as much as the cache.

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
        cuda_graphs: bool = True,
        memory_limit: int | float | None = None,
        retriever: Retriever | None = None,
        record_pages: int = 0,
    ) -> None:
        if num_slots is not None and num_slots < 1:
            raise ValueError(f"num_slots must be at least 1 or null (one per sequence), got num_slots={num_slots}.")
        if max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens must be at least 1, got max_prefill_tokens={max_prefill_tokens}.")
        geometry = CacheGeometry.of(model, _kv_dtype(kv_dtype))  # refuses models that cannot be served
        self.model = model
        self.compressor = compressor or FullKV()
        self.retriever = retriever
        self.record_pages = record_pages
        if record_pages < 0 or (record_pages and retriever is None):
            raise ValueError(
                "record_pages is a number of bytes for the pages that a retriever reads, got "
                f"record_pages={record_pages} and retriever={retriever}."
            )
        if retriever is not None:
            check_retriever(retriever, self.compressor, geometry.num_layers, geometry.kv_dtype, record_pages)
        self.num_slots = num_slots
        ends = default_end_token_ids(model) if end_token_ids is None else end_token_ids
        self.end_token_ids = check_end_tokens(ends, model.config.vocab_size)
        self.max_prefill_tokens = max_prefill_tokens
        self.tokenizer = tokenizer
        self.kv_dtype = _kv_dtype(kv_dtype)
        self.keep_pool = keep_pool
        self.cuda_graphs = cuda_graphs
        self.memory_limit = memory_limit
        self._workspace = Workspace()
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
            params: How to draw.
            sequence_ids: A number for each of the B = prompts x num_generations sequences; with ``params.seed`` it
                fixes the sequence's random numbers. Default 0 to B - 1.
            progress: Called after every decode step (on a GPU after every few).

        Returns:
            The sequences with the sampler's log-probabilities, the evictions and the memory used; a prompt's samples
            are adjacent.

        Raises:
            ValueError: If there is no prompt, a prompt is empty, or prompt and completion exceed the model's context.
        """
        with self._pool(), self.sampling():
            run = self._start(prompts, params, sequence_ids)
            for _ in run:
                if progress is not None:
                    progress(run.progress)
            return run.take(run.complete)

    def release(self) -> None:
        """Free the cache's memory and the copies of weights; the next call allocates them again."""
        self._workspace.release()

    @property
    def cache(self) -> SlotCache | None:
        """The memory of the last call, None before the first and after :meth:`release`."""
        return self._workspace.cache

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """How many slots the memory limit allowed in the last call, and why."""
        return self._workspace.memory_plan

    # ---------------------------------------------------------------- inside

    @contextmanager
    def _pool(self) -> Iterator[None]:
        """Give the memory back afterwards, whatever happens, unless it is to be kept."""
        try:
            yield
        finally:
            if not self.keep_pool:
                self.release()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """What holds while a sequence is drawn."""
        with drawing(self.model):
            yield

    def _start(self, prompts: Sequence[Sequence[int]], params: SamplingParams, ids: Sequence[int] | None) -> Run:
        prompts = check_prompts(prompts, params, self.model)
        total = len(prompts) * params.num_generations
        numbers = torch.arange(total) if ids is None else torch.tensor(list(ids))
        if len(numbers) != total:
            raise ValueError(
                f"sequence_ids must name {total} sequences (prompts x num_generations), got {len(numbers)}."
            )
        longest = max(len(p) for p in prompts)
        run = self._workspace.start(self, params, total, longest)
        self._warn_if_nothing_is_evicted(run, [len(p) for p in prompts], params.max_completion_length)
        run.add(prompts, sequence_keys(params.seed, numbers).tolist())
        return run

    def _warn_if_nothing_is_evicted(self, run: Run, lengths: list[int], completion: int) -> None:
        """A slot that holds any sequence whole is as large as a full cache's."""
        if not self.compressor.evicts or self._warned:
            return
        trigger = run.plan.compression.trigger
        lost = {length: trigger.evicted_from_prompt(length) for length in lengths}
        room = [0 if any(own) else trigger.room(length, own, prompt_length=length) for length, own in lost.items()]
        if min(room) >= completion:
            self._warned = True
            capacity = min(trigger.capacities(max(lengths), max(lengths)))
            warnings.warn(
                f"Budget and buffer, {capacity} tokens, hold the longest prompt and completion "
                f"({max(lengths) + completion} tokens) whole: nothing will be evicted, and slots are as large as those "
                "of a full cache. Lower the compressor's budget or buffer to save memory.",
                stacklevel=4,
            )


def _kv_dtype(kind: torch.dtype | str | None) -> torch.dtype | None:
    known = {
        "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64,
        "float8_e4m3fn": FLOAT8, "fp8": FLOAT8,
    }  # fmt: skip
    found = known.get(kind) if isinstance(kind, str) else kind
    if kind is not None and found not in known.values():
        raise ValueError(f"kv_dtype must be one of {', '.join(known)}, or None for the model's type, got {kind!r}.")
    return found
