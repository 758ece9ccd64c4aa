"""RolloutSampler: read every prompt once, fork it to its samples, decode, compress, stop, refill."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.rollout.attention import SLOTS, Decode, Prefill, attention_implementation
from sparse_rl_lightning.rollout.cache import SlotCache
from sparse_rl_lightning.rollout.geometry import CacheGeometry
from sparse_rl_lightning.rollout.preparation import check_prompts, default_end_token_ids, eval_mode
from sparse_rl_lightning.rollout.results import Results
from sparse_rl_lightning.rollout.sampling import SamplingParams, draw, prompt_key, sequence_keys
from sparse_rl_lightning.types import Rollout

ROW_MULTIPLE = 8  # float32 products give a row the same bits in any batch when the number of rows is a multiple of 8


@dataclass(frozen=True)
class Progress:
    """How far a rollout is, handed to the ``progress`` function of :meth:`RolloutSampler.generate`."""

    step: int  # decode steps done
    active: int  # sequences in slots
    finished: int
    total: int
    tokens: int  # completion tokens so far


@dataclass(frozen=True)
class _Prompt:
    """A prompt that was read: what its slot holds, and the logits of its last token."""

    content: dict[str, Tensor]
    logits: Tensor  # (V,)


class RolloutSampler:
    """Generates completions under a compressed KV cache and records what the cache forgot.

    Args:
        model: A transformers causal language model: Qwen2, Qwen3, Llama or another full-attention rotary decoder.
        compressor: What a full slot keeps; ``FullKV()`` for a dense rollout.
        num_slots: Sequences decoded at the same time; further ones wait and take the place of finished ones.
            None gives every sequence its own slot.
        end_token_ids: Tokens that end a completion; default those of the model's generation config.
        max_prefill_tokens: Prompts are read in batches of at most this many tokens (or one prompt).

    Raises:
        ValueError: If the model has layers that cannot be evicted from.

    Example::

        sampler = RolloutSampler(model, RKV(budget=512, buffer=128), num_slots=64)
        rollout = sampler.generate([[1, 2, 3]], SamplingParams(num_generations=8, seed=0))
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compressor: Compressor,
        num_slots: int | None = None,
        end_token_ids: Sequence[int] | None = None,
        max_prefill_tokens: int = 16384,
    ) -> None:
        if num_slots is not None and num_slots < 1:
            raise ValueError(f"num_slots must be at least 1 or null (one per sequence), got num_slots={num_slots}.")
        CacheGeometry.of(model)  # refuses models that cannot be served
        self.model = model
        self.compressor = compressor
        self.num_slots = num_slots
        self.end_token_ids = default_end_token_ids(model) if end_token_ids is None else list(end_token_ids)
        self.max_prefill_tokens = max_prefill_tokens
        self.cache: SlotCache | None = None
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
            progress: Called after every decode step.

        Returns:
            The sequences with the sampler's log-probabilities, the evictions and the memory used; a prompt's samples
            are adjacent.

        Raises:
            ValueError: If there is no prompt, a prompt is empty, or prompt and completion exceed the model's context.
        """
        config = self.model.config
        check_prompts(prompts, params, getattr(config, "max_position_embeddings", None), config.vocab_size)
        total = len(prompts) * params.num_generations
        ids = torch.arange(total) if sequence_ids is None else torch.tensor(list(sequence_ids))
        if len(ids) != total:
            raise ValueError(f"sequence_ids must name {total} sequences (prompts x num_generations), got {len(ids)}.")
        cache = self._prepare_cache(prompts, params, total)
        longest = max(len(p) for p in prompts) + params.max_completion_length
        self._warn_if_nothing_is_evicted(cache, longest)
        keys = sequence_keys(params.seed, ids.to(cache.geometry.device))
        with torch.no_grad(), eval_mode(self.model), attention_implementation(self.model, SLOTS):
            return _Run(self, cache, [list(p) for p in prompts], params, keys, progress).finish()

    def _warn_if_nothing_is_evicted(self, cache: SlotCache, longest: int) -> None:
        """A slot that holds any sequence whole costs as much as a full cache."""
        if self.compressor.evicts and cache.capacity >= longest and not self._warned:
            self._warned = True
            warnings.warn(
                f"A slot of {cache.capacity} tokens holds the longest prompt and completion ({longest} tokens) whole: "
                "nothing will be evicted. Lower the compressor's budget or buffer to save memory.",
                stacklevel=3,
            )

    def _prepare_cache(self, prompts: Sequence[Sequence[int]], params: SamplingParams, total: int) -> SlotCache:
        """The cache of the last call where it is large enough, else a new one."""
        c, geometry = self.compressor, CacheGeometry.of(self.model)
        longest = max(len(p) for p in prompts)
        length, slots = longest + params.max_completion_length, min(self.num_slots or total, total)
        if not c.evicts:
            capacity = length
        elif c.compress_prompt:
            capacity = c.budget + c.buffer
        else:
            capacity = max(c.budget, longest) + c.buffer
        old = self.cache
        if old is not None and old.serves(geometry, slots, capacity, c.num_queries, length):
            # a slot may be larger than needed where its size depends on the prompts
            if capacity == old.capacity or not (c.evicts and c.compress_prompt):
                return old
        self.cache = None  # free the old pool before the new one is allocated
        self.cache = SlotCache(geometry, slots, capacity, c.num_queries, length)
        return self.cache


class _Run:
    """One call of ``generate``: the queue, the slots in use and the results."""

    def __init__(
        self, sampler: RolloutSampler, cache: SlotCache, prompts: list[list[int]], params: SamplingParams,
        keys: Tensor, progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self.sampler, self.cache, self.prompts, self.params, self.keys = sampler, cache, prompts, params, keys
        self.progress = progress
        device = cache.geometry.device
        self.end_ids = torch.tensor(sampler.end_token_ids, dtype=torch.int64, device=device)
        self.results = Results(prompts, params, cache, sampler.compressor.evicts)
        self.num_slots = min(sampler.num_slots or len(keys), len(keys))
        self.waiting = list(range(len(keys)))[::-1]  # sequence numbers, next one last
        self.sequence_of: list[int] = []  # sequence number in each slot in use
        self.read: dict[int, _Prompt] = {}  # prompts read whose samples have not all found a slot
        self.step = 0
        self.prefill_peak_bytes = 0

    def finish(self) -> Rollout:
        """Run until every sequence has ended."""
        while self.waiting or self.sequence_of:
            self._admit()
            if self.sequence_of:
                self._decode()
            if self.progress is not None:
                done = self.results.num_finished
                total = len(self.keys)
                self.progress(Progress(self.step, len(self.sequence_of), done, total, self.results.num_tokens))
        return self.results.rollout(self.prefill_peak_bytes)

    # ---------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Give free slots to waiting sequences, reading each prompt once, and draw their first tokens."""
        start, generations = len(self.sequence_of), self.params.num_generations
        while self.waiting and len(self.sequence_of) < self.num_slots:
            self.sequence_of.append(self.waiting.pop())
        admitted = self.sequence_of[start:]
        if not admitted:
            return
        prompt_of = [s // generations for s in admitted]
        for batch in self._prefill_batches(sorted(set(prompt_of) - self.read.keys())):
            # the slots of the first samples serve as the place to read into
            self._read_prompts(batch, [start + prompt_of.index(p) for p in batch])
        slots = torch.arange(start, len(self.sequence_of), device=self.end_ids.device)
        for prompt in set(prompt_of):
            own = slots[[i for i, p in enumerate(prompt_of) if p == prompt]]
            self.cache.write(own, self.read[prompt].content)
        self.cache.sequence_keys[slots] = self.keys[admitted]
        logits = torch.stack([self.read[p].logits for p in prompt_of])
        unfinished = {s // generations for s in self.waiting}
        self.read = {p: content for p, content in self.read.items() if p in unfinished}
        self._draw(logits, slots)

    def _prefill_batches(self, prompts: list[int]) -> Iterator[list[int]]:
        """Cut prompts, similar lengths together, into batches of at most ``max_prefill_tokens`` padded tokens."""
        batch: list[int] = []
        for prompt in sorted(prompts, key=lambda p: len(self.prompts[p])):
            if batch and len(self.prompts[prompt]) * (len(batch) + 1) > self.sampler.max_prefill_tokens:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch

    def _read_prompts(self, batch: list[int], slots: list[int]) -> None:
        """One forward pass over whole prompts; right padding is causal-safe and never enters the cache."""
        device = self.end_ids.device
        rows = [self.prompts[p] for p in batch]
        width = -(-max(len(r) for r in rows) // ROW_MULTIPLE) * ROW_MULTIPLE
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        where = torch.tensor(slots, device=device)
        keys = torch.tensor([prompt_key(self.params.seed, row) for row in rows], device=device)
        self.cache.begin(where, rows, keys, self.sampler.compressor)
        prefill = Prefill(self.cache, where, self.sampler.compressor)
        hidden = self._forward(ids.to(device), torch.arange(width, device=device)[None], prefill)
        last = self.cache.seen[where] - 1
        logits = self._logits(hidden[torch.arange(len(rows), device=device), last])
        for prompt, slot, row in zip(batch, slots, logits, strict=True):
            self.read[prompt] = _Prompt(self.cache.read(slot), row)
        parked = sum(
            t.nbytes for p in self.read.values() for name, t in p.content.items() if name in ("keys", "values")
        )
        self.prefill_peak_bytes = max(self.prefill_peak_bytes, prefill.staging_bytes + parked)

    # ---------------------------------------------------------------- decoding

    def _decode(self) -> None:
        """Feed each slot its last token, draw the next, compress what is full, release what has ended."""
        n, cache = len(self.sequence_of), self.cache
        padded = -(-n // ROW_MULTIPLE) * ROW_MULTIPLE
        ids = torch.zeros(padded, 1, dtype=torch.int64, device=self.end_ids.device)
        positions = torch.zeros_like(ids)
        positions[:n, 0] = cache.seen[:n]
        ids[:n] = cache.tokens[:n].gather(1, positions[:n])
        hidden = self._forward(ids, positions, Decode(cache, n))
        cache.advance(n)
        self.results.count_step(self.sequence_of)
        cache.compress_full(n, self.sampler.compressor)
        self._draw(self._logits(hidden[:, 0])[:n], torch.arange(n, device=ids.device))
        self.step += 1

    def _draw(self, logits: Tensor, slots: Tensor) -> None:
        """Draw the next token of these slots (a range that ends with the last slot in use) and release the ended."""
        cache, at = self.cache, self.cache.seen[slots]
        steps = at - cache.prompt_lengths[slots]
        tokens, logprobs, behavior = draw(logits, self.params, cache.sequence_keys[slots], steps, self.end_ids)
        cache.tokens[slots, at] = tokens
        ended = torch.isin(tokens, self.end_ids)
        self.results.add(self.sequence_of, slots, at, logprobs, behavior)
        done = ended | (steps + 1 >= self.params.max_completion_length)
        for slot in slots[done].tolist()[::-1]:
            self.results.close(self.sequence_of[slot], slot, bool(ended[slot - int(slots[0])]))
            last = len(self.sequence_of) - 1
            if slot != last:
                cache.copy(last, slot)
                self.sequence_of[slot] = self.sequence_of[last]
            self.sequence_of.pop()

    def _forward(self, ids: Tensor, positions: Tensor, slots: Prefill | Decode) -> Tensor:
        decoder = self.sampler.model.get_decoder()
        hidden: Tensor = decoder(input_ids=ids, position_ids=positions, use_cache=False, slots=slots).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """(n, V) float32; padded so that a row's bits do not depend on how many there are."""
        n = hidden.shape[0]
        rows = hidden.new_zeros(-(-n // ROW_MULTIPLE) * ROW_MULTIPLE, hidden.shape[1])
        rows[:n] = hidden
        logits: Tensor = self.sampler.model.get_output_embeddings()(rows)
        return logits[:n].float()
