"""Validation: what is logged of the scores of each batch, and the confidence of pass@1 once all are in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparse_rl_lightning.distributed.ranks import DealtRows
from sparse_rl_lightning.evaluation.evaluate import Scores
from sparse_rl_lightning.metrics import ConfidenceInterval, accuracy
from sparse_rl_lightning.rewards.scoring import Failures, Rewards

Log = Callable[..., None]
"""``LightningModule.log``."""


class ValidationLog:
    """Logs mean reward, mean length and pass@k of every batch, and bounds of pass@1 at the end.

    Right is what the first reward function pays 1 for; rows to which it does not apply are left out, what it failed on
    is wrong. Several ranks log the whole only, not benchmarks: all must log the same names, and their batches are of
    other benchmarks.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
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
        names = [row.get("benchmark") for row in scores.rows]
        for name in dict.fromkeys([None, *names] if by_benchmark else [None]):
            rows = applies & torch.tensor([name in (None, other) for other in names])
            chosen = correct[rows]
            own = key if name is None else key.format(f"{name}/{{}}")
            for k, value in accuracy(chosen if len(chosen) else correct).pass_at.items():  # no such rows: weight 0
                log(own.format(f"pass@{k}"), value, batch_size=each * len(chosen))
            device = scores.rewards.device
            if own not in self._intervals:
                self._intervals[own] = ConfidenceInterval().to(device)
            shares = chosen.double().mean(dim=1).to(device)
            self._intervals[own].update(shares, scores.problems[rows].to(device))

    def end(self, rewards: Rewards) -> None:
        """Log both bounds of 95 % confidence of every mean, over batches and ranks; too many failures end the run."""
        for key, interval in self._intervals.items():
            for bound, value in zip(("low", "high"), interval.compute(), strict=True):
                self._log(key.format(f"pass@1_{bound}"), value, sync_dist=True)
        self._intervals.clear()
        rewards.settle()
