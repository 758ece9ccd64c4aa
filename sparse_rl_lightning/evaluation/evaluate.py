"""The evaluator: completions of rows, drawn batch by batch, judged and added up.

Validation, the run's summary, ``sparse-rl test`` and the benchmarks all measure with :func:`evaluate`. They differ in
what draws (a cache, greedy or sampled) and in what judges (reward functions, or a checker of answers). Validation logs
the scores of each batch.

Letters: P rows, N completions of each, B = P x N.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.distributed.ranks import DealtRows
from sparse_rl_lightning.evaluation.problems import problem_numbers
from sparse_rl_lightning.metrics import ConfidenceInterval, accuracy
from sparse_rl_lightning.records import KVUsage, Rollout, Rows, ScoredRollout
from sparse_rl_lightning.rewards.scoring import Failures, Rewards
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.conversations import Conversations, converse
from sparse_rl_lightning.rollout.generator import VALIDATION

Draw: TypeAlias = Callable[[Rows], ScoredRollout]
"""Completes a batch of rows; the batches come in order."""
Judge: TypeAlias = Callable[[ScoredRollout], Tensor]
"""Fills ``reward_table`` and returns the rewards (B,) that they add up to, NaN where there is none."""


@dataclass(frozen=True)
class Scores:
    """Completions of rows and their rewards; the completions of a row are adjacent."""

    rows: Rows
    completions: list[str]  # B, hostile text
    texts: list[str]  # B, the same to be read: of conversations all turns
    rewards: Tensor  # (B,), NaN where no reward applies
    table: dict[str, Tensor]  # (B,) per reward function, NaN where it does not apply or failed
    failed: Tensor  # (B,) bool: the first reward function failed
    lengths: Tensor  # (B,) tokens
    finished: Tensor  # (B,) bool: ended by themselves, not by length
    problems: Tensor  # (P,) int64, the same number for rows that are copies of one problem
    kv: KVUsage | None

    @classmethod
    def of(cls, scored: ScoredRollout, rewards: Tensor) -> Scores:
        """Take what counts from a rollout that was judged; its tensors of tokens are left behind."""
        rollout, table = scored.rollout, scored.reward_table
        failed = scored.failed.get(next(iter(table), ""), torch.zeros(len(rewards), dtype=torch.bool))
        return cls(
            scored.rows, scored.completions, scored.texts, rewards, table, failed,
            rollout.completion_lengths, rollout.finished,
            problem_numbers(scored.asked, whole=scored.conversations is not None), rollout.kv,
        )  # fmt: skip

    @classmethod
    def cat(cls, batches: Sequence[Scores]) -> Scores:
        """The scores of several batches as one."""
        usages = [batch.kv for batch in batches if batch.kv is not None]
        return cls(
            rows=[row for batch in batches for row in batch.rows],
            completions=[text for batch in batches for text in batch.completions],
            texts=[text for batch in batches for text in batch.texts],
            rewards=torch.cat([batch.rewards for batch in batches]),
            table={name: torch.cat([batch.table[name] for batch in batches]) for name in batches[0].table},
            failed=torch.cat([batch.failed for batch in batches]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            finished=torch.cat([batch.finished for batch in batches]),
            problems=torch.cat([batch.problems for batch in batches]),
            kv=KVUsage.cat(usages) if usages else None,
        )

    @property
    def num_samples(self) -> int:
        """Completions per row."""
        return len(self.completions) // len(self.rows)

    @property
    def first(self) -> Tensor:
        """(P, N) rewards of the first reward function, by which accuracies count."""
        return next(iter(self.table.values())).view(len(self.rows), -1)

    @property
    def applies(self) -> Tensor:
        """(P,) bool: whether the first reward function applies to a row; what it failed on counts as wrong."""
        return ~(self.first.isnan() & ~self.failed.view(len(self.rows), -1)).all(dim=1)

    @property
    def mean(self) -> float | None:
        """Mean reward of the first reward function where it applies, None if it applies nowhere.

        Samples on which it failed are left out, but of an accuracy, where they are wrong.
        """
        rewards = self.first[~self.first.isnan()].double()
        if self.is_binary:
            rewards = torch.cat([rewards, rewards.new_zeros(int(self.failed.sum()))])
        return float(rewards.mean()) if len(rewards) else None

    @property
    def is_binary(self) -> bool:
        """Whether the first reward function pays 0 or 1 only, so that its mean is an accuracy."""
        rewards = self.first[~self.first.isnan()]
        return bool(((rewards == 0) | (rewards == 1)).all())


def evaluate(draw: Draw, rows: Rows, judge: Judge | None = None, batch_size: int | None = None) -> Scores:
    """Complete rows, judge the completions and add everything up.

    Args:
        draw: Completes a batch of rows.
        rows: Rows to complete, at least one.
        judge: Rewards the completions of a batch, None for no rewards.
        batch_size: Rows completed at the same time, None for all.
    """
    size = batch_size or len(rows)
    parts = []
    for start in range(0, len(rows), size):
        scored = draw(rows[start : start + size])
        rewards = torch.full((len(scored.rollout),), math.nan) if judge is None else judge(scored)
        parts.append(Scores.of(scored, rewards))
    return Scores.cat(parts)


def draw_by_place(generate: Callable[..., ScoredRollout], **settings: Any) -> Draw:
    """Draw by ``Generator.generate`` with these settings, rows numbered in the order of their batches."""
    left = itertools.count()

    def draw(rows: Rows) -> ScoredRollout:
        return generate(rows, first=VALIDATION, places=list(itertools.islice(left, len(rows))), **settings)

    return draw


def draw_from(
    sampler: RolloutSampler,
    decode: Callable[[Rollout], list[str]],
    params: SamplingParams,
    prompts: Iterable[Sequence[int]],
    starts: Iterable[int] | None = None,
    progress: Callable[[Progress], None] | None = None,
    talk: Callable[[], Conversations] | None = None,
) -> Draw:
    """Draw by a sampler alone, under whatever cache it has.

    Args:
        sampler: Sampler of the policy.
        decode: Texts of a rollout's completions.
        params: How to draw.
        prompts: Token ids of each row, in the order of the batches.
        starts: Number of each row's first sequence, which fixes its random numbers; default by the row's place.
        progress: Called after every decode step.
        talk: Creates the conversations of a batch with environments, which may give other prompts; None for completions
            of a single turn.
    """
    samples = params.num_generations
    left = zip(prompts, itertools.count(0, samples) if starts is None else starts, strict=False)

    def draw(rows: Rows) -> ScoredRollout:
        encoded, row_starts = zip(*itertools.islice(left, len(rows)), strict=True)
        ids = [start + sample for start in row_starts for sample in range(samples)]
        if talk is None:
            rollout = sampler.generate(encoded, params, sequence_ids=ids, progress=progress)
            return ScoredRollout(rollout, rows, decode(rollout), {}, 0)
        rows, rollout, dialogs = converse(sampler, talk(), rows, params, ids, progress)
        return ScoredRollout(rollout, rows, [dialog.completion for dialog in dialogs], {}, 0, conversations=dialogs)

    return draw


class ValidationLog:
    """Logs mean reward, mean length and pass@k of every batch, and bounds of pass@1 at the end.

    Right is what the first reward function pays 1 for; rows to which it does not apply are left out, what it failed on
    is wrong. Several ranks log the whole only, not benchmarks: all must log the same names, and their batches are of
    other benchmarks.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log  # of a LightningModule
        self._intervals: dict[str, ConfidenceInterval] = {}  # by the key of the mean, with {} for the measure
        self.rows = DealtRows()

    def begin(self, rewards: Rewards, rows: DealtRows) -> None:
        """Forget the batches of a validation that was interrupted, and begin with the first of this rank's rows."""
        self._intervals.clear()
        self.rows = rows
        rewards.failures = Failures()

    def batch(self, scores: Scores, counts: Tensor, key: str, by_benchmark: bool) -> None:
        """Log a batch under ``key``, ``{}`` being the measure, and if wanted every benchmark beside the whole.

        Of its rows those count of which ``counts`` (P,) says so.
        """
        samples = counts.repeat_interleave(scores.num_samples)
        rewarded = scores.rewards[samples.to(scores.rewards.device) & ~scores.rewards.isnan()]
        mean = rewarded.mean() if len(rewarded) else scores.rewards.new_zeros(())  # no rewarded rows: weight 0
        log = partial(self._log, sync_dist=True)
        each = self.rows.world_size  # Lightning divides the sum of weights by it, in whole numbers
        log(key.format("reward"), mean, prog_bar=True, batch_size=each * len(rewarded))
        lengths = scores.lengths[samples.to(scores.lengths.device)].float()
        length = lengths.mean() if len(lengths) else lengths.new_zeros(())
        log(key.format("length"), length, prog_bar=True, batch_size=each * int(counts.sum()))
        applies, correct = scores.applies & counts, scores.first == 1
        columns = [row.get("benchmark") for row in scores.rows]  # of any type, with any braces
        names = [n if n is None else str(n).replace("{", "{{").replace("}", "}}") for n in columns]
        for name in dict.fromkeys([None, *names] if by_benchmark else [None]):
            rows = applies & torch.tensor([name in (None, benchmark) for benchmark in names])
            chosen = correct[rows]
            benchmark_key = key if name is None else key.format(f"{name}/{{}}")
            for k, value in accuracy(chosen if len(chosen) else correct).pass_at.items():  # no such rows: weight 0
                log(benchmark_key.format(f"pass@{k}"), value, batch_size=each * len(chosen))
            device = scores.rewards.device
            if benchmark_key not in self._intervals:
                self._intervals[benchmark_key] = ConfidenceInterval().to(device)
            shares = chosen.double().mean(dim=1).to(device)
            self._intervals[benchmark_key].update(shares, scores.problems[rows].to(device))

    def end(self, rewards: Rewards) -> None:
        """Log both bounds of 95 % confidence of every mean, over batches and ranks; too many failures end the run."""
        for key, interval in self._intervals.items():
            for bound, value in zip(("low", "high"), interval.compute(), strict=True):
                self._log(key.format(f"pass@1_{bound}"), value, sync_dist=True)
        self._intervals.clear()
        rewards.settle()
