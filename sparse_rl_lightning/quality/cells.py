"""One method at one budget: tail of the acceptance, agreement, accuracy, cost and exactness of replay.

Letters: B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.acceptance import AcceptanceTail, rollout_acceptance
from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.evaluation.evaluate import Judge, draw_from, evaluate
from sparse_rl_lightning.metrics import accuracy
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.quality.clock import Clock, TimedCompression, now
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs
from sparse_rl_lightning.rollout.prompts import encode_prompts
from sparse_rl_lightning.rollout.teacher_forcing import force

TOP_LOGPROBS = 64
"""Most likely tokens that bound the acceptance from below; with a smaller vocabulary it is exact."""
MICRO_BATCH = 8
"""Sequences per dense or replayed forward pass."""
LEAST_PAIRS, MOST_TEXTS = 4, 32
"""Texts are forced through both caches in this many parts at least, and at most so many texts at once."""


@dataclass(frozen=True)
class Cell:
    """One method at one budget; None where nothing was measured, and then ``reason`` says why."""

    method: str
    budget: int | None  # None for the full cache
    fingerprint: str = ""  # of what was measured
    tail: float | None = None  # 5th percentile of the acceptance, over the sampled tokens
    agreement: float | None = None  # share of these tokens for which both caches have the same favorite
    accuracy: float | None = None  # of greedy answers, with 95 % confidence from low to high; None without answers
    low: float | None = None
    high: float | None = None
    kv_saving: float | None = None  # share of the KV tokens that is not stored at the end
    event_ms: float | None = None  # of cutting one slot in all layers; None if none was cut while decoding
    time_ratio: float | None = None  # time per token over that of the full cache, the same texts in turns
    replay_difference: float | None = None  # largest, between log-probabilities of sampler and replay
    reason: str = ""


@dataclass(frozen=True)
class Bench:
    """What every method is measured on: a policy and its problems.

    Args:
        model: Policy.
        tokenizer: Tokenizer of the policy.
        rows: Problems, with what their judge reads.
        judge: Judge of answers, which pays 1 for a right one; None without answers.
        params: How completions for the acceptance are drawn; the accuracy is of greedy ones.
        num_slots: Sequences drawn at once, None for all.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    judge: Judge | None
    params: SamplingParams
    num_slots: int | None = None

    def sampler(self, compressor: Compressor) -> RolloutSampler:
        """Sampler under a cache."""
        return RolloutOptions(num_slots=self.num_slots).sampler(self.model, self.tokenizer, compressor)

    def prompts(self) -> list[list[int]]:
        """Token ids of every problem."""
        return encode_prompts(self.tokenizer, [row["prompt"] for row in self.rows])

    def draw(self, compressor: Compressor, seed: int = 0) -> Rollout:
        """Completions of every problem under a cache; ``seed`` is added to that of the parameters."""
        top = min(TOP_LOGPROBS, self.model.config.vocab_size)
        params = replace(self.params, top_logprobs=top, seed=(self.params.seed or 0) + seed)
        return self.sampler(compressor).generate(self.prompts(), params)

    def measure(self, compressor: Compressor) -> dict[str, Any]:
        """Everything that a cell says of a compressor."""
        rollout = self.draw(compressor)
        parts = rollout.parts(-(-len(rollout) // MICRO_BATCH))
        lower = torch.cat([rollout_acceptance(self.model, part, self.params.temperature)[0] for part in parts])
        assert rollout.kv is not None
        return {
            "tail": AcceptanceTail.of(lower, rollout.completion_mask).overall, "kv_saving": rollout.kv.saving_final,
            "replay_difference": max(map(self._replay_difference, parts)),
            **self._beside_full(compressor, rollout), **self._accuracy(compressor),
        }  # fmt: skip

    def _replay_difference(self, part: Rollout) -> float:
        with torch.no_grad():
            replayed = replay_logprobs(self.model, part, self.params.temperature)
        return float((replayed - part.sampler_logprobs)[part.completion_mask].abs().max())

    def _accuracy(self, compressor: Compressor) -> dict[str, float]:
        """Accuracy of greedy answers with its interval; nothing without answers."""
        if self.judge is None:
            return {}
        params = replace(self.params, num_generations=1, temperature=0.0)
        draw = draw_from(self.sampler(compressor), self._texts, params, self.prompts())
        scores = evaluate(draw, self.rows, self.judge)
        found = accuracy(scores.first == 1, scores.problems)
        return {"accuracy": found.mean, "low": found.low, "high": found.high}

    def _texts(self, rollout: Rollout) -> list[str]:
        return self.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)

    def _beside_full(self, compressor: Compressor, rollout: Rollout) -> dict[str, float | None]:
        """The rollout's own texts token by token through both caches in turns: favorites and times.

        The sparse favorites are those of the sampler.
        """
        assert rollout.topk_ids is not None
        layers = CacheGeometry.of(self.model).num_layers
        clock, agrees, ratios = Clock(num_layers=layers), [], []
        size = max(1, min(MOST_TEXTS, len(rollout) // LEAST_PAIRS))
        for start in range(0, len(rollout), size):
            part = rollout[start : start + size]
            if not clock.cuts:  # alone, since reading the clock holds up a GPU
                self._forced(TimedCompression(compressor, layers, clock), part)
            _, seconds = self._forced(Compression(compressor, layers), part)
            dense, full_seconds = self._forced(Compression(FullKV(), layers), part)
            ratios.append(seconds / full_seconds)
            sparse = rollout.topk_ids[start : start + size, :, 0]
            agrees.append((sparse == dense)[part.completion_mask])
        event = 1e3 / clock.events_per_second(compressor.buffer) if clock.cuts else None
        agreement = float(torch.cat(agrees).double().mean())
        return {"agreement": agreement, "time_ratio": median(ratios), "event_ms": event}

    def _forced(self, compression: Compression, part: Rollout) -> tuple[Tensor, float]:
        """Favorites (B, T) of a cache at the tokens of given completions, and the seconds that all of them took."""
        counts, favorites = part.completion_lengths, torch.zeros_like(part.sequences)
        last = part.lengths - 1
        params = replace(self.params, max_completion_length=int(counts.max()), num_generations=1)

        def note(logs: SequenceLogs, slots: Tensor, at: Tensor, logits: Tensor) -> None:
            favorites[slots, at] = logits.argmax(dim=-1)
            logs.record_end(slots, at, at == last[slots])

        start = now(self.model.device)
        force(self.model, part.sequences, part.prompt_lengths.tolist(), compression, params, note)
        return favorites, now(self.model.device) - start
