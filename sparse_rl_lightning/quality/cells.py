"""One method at one budget: how far it takes the policy from itself, accuracy, cost and exactness of replay.

Letters: B sequences, T tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evaluation.evaluate import Judge, draw_from, evaluate
from sparse_rl_lightning.evaluation.problems import problem_numbers
from sparse_rl_lightning.metrics import accuracy
from sparse_rl_lightning.metrics.intervals import Estimate, mean, ratio, share, tail
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.quality.mismatch import Mismatch
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs, note_first
from sparse_rl_lightning.rollout.prompts import encode_prompts
from sparse_rl_lightning.rollout.teacher_forcing import force

MICRO_BATCH = 8
"""Sequences per dense or replayed forward pass."""
LEAST_PAIRS = 4
"""Texts are forced through both caches in this many parts at least."""


@dataclass(frozen=True)
class Cell:
    """One method at one budget; None where nothing was measured, and then ``reason`` says why."""

    method: str
    budget: int | None  # None for the full cache
    fingerprint: str = ""  # of what was measured
    tail: float | None = None  # 5th percentile of the acceptance, over the sampled tokens
    agreement: float | None = None  # share of these tokens for which both caches have the same most likely token
    kl: float | None = None  # KL(sparse || dense) per token
    rejected: float | None = None  # share of sequences that rejection at 1e-4 is expected to take
    length: float | None = None  # of completions, over that with the full cache on the same problems
    intervals: dict[str, list[float]] = field(default_factory=dict)  # 95 % over problems, of the five above
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
        num_timed: Completions that both caches are timed on, 0 for no times.
        full_lengths: Completion tokens (B,) with the full cache, that others are compared with; None for no comparison.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    judge: Judge | None
    params: SamplingParams
    num_slots: int | None = None
    num_timed: int = 32
    full_lengths: Tensor | None = None

    def sampler(self, compressor: Compressor) -> RolloutSampler:
        """Sampler under a cache."""
        options = RolloutOptions(num_slots=self.num_slots)
        options = options if compressor.evicts else options.for_full_cache(self.model.device)
        return options.sampler(self.model, self.tokenizer, compressor)

    def prompts(self) -> list[list[int]]:
        """Token ids of every problem."""
        return encode_prompts(self.tokenizer, [row["prompt"] for row in self.rows])

    def draw(self, compressor: Compressor, seed: int = 0) -> Rollout:
        """Completions of every problem under a cache; ``seed`` is added to that of the parameters."""
        params = replace(self.params, seed=(self.params.seed or 0) + seed)
        return self.sampler(compressor).generate(self.prompts(), params)

    def measure(self, compressor: Compressor) -> dict[str, Any]:
        """Everything that a cell says of a compressor."""
        rollout = self.draw(compressor)
        by_length = torch.split(rollout.lengths.argsort(), MICRO_BATCH)
        batches = [rollout[rows].trimmed() for rows in by_length]
        mismatch = Mismatch.join([Mismatch.of(self.model, batch, self.params.temperature) for batch in batches])
        lengths = torch.cat([batch.completion_lengths for batch in batches]).cpu()
        estimates = self._estimates(mismatch, lengths, torch.cat(by_length).cpu() // self.params.num_generations)
        unknown = [name for name, estimate in estimates.items() if not math.isfinite(estimate.value)]
        if unknown:
            raise UserError(f"{', '.join(unknown)} cannot be computed: the policy's log-probabilities are not finite.")
        assert rollout.kv is not None
        return {
            **{name: estimate.value for name, estimate in estimates.items()},
            # one problem alone has none
            "intervals": {n: [e.low, e.high] for n, e in estimates.items() if math.isfinite(e.low)},
            "kv_saving": rollout.kv.saving_final, "replay_difference": float(mismatch.replay_difference.max()),
            **self._times(compressor, rollout[: self.num_timed]), **self._accuracy(compressor),
        }  # fmt: skip

    def _estimates(self, mismatch: Mismatch, lengths: Tensor, rows: Tensor) -> dict[str, Estimate]:
        """Numbers with intervals, of completions with these lengths (B,) of these rows (B,), by their problems."""
        problems = problem_numbers(self.rows)[rows]
        of_tokens = problems.repeat_interleave(lengths)
        kept = torch.stack([log_kept.sum().exp() for log_kept in torch.split(mismatch.log_kept, lengths.tolist())])
        estimates = {
            "tail": tail(mismatch.acceptance, of_tokens), "agreement": mean(mismatch.agrees, of_tokens),
            "kl": mean(mismatch.kl, of_tokens), "rejected": share(1 - kept, problems),
        }  # fmt: skip
        if self.full_lengths is not None:
            by_row = self.full_lengths.view(-1, self.params.num_generations).double().mean(dim=1)
            estimates["length"] = ratio(lengths, by_row[rows], problems)
        return estimates

    def _accuracy(self, compressor: Compressor) -> dict[str, float]:
        """Accuracy of greedy answers with its interval, over the rows that are judged; nothing without any."""
        if self.judge is None:
            return {}
        params = replace(self.params, num_generations=1, temperature=0.0)
        draw = draw_from(self.sampler(compressor), self._texts, params, self.prompts())
        scores = evaluate(draw, self.rows, self.judge)
        counted = scores.applies
        if not counted.any():
            return {}
        measured = accuracy(scores.first[counted] == 1, scores.problems[counted])
        return {"accuracy": measured.mean, "low": measured.low, "high": measured.high}

    def _texts(self, rollout: Rollout) -> list[str]:
        return self.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)

    def _times(self, compressor: Compressor, rollout: Rollout) -> dict[str, float | None]:
        """Milliseconds of a compression, and the ratio of both caches' times for the same texts, token by token."""
        layers, ratios = CacheGeometry.of(self.model).num_layers, []
        timed = TimedCompression(compressor, layers)
        for texts in rollout.parts(LEAST_PAIRS) if len(rollout) else []:
            if not timed.cuts:  # alone, since reading the clock holds up a GPU
                timed = TimedCompression(compressor, layers)
                self._forced(timed, texts)
            seconds = self._forced(Compression(compressor, layers), texts)
            ratios.append(seconds / self._forced(Compression(FullKV(), layers), texts))
        event = 1e3 / timed.events_per_second if timed.cuts else None
        return {"time_ratio": median(ratios) if ratios else None, "event_ms": event}

    def _forced(self, compression: Compression, texts: Rollout) -> float:
        """Seconds that given completions take, token by token through a cache."""
        last = texts.lengths - 1
        params = replace(self.params, max_completion_length=int(texts.completion_lengths.max()), num_generations=1)

        def note(logs: SequenceLogs, slots: Tensor, at: Tensor, logits: Tensor) -> None:
            note_first(logs.end, slots, at, at == last[slots])

        start = now(self.model.device)
        force(self.model, texts.sequences, texts.prompt_lengths.tolist(), compression, params, note)
        return now(self.model.device) - start


@dataclass
class TimedCompression(Compression):
    """A compression that is timed while decoding; medians count, so that other work of the machine does not."""

    cuts: list[float] = field(default_factory=list)  # seconds of each event: one slot cut in all its layers and heads
    notes: list[float] = field(default_factory=list)  # seconds per slot, layer and step, where there is running state

    @property
    def events_per_second(self) -> float:
        """Events per second, each with the running state of the steps since the one before."""
        return 1 / (median(self.cuts) + self.compressor.buffer * self.num_layers * median(self.notes or [0.0]))

    def compress(
        self, cache: SlotCache, slots: list[int], lengths: list[int], room: list[int],
        turn_starts: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Compress, and count the seconds."""
        device = cache.geometry.device
        start = now(device)
        super().compress(cache, slots, lengths, room, turn_starts)
        self.cuts += [(now(device) - start) / len(slots)] * len(slots)

    def record_step(
        self, cache: SlotCache, layer: int, slots: list[int], positions: Tensor, probs: Tensor | None, hidden: Tensor,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        """Note and count the seconds of a step in one layer."""
        start = now(hidden.device)
        super().record_step(cache, layer, slots, positions, probs, hidden, weights)
        self.notes.append((now(hidden.device) - start) / len(slots))


def now(device: torch.device) -> float:
    """Seconds, when everything that was queued on this device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
