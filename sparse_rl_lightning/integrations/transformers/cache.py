"""CompressedCache: a cache of transformers whose entries a compressor evicts, with the sampler's own engine behind it.

A cache of transformers sees keys and values, but neither queries nor the model, and masks count on it to forget
nothing. So this one answers the model's whole forward call: prompts and tokens go through the engine of
``RolloutSampler``, with its prefill, its evictions and its record, and only the choice of the next token is
``generate``'s. Its greedy tokens are therefore the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial, update_wrapper
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from sparse_rl_lightning.cache.compression import ENDLESS
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import context_length
from sparse_rl_lightning.policies.modes import sampling_mode
from sparse_rl_lightning.policies.patched import CacheAwareForward
from sparse_rl_lightning.policies.support import check_length
from sparse_rl_lightning.policies.windows import layer_windows
from sparse_rl_lightning.records import NEVER, EvictionRecord
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.decoders.base import Decoder
from sparse_rl_lightning.rollout.engine.engine import Engine, EngineKey
from sparse_rl_lightning.rollout.engine.sampling import sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import Scheduler
from sparse_rl_lightning.rollout.prompts import check_prompts

FIRST_ROOM = 256  # tokens that there is room for after the prompts; doubled whenever they are used up
OF_SEQUENCES = {"tokens": 0, "held": 0, "death": NEVER}  # tensors as long as the longest sequence, and their padding
KEYWORDS = ("cache", "past_key_values")
"""Names of a cache in calls of a model and of ``generate``: that of transformers 5.24 and the older one."""
KEYWORD = next(name for name in KEYWORDS if name in {field.name for field in fields(CausalLMOutputWithPast)})
"""The one that the installed release has."""
KNOWN = {*KEYWORDS, "use_cache", "position_ids", "logits_to_keep", "return_dict"}
IGNORED = {"token_type_ids", "tokenizer"}  # ``generate`` hands on the tokenizer of its stop strings


class CompressedCache(Cache):
    """KV cache for ``model.generate(past_key_values=...)`` whose memory stays within a compressor's budget.

    From transformers 5.24 on the argument is ``cache=...``, and the older name is deprecated.

    Greedy, sampled and beam search, batches padded on the left, and samples of the same prompt work as with caches of
    transformers. A cache serves one call, or several after :meth:`reset`: a prompt first, then one token at a time.
    The output's logits are those of the last token alone.

    Args:
        compressor: Compressor of the cache.
        model: Model that generates. Its ``forward`` is wrapped: calls with such a cache are answered by the engine,
            all others reach the model as before.
        seed: Seed of random eviction.
        sampler: More arguments of ``RolloutSampler``, such as ``kv_dtype``, ``decoder`` and ``max_prefill_tokens``;
            CUDA graphs, which each cache would capture anew, are off by default.

    Raises:
        ValueError: If the model has layers that cannot be evicted from, or an argument is out of range.

    Example::

        model.generate(**inputs, max_new_tokens=4096, past_key_values=CompressedCache(RKV(budget=512), model))
    """

    def __init__(self, compressor: Compressor, model: PreTrainedModel, seed: int = 0, **sampler: Any) -> None:
        super().__init__(layers=[])
        model = _unwrapped(model)
        self.sampler = RolloutSampler(model, compressor, **{"cuda_graphs": False} | sampler)
        self.seed = seed
        self._scheduler: Scheduler | None = None
        self._longest_prompt = self._num_tokens = 0  # of a row, in _num_tokens with its padding
        if not isinstance(model.forward, CacheAwareForward):  # it is wrapped once
            # a partial of a bound method is copied along with the model; a closure would keep calling this one
            vars(model)["forward"] = update_wrapper(CacheAwareForward(_answer, model.forward, model), model.forward)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Answer a forward call of the model: prompts (B, P) in the first, then a token for each row (B, 1).

        Args:
            input_ids: Token ids.
            attention_mask: Mask (B, P) of a prompt's tokens, padded on the left.
            options: Other arguments of the model's call.

        Returns:
            Logits (B, 1, V), float32, after the last token of each row.

        Raises:
            ValueError: If more than one token follows a prompt, the padding is not on the left or not that of the
                prompt, the model's context is exceeded, or an argument asks for what the engine does not compute.
        """
        arguments = {name: value for name, value in options.items() if value is not None and name not in IGNORED}
        unknown = [name for name, value in arguments.items() if name not in KNOWN and value is not False]
        if input_ids is None or unknown:
            raise UserError(
                f"A CompressedCache needs input_ids, and does not compute {', '.join(unknown) or 'without'}."
            )
        if arguments.get("use_cache") is False:
            raise UserError("A CompressedCache needs use_cache=True, in generate or in the model's generation_config.")
        if "logits_to_keep" in arguments and arguments["logits_to_keep"] != 1:
            raise UserError(
                "A CompressedCache gives the last token's logits alone: logits_to_keep=1, got "
                f"{arguments['logits_to_keep']}."
            )
        with sampling_mode(self.sampler.model):
            shown = self._shown(input_ids, attention_mask, arguments.get("position_ids"))
            if self._scheduler is None:
                self._read([row[mask].tolist() for row, mask in zip(input_ids, shown, strict=True)])
            else:
                self._feed(input_ids)
        self._num_tokens += input_ids.shape[1]
        outputs = {"logits": self._engine.logits[: len(input_ids), None].clone(), KEYWORD: self}
        out = CausalLMOutputWithPast(**cast("dict[str, Any]", outputs))
        return out if arguments.get("return_dict", True) else out.to_tuple()

    # ---------------------------------------------------------------- what was evicted, and how much is held

    @property
    def evictions(self) -> EvictionRecord:
        """The evictions of all rows so far, positions counted without padding; for replay."""
        cache, running = self._running.cache, self._running.running
        records = [
            cache.evictions_of(slot, sequence.num_fed, sequence.cuts) for slot, sequence in sorted(running.items())
        ]
        return EvictionRecord.cat([record for record in records if record is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory for keys and values."""
        return self._running.cache.pool_bytes

    @property
    def lengths(self) -> Tensor:
        """Live entries (L, B, H) of every head, in the layers that are compressed."""
        return self._running.cache.lengths.clone()

    # ---------------------------------------------------------------- calls of transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens seen by a row, evicted ones and padding included."""
        return self._num_tokens

    def reset(self) -> None:
        """Forget everything: the next call reads prompts."""
        self._scheduler, self._num_tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row i from what row ``beam_idx[i]`` has read, after a step of beam search."""
        cache, running = self._running.cache, self._running.running
        rows = [int(row) for row in beam_idx]
        contents = {row: cache.save(row, running[row].num_fed) for row in set(rows)}
        sequences = enumerate(running[row] for row in rows)
        self._running.running = {slot: replace(sequence, cuts=sequence.cuts.copy()) for slot, sequence in sequences}
        for slot, row in enumerate(rows):
            if slot != row:
                cache.restore(slot, contents[row])

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: a pass of another model."""
        raise UserError("A CompressedCache belongs to the model that it was made with: CompressedCache(..., model).")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: what was evicted does not come back."""
        raise UserError("A CompressedCache cannot take tokens back: generate without an assistant model.")

    batch_repeat_interleave = batch_select_indices = crop

    # ---------------------------------------------------------------- private

    @property
    def _running(self) -> Scheduler:
        if self._scheduler is None:
            raise UserError("The CompressedCache is empty: nothing has been generated with it.")
        return self._scheduler

    @property
    def _engine(self) -> _LogitsEngine:
        return cast("_LogitsEngine", self._running.engine)

    def _shown(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Which of these tokens (B, Q) are not padding, which comes first and stays as the prompts' mask says.

        Raises:
            ValueError: If there are too many tokens, or mask (B, T) or positions say otherwise.
        """
        index = torch.arange(self._num_tokens + ids.shape[1], device=ids.device)
        if self._scheduler is None:
            padding = ids.new_zeros(len(ids)) if mask is None else (mask == 0).sum(dim=1)
        else:
            fed = [sequence.num_fed for _, sequence in sorted(self._scheduler.running.items())]
            if ids.shape != (len(fed), 1):
                raise UserError(
                    f"A CompressedCache takes one token for each of its {len(fed)} rows after the prompt, got "
                    f"input_ids of shape {tuple(ids.shape)}: give every call of generate a new cache, or call reset()."
                )
            padding = self._num_tokens - torch.tensor(fed, device=ids.device)
        counted = index - padding[:, None]  # each token's position, below 0 for padding
        if mask is not None and (mask.shape != (len(ids), len(index)) or bool((mask.bool() != (counted >= 0)).any())):
            raise UserError(
                "A CompressedCache needs prompts padded on the left, as generate does, and shows a row its own tokens "
                f"later on, all of them: attention_mask of shape {(len(ids), len(index))}, zeros for that padding "
                f"alone, got one of shape {tuple(mask.shape)}."
            )
        counted = counted[:, -ids.shape[1] :]
        if positions is not None and (
            positions.shape[-1] != ids.shape[1] or bool(((positions != counted) & (counted >= 0)).any())
        ):
            raise UserError("A CompressedCache counts positions from each row's first token: leave out position_ids.")
        return counted >= 0

    def _read(self, prompts: Sequence[list[int]]) -> None:
        """Read the prompts, row i into slot i."""
        sampler, longest = self.sampler, max(map(len, prompts))
        window = max(layer_windows(sampler.model.config), default=0)  # a longer sequence has other layers to compress
        self._longest_prompt = longest
        params = self._params(longest, longest + max(FIRST_ROOM, window + 1))
        check_prompts(prompts, params, sampler.model)
        key = sampler.engine_key(params, len(prompts), longest)
        if key.size.num_slots < len(prompts):
            why = f": {key.memory_plan.why}" if key.memory_plan else f", num_slots={sampler.num_slots}"
            raise UserError(f"A CompressedCache needs a slot for each of {len(prompts)} rows{why}")
        scheduler = self._scheduler_for(key, params)
        scheduler.add(prompts, sequence_keys(self.seed, range(len(prompts))).tolist())
        scheduler.admit()
        for sequence in scheduler.running.values():
            sequence.last = ENDLESS  # ``generate`` ends rows
        self._scheduler = scheduler

    def _feed(self, ids: Tensor) -> None:
        """Feed each row its next token."""
        longest = max(sequence.num_fed for sequence in self._running.running.values())
        if longest + 1 >= self._running.cache.size.max_length:
            self._grow(longest)
        cache = self._running.cache
        slots = torch.arange(len(ids), device=cache.tokens.device)
        cache.tokens[slots, cache.seen[:-1]] = ids[:, 0].to(cache.tokens.device)
        self._running.decode_and_compress()
        cache.pools.raise_errors()

    def _grow(self, longest: int) -> None:
        """Move everything to memory for sequences twice as long; what a compressor bounds stays as it is."""
        old = self._running
        params = self._params(longest, 2 * longest)
        key = self.sampler.engine_key(params, len(old.running), self._longest_prompt)
        new = self._scheduler_for(key, params, self._engine.decoder)
        for slot, sequence in old.running.items():
            content = old.cache.save(slot, sequence.num_fed)
            for name, empty in OF_SEQUENCES.items():
                content[name] = F.pad(content[name], (0, key.size.max_length - content[name].shape[-1]), value=empty)
            if "room" in content:  # of heads that share their slot's memory: it ended with the old memory
                content["room"] = content["lengths"] + min(sequence.room, key.size.max_length - sequence.num_fed)
            new.cache.restore(slot, content)
        new.running = old.running
        self._scheduler = new

    def _scheduler_for(self, key: EngineKey, params: SamplingParams, decoder: Decoder | None = None) -> Scheduler:
        engine = _LogitsEngine(self.sampler.model, key, decoder)
        return self.sampler.scheduler(engine, params, key.size.num_slots)

    def _params(self, longest: int, wanted: int) -> SamplingParams:
        """Parameters for sequences of up to ``wanted`` tokens, of which the longest has ``longest`` now.

        The model's context may allow fewer; if it allows no further token, it is an error.
        """
        model = self.sampler.model
        context = context_length(model.config)
        check_length(model, longest + 1)
        if context is not None and longest >= context:
            raise UserError(f"The model's context of {context} tokens is used up: lower max_new_tokens.")
        most = wanted if context is None else min(wanted, context)
        return SamplingParams(max_completion_length=most - self._longest_prompt, seed=self.seed)


class _LogitsEngine(Engine):
    """Engine that draws nothing: the logits (S + 1, V) of each slot's last token are left to the caller."""

    def __init__(self, model: PreTrainedModel, key: EngineKey, decoder: Decoder | None = None) -> None:
        super().__init__(model, key, decoder=decoder)
        shape = (key.size.num_slots + 1, model.config.vocab_size)
        self.logits = torch.zeros(shape, dtype=torch.float32, device=key.geometry.device)

    def draw(self, logits: Tensor, places: Tensor, at: Tensor) -> None:
        """Keep the logits (n, V) of these slots; the caller writes their tokens."""
        self.logits[places] = logits.float()


def _answer(forward: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    cache = given_cache(kwargs)
    if not isinstance(cache, CompressedCache):
        return forward(*args, **kwargs)
    return cache.forward(*args, **kwargs) if cache.sampler.model is model else cache.update()


def given_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of a call, under either name."""
    return next((kwargs[name] for name in KEYWORDS if kwargs.get(name) is not None), None)


def _unwrapped(model: Any) -> PreTrainedModel:
    """The model of transformers inside adapters of peft."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise UserError(f"CompressedCache needs a causal language model of transformers, got {type(model).__name__}.")
    return inner


@contextmanager
def compressed_generation(model: PreTrainedModel, compressor: Compressor, **options: Any) -> Iterator[None]:
    """Let each call of ``model.generate`` within the context use a new ``CompressedCache``.

    Calls that bring a cache of their own keep it. Forward passes without a cache, such as those that
    score given texts, are the model's own.

    Args:
        model: Causal language model of transformers.
        compressor: Compressor of the caches.
        options: More arguments of ``CompressedCache``.

    Example::

        with compressed_generation(model, RKV(budget=512, buffer=128)):
            lm_eval.simple_evaluate(HFLM(pretrained=model, tokenizer=tokenizer), tasks=["gsm8k"])
    """
    CompressedCache(compressor, model, **options)  # what cannot be is refused here, not in the first call
    before, plain = vars(model).get("generate"), cast("Callable[..., Any]", model.generate)
    config: Any = model.generation_config
    implementation, config.cache_implementation = config.cache_implementation, None  # generate takes one or the other
    generate = partial(_generate, plain, model, compressor, options)  # goes along with a copy of the model
    vars(model)["generate"] = update_wrapper(generate, plain)
    try:
        yield
    finally:
        config.cache_implementation = implementation
        if before is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = before


def _generate(
    plain: Callable[..., Any], model: PreTrainedModel, compressor: Compressor, options: dict[str, Any], *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    if given_cache(kwargs) is None:
        kwargs[KEYWORD] = CompressedCache(compressor, model, **options)
    return plain(*args, **kwargs)
