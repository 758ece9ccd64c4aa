"""How long an evaluation will still take, said every few seconds."""

from __future__ import annotations

import time

from lightning.pytorch.utilities import rank_zero_only

from sparse_rl_lightning.rollout import Progress
from sparse_rl_lightning.text import duration, say


class TimeLeft:
    """Prints a line at most every ``seconds``; the time left is that of the tokens' limits still to be sampled.

    A sequence counts with the length limit of its benchmark, so that 32 long samples are not taken for one short one.

    Args:
        total: Sum over all sequences to be drawn of their length limits.
        seconds: Least time between two lines.
    """

    def __init__(self, total: int, seconds: float = 10.0) -> None:
        self.total = total
        self.seconds = seconds
        self.done = 0
        self._start = self._last = time.monotonic()

    def report(self, where: str, progress: Progress, limit: int) -> None:
        """Called after every decode step.

        Args:
            where: Benchmark and cache.
            progress: Of the rollout that is going on.
            limit: Most tokens of its completions.
        """
        now = time.monotonic()
        if now - self._last >= self.seconds:
            self._last = now
            done = self.done + progress.finished * limit
            self.tell(
                f"{where}: {progress.finished}/{progress.total} sequences of this batch, "
                f"{100 * done / max(1, self.total):.0f} % of the evaluation, {self.left(done, now - self._start)}"
            )

    def finished(self, sequences: int, limit: int) -> None:
        """So many sequences more are done."""
        self.done += sequences * limit

    def left(self, done: int, elapsed: float) -> str:
        """The time left, in words."""
        if not done:
            return "time left not known yet"
        return f"about {duration(elapsed * (self.total - done) / done)} left"

    @rank_zero_only
    def tell(self, text: str) -> None:
        """Print."""
        say(text)
