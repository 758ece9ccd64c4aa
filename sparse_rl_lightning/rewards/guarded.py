"""GuardedReward: a reward function whose failure on a sample costs that sample, not the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparse_rl_lightning.rewards.base import (
    RewardFailure,
    RewardFunction,
    attempt,
    describe_sample,
    one_sample,
    reward_name,
)
from sparse_rl_lightning.rewards.process import LostProcess, RewardProcess

LOST = 3
"""Number of samples without an answer, before any other outcome, after which a function counts as hanging."""


class GuardedReward:
    """Calls a reward function; samples on which it raises or times out get None, and are counted.

    After a failure every sample is scored by itself. If none can be scored, the function is at fault and not the
    samples: the error is raised. With a timeout the function runs in a process of its own (``RewardProcess``), which is
    killed when its time is up. A function that always hangs is given up after ``(LOST + 1) * timeout`` seconds, as soon
    as it has answered for none of ``LOST`` samples in a row taken from all over the batch. One that answers for some
    takes at most ``samples + 1`` times the timeout.

    Args:
        function: Reward function to guard.
        timeout: Seconds that a call for a batch or a sample may take; None for no limit, in this process.
        name: Name in metrics and errors, the function's own by default.
    """

    def __init__(self, function: RewardFunction, timeout: float | None = None, name: str | None = None) -> None:
        self.function = function
        self.timeout = timeout
        self.__name__ = name or reward_name(function)
        self.failed = 0  # number of failed samples in the last batch
        self.first = ""  # the first of them and its error
        self._process = RewardProcess(function, self.__name__)

    def judge(self, batch: Mapping[str, Sequence[Any]]) -> list[float | None]:
        """The rewards of a batch from ``reward_batch``.

        Raises:
            ValueError: If the function cannot be called or its result cannot be read.
            RuntimeError: If it fails on every sample.
        """
        self.failed, self.first = 0, ""
        try:
            return self._attempt(batch)
        except RewardFailure as failure:
            return self._one_by_one(batch, failure)

    def take_counters(self) -> Mapping[str, float]:
        """The function's counts since the last call, wherever it runs."""
        if self.timeout is not None:
            return self._process.take_counters()
        counts: Mapping[str, float] = getattr(self.function, "take_counters", dict)()
        return counts

    def close(self) -> None:
        """End the function's process, if it has one."""
        self._process.close()

    def _one_by_one(self, batch: Mapping[str, Sequence[Any]], together: RewardFailure) -> list[float | None]:
        completions = batch["completions"]
        count, lost = len(completions), 0
        rewards: list[float | None] = [None] * count
        failures: dict[int, RewardFailure] = {}
        spread = [count * part // LOST for part in range(LOST)]  # of different prompts, one of which may be at fault
        for tried, sample in enumerate(dict.fromkeys([*spread, *range(count)]), 1):
            try:
                (rewards[sample],) = self._attempt(one_sample(batch, sample))
            except RewardFailure as failure:
                failures[sample] = failure
                lost += isinstance(failure, LostProcess)
            if lost == tried == LOST:
                break
        if not failures:
            self.first = f"it {together} on all of them together, on none alone"
            return rewards
        sample, first = next(iter(failures.items()))
        self.failed = len(failures)
        where = describe_sample(sample, completions[sample])
        self.first = f"it {first} on {where}"
        if self.failed == tried:
            raise RuntimeError(self._error(first, where)) from first.__cause__
        return rewards

    def _attempt(self, batch: Mapping[str, Sequence[Any]]) -> list[float | None]:
        if self.timeout is None:
            return attempt(self.function, self.__name__, batch)
        return self._process.judge(batch, self.timeout)

    def _error(self, failure: RewardFailure, where: str) -> str:
        error = f"The reward function {self.__name__} {failure} on {where}."
        if self.timeout is None or not (isinstance(failure, LostProcess) or "CUDA" in str(failure)):
            return error
        return (
            f"{error} With reward_timeout ({self.timeout:g} seconds) it runs in a process of its own, where there is "
            "no GPU and where it starts anew after each call that was ended: load what it needs when its file is "
            "imported, and give it time enough."
        )
