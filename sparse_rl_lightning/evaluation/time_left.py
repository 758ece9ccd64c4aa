"""TimeLeft: lines that say how far a command is."""

from __future__ import annotations

import time

from tqdm import tqdm

from sparse_rl_lightning.evaluation.evaluate import Draw
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rollout import Progress
from sparse_rl_lightning.text import say


class TimeLeft:
    """Prints how far a command is, with tqdm's estimate of the time left, at most every ``seconds``.

    In an evaluation a sequence counts with the length limit of its benchmark, so that 32 long samples are not taken for
    one short one; ``total`` is the sum of these limits over all sequences to be drawn.
    """

    def __init__(self, total: float, seconds: float = 10.0) -> None:
        self.total = total
        self.seconds = seconds
        self.done = 0
        self._start = self._last = time.monotonic()

    def counted(self, draw: Draw, limit: int = 1) -> Draw:
        """A function that draws the same, and counts what it has drawn as done."""

        def drawn(rows: Rows) -> ScoredRollout:
            scored = draw(rows)
            self.done += len(scored.rollout) * limit
            return scored

        return drawn

    def report(self, where: str, progress: Progress, limit: int) -> None:
        """Say how far it is after a decode step of a rollout with at most ``limit`` tokens per completion."""
        batch = f"{where}: {progress.finished}/{progress.total} sequences of this batch"
        self.tell(batch, self.done + progress.finished * limit)

    def tell(self, where: str, done: float) -> None:
        """Print a line if it is time."""
        now = time.monotonic()
        if now - self._last >= self.seconds:
            self._last = now
            form = "{desc}, {percentage:.0f} % of the whole, {remaining} left"
            say(tqdm.format_meter(done, self.total, now - self._start, prefix=where, bar_format=form))
