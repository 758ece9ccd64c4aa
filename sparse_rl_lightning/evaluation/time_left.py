"""TimeLeft: lines that say how far an evaluation is."""

from __future__ import annotations

import time

from tqdm import tqdm

from sparse_rl_lightning.evaluation.evaluate import Draw
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rollout import Progress
from sparse_rl_lightning.text import say


class TimeLeft:
    """Prints how far an evaluation is, with tqdm's estimate of the time left, at most every ``seconds``.

    A sequence counts with the length limit of its benchmark, so that 32 long samples are not taken for one short one;
    ``total`` is the sum of these limits over all sequences to be drawn.
    """

    def __init__(self, total: int, seconds: float = 10.0) -> None:
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
        """Print a line if it is time, after a decode step of a rollout with at most ``limit`` tokens per completion."""
        now = time.monotonic()
        if now - self._last >= self.seconds:
            self._last = now
            done = self.done + progress.finished * limit
            batch = f"{where}: {progress.finished}/{progress.total} sequences of this batch"
            form = "{desc}, {percentage:.0f} % of the evaluation, {remaining} left"
            say(tqdm.format_meter(done, self.total, now - self._start, prefix=batch, bar_format=form))
