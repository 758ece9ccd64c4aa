"""What a validation logs of right answers: pass@k of every batch, and the confidence of pass@1 when all are in."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparse_rl_lightning.metrics import ConfidenceInterval, accuracy
from sparse_rl_lightning.records import ScoredRollout


class ValidationScores:
    """Logs the share of right answers by the first reward function, of the rows to which it applies, by benchmark.

    Several ranks log the whole only: all must log the same names, and their batches are of other benchmarks.
    """

    def __init__(self) -> None:
        self._intervals: dict[str, ConfidenceInterval] = {}  # by the key of the mean, with {} for the measure

    def begin(self) -> None:
        """Forget the batches of a validation that was interrupted."""
        self._intervals.clear()

    def log(self, log: Callable[..., None], scored: ScoredRollout, key: str, by_benchmark: bool) -> None:
        """Log a batch.

        Args:
            log: Lightning's ``log`` of the module.
            scored: The batch.
            key: Name of a metric, with ``{}`` where its measure goes.
            by_benchmark: Whether to log every benchmark beside the whole.
        """
        first = next(iter(scored.reward_table.values())).view(len(scored.rows), scored.num_generations)
        applies, correct = (~first.isnan().all(dim=1)).tolist(), first == 1
        names = [row.get("benchmark") for row in scored.rows]
        for name in dict.fromkeys([None, *names] if by_benchmark else [None]):
            chosen = correct[[a and name in (None, other) for a, other in zip(applies, names, strict=True)]]
            own = key if name is None else key.format(f"{name}/{{}}")
            for k, value in accuracy(chosen if len(chosen) else correct).pass_at.items():  # of none: has no weight
                log(own.format(f"pass@{k}"), value, batch_size=len(chosen), sync_dist=True)
            self._interval(own, first).update(chosen.double().mean(dim=1))

    def log_intervals(self, log: Callable[..., None]) -> None:
        """Log both bounds of 95 % confidence of every mean, over all batches and ranks."""
        for key, interval in self._intervals.items():
            low, high = interval.compute()
            for bound, value in (("low", low), ("high", high)):
                log(key.format(f"pass@1_{bound}"), value, sync_dist=True)
        self.begin()

    def _interval(self, key: str, like: Tensor) -> ConfidenceInterval:
        if key not in self._intervals:
            self._intervals[key] = ConfidenceInterval().to(like.device)
        return self._intervals[key]
