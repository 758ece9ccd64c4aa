"""Teacher forcing: run given texts through a compressed cache.

The engine's own cache, decode step and compressions are used; only the drawn token is replaced by the text's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.policies.geometry import CacheGeometry, kv_type
from sparse_rl_lightning.policies.modes import sampling_mode
from sparse_rl_lightning.policies.support import check_full_layers, check_length
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.engine import Engine, EngineKey
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import Scheduler
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs, note_first
from sparse_rl_lightning.rollout.engine.turns import Spans, TeacherForcedTurns

Note = Callable[[SequenceLogs, Tensor, Tensor, Tensor], None]
"""Function that records a step: logs, slots (n,), indices of their next tokens (n,) and logits (n, V), float32."""


class ForcedEngine(Engine):
    """Engine that takes the next token from ``texts`` (S, T), sequence i in slot i, instead of drawing it."""

    def __init__(
        self, model: PreTrainedModel, key: EngineKey, compression: Compression, texts: Tensor, note: Note
    ) -> None:
        super().__init__(model, key)
        self.compression, self.texts, self.note = compression, texts, note

    def draw(self, logits: Tensor, places: Tensor, at: Tensor) -> None:
        """Pass the logits to ``note``, and continue with the text's token."""
        used = places < len(self.texts)  # the others pad the batch
        slots, at = places[used], at[used]
        self.cache.tokens[slots, at] = self.texts[slots, at]
        wide = logits[used].float()
        note_first(self.logs.broken, slots, at, ~wide.logsumexp(dim=-1).isfinite())
        self.note(self.logs, slots, at, wide)


def force(
    model: PreTrainedModel,
    texts: Tensor,
    prompt_lengths: Sequence[int],
    compression: Compression,
    params: SamplingParams,
    note: Note,
    ids: Sequence[int] | None = None,
    head_in_float32: bool = False,
    turns: Tensor | None = None,
    kv_dtype: torch.dtype | str | None = None,
    keys: Tensor | None = None,
) -> Rollout:
    """Feed texts (B, T) to a compressed cache, token by token to their ends, and return them as a rollout.

    The rollout is as if the texts had been drawn, with the values that ``note`` wrote into the logs. Padding on the
    right is decoded like the rest and changes nothing before it.

    Args:
        model: Policy that runs.
        texts: Token ids (B, T).
        prompt_lengths: Number of tokens of each text that are prefilled.
        compression: Compression of the cache, of the model's layers of full attention.
        params: Sampling parameters: the length of completions, and the seed of random eviction.
        note: Function called at every step, including that of the prompts.
        ids: Ids of the sequences, default 0 to B - 1.
        head_in_float32: Precision of the logits, as in ``RolloutSampler``.
        turns: Numbers (B, T) of the turns of conversations, as in ``Rollout``, for compressors that protect some.
        kv_dtype: Type of stored keys and values, as in ``RolloutSampler``.
        keys: Random keys (B, 2) of prompts and sequences, as in ``Rollout``, in place of those of seed and ids.
    """
    length, count = max(prompt_lengths) + params.max_completion_length, len(texts)
    check_length(model, texts.shape[1])
    if compression.compressor.evicts:
        check_full_layers(model, length, type(compression.compressor).__name__)
    geometry = CacheGeometry.of(model, kv_type(kv_dtype), length)
    size = compression.cache_size(geometry, count, max(prompt_lengths), length)
    with sampling_mode(model):
        key = EngineKey(
            geometry=geometry, size=size, params=params, compressor=compression.compressor,
            head_in_float32=head_in_float32,
        )  # fmt: skip
        engine = ForcedEngine(model, key, compression, texts.to(geometry.device), note)
        if turns is None:
            scheduler = Scheduler(engine, params, count)
        else:
            scheduler = TeacherForcedTurns(engine, params, count, [_observations(row) for row in turns.tolist()])
        of_ids = sequence_keys(params.seed, torch.arange(count) if ids is None else torch.tensor(list(ids)))
        prompts = [text[:n].tolist() for text, n in zip(texts, prompt_lengths, strict=True)]
        scheduler.add(prompts, (of_ids if keys is None else keys[:, 1]).tolist())
        if keys is not None:
            for group, key in zip(scheduler.groups.values(), keys[:, 0].tolist(), strict=True):
                group.key = key
        while scheduler.has_unfinished:
            scheduler.step()
        return scheduler.take(scheduler.complete)


def forced_rollout(
    model: PreTrainedModel,
    rollout: Rollout,
    compressor: Compressor,
    temperature: float = 1.0,
    seed: int | None = None,
    head_in_float32: bool = False,
    kv_dtype: torch.dtype | str | None = None,
) -> Rollout:
    """Recompute a rollout as if the same tokens had been drawn under another compressor.

    The tokens stay; evictions, ``sampler_logprobs`` and memory are those of the compressor. With the compressor,
    weights and types that drew the rollout, the result equals it, but for choices of experts, which are made anew
    and not recorded. Useful to compare methods on the same text.

    Args:
        model: Policy that runs.
        rollout: Rollout with the texts.
        compressor: Compressor of the cache.
        temperature: Temperature of the log-probabilities, 1 for greedy rollouts.
        seed: Seed that, with ids from 0 to B - 1, determines random eviction; None for the rollout's own random keys.
        head_in_float32: Precision of the logits, as in ``RolloutSampler``.
        kv_dtype: Type of stored keys and values, as in ``RolloutSampler``.
    """
    lengths, prompt_lengths = rollout.lengths, rollout.prompt_lengths
    longest_completion = int((lengths - prompt_lengths).max())
    params = SamplingParams(max_completion_length=longest_completion, temperature=temperature, seed=seed)
    texts, last = rollout.sequences.to(model.device), (lengths - 1).to(model.device)

    def note(logs: SequenceLogs, slots: Tensor, at: Tensor, logits: Tensor) -> None:
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        logs.logprobs[slots, at] = logprobs.gather(-1, texts[slots, at][:, None]).squeeze(-1)
        note_first(logs.end, slots, at, at == last[slots])

    longest = int(prompt_lengths.max()) + params.max_completion_length
    compression = Compression(compressor, CacheGeometry.of(model, longest=longest).num_layers)
    forced = force(
        model, texts, prompt_lengths.tolist(), compression, params, note, head_in_float32=head_in_float32,
        turns=rollout.turns, kv_dtype=kv_dtype, keys=rollout.keys if seed is None else None,
    )  # fmt: skip
    return _as_wide(forced, rollout)


def _observations(turns: list[int]) -> Spans:
    """First and last + 1 of the tokens of each observation of a sequence: those with even numbers among its turns."""
    numbers = range(2, max(turns) + 1, 2)
    return tuple((turns.index(number), turns.index(number) + turns.count(number)) for number in numbers)


def _as_wide(forced: Rollout, rollout: Rollout) -> Rollout:
    """Pad to the width of the rollout that the texts are from, so that its masks fit."""
    width = rollout.sequences.shape[1]
    more = (0, width - forced.sequences.shape[1])
    assert forced.evictions is not None  # there is no retriever
    drawn = rollout.completion_mask.to(forced.sequences.device)
    return replace(
        forced,
        sequences=rollout.sequences.to(forced.sequences.device),
        completion_mask=drawn,
        sampler_logprobs=F.pad(forced.sampler_logprobs, more) * drawn,
        turns=rollout.turns,
        evictions=replace(forced.evictions, length=width),
        finished=rollout.finished.clone(),
    )
