"""The clock of a training run: seconds of its stages between two optimizer steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common.memory import forget_peak, resident_bytes

PREPARE, ROLLOUT, RESCORING = "prepare", "rollout", "rescoring"


@dataclass(frozen=True)
class Measured:
    """What one run took; seconds are those of one optimizer step."""

    seconds: float
    rollout: float
    rescoring: float
    update: float
    rest: float  # rewards, advantages, callbacks
    tokens: float  # of completions, per optimizer step
    reward: float  # mean of a sample
    peak: int  # bytes above what the process held before the first rollout


@dataclass
class Stages:
    """Seconds spent in methods of a trainer that are watched, from one optimizer step to another.

    Args:
        first: Optimizer steps done when the clock starts.
        last: Optimizer steps done when it stops.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        self.done, self.start, self.seconds = 0, 0.0, 0.0
        self.before: int | None = None  # bytes, when the first rollout begins
        self._reset()

    def watch(
        self, owner: Any, method: str, stage: str, inside: str | None = None, see: Callable[[Any], None] | None = None
    ) -> None:
        """Count the time of a method.

        Args:
            owner: Object whose method it is.
            method: Its name.
            stage: Stage that the time belongs to.
            inside: Count only calls from within this stage.
            see: Function that is shown what the method returns.
        """
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if inside is not None and inside not in self._open:
                return call(*args, **kwargs)
            if self.before is None:
                forget_peak()
                self.before = resident_bytes()
            start = time.perf_counter()
            self._open.append(stage)
            try:
                out = call(*args, **kwargs)
            finally:
                self._open.pop()
                self.spent[stage] += time.perf_counter() - start
            if see is not None:
                see(out)
            return out

        setattr(owner, method, timed)

    def step(self) -> None:
        """Note that an optimizer step is done."""
        self.done += 1
        if self.done == self.first:
            self._reset()
            self.start = time.perf_counter()
        elif self.done == self.last:
            self.seconds = time.perf_counter() - self.start

    def measured(self) -> Measured:
        """What the run took."""
        assert self.done == self.last, f"{self.done} of {self.last} optimizer steps"
        steps, spent = self.last - self.first, self.spent
        return Measured(
            self.seconds / steps,
            spent[ROLLOUT] / steps,
            spent[RESCORING] / steps,
            (self.seconds - spent[PREPARE]) / steps,
            (spent[PREPARE] - spent[ROLLOUT] - spent[RESCORING]) / steps,
            self.tokens / steps,
            sum(self.rewards) / max(len(self.rewards), 1),
            resident_bytes(peak=True) - (self.before or 0),
        )

    def _reset(self) -> None:
        self.spent: Counter[str] = Counter()
        self.tokens, self.rewards = 0, list[float]()
        self._open: list[str] = []
