"""GuardedReward: a reward function that fails on a sample costs that sample, not the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sparse_rl_lightning.rewards.base import RewardFunction, reward_name

HANGS = 3
"""Samples that must time out, before any other outcome, until a reward function counts as one that always hangs."""


class GuardedReward:
    """Calls a reward function; samples on which it raises or does not return in time get None, and are counted.

    After a failure every sample is judged by itself. If none can be judged, the function is at fault and not the
    samples: the error is raised. A call that does not return goes on in its thread, which cannot be ended from outside;
    a function that may hang for good should do its work in a process of its own. Of a function that always hangs the
    error is raised after ``(HANGS + 1) * timeout`` seconds, as soon as it has answered for none of ``HANGS`` samples in
    a row taken from all over the batch. One that answers for some takes at most ``samples + 1`` times the timeout.

    Args:
        function: The reward function.
        timeout: Seconds that a call for a batch or a sample may take, None for any time.
    """

    def __init__(self, function: RewardFunction, timeout: float | None = None) -> None:
        self.function = function
        self.timeout = timeout
        self.failed = 0  # samples of the last call
        self.first = ""  # the first of them and its error
        self.__name__ = reward_name(function)
        self.__wrapped__ = function  # whose signature counts

    def __call__(self, **batch: Any) -> Sequence[float | None]:
        """Rewards of a batch."""
        self.failed, self.first = 0, ""
        try:
            return self._in_time(batch)
        except Exception as error:
            rewards = self._one_by_one(batch)
            if self.failed == len(rewards):
                raise error
            return rewards

    def _one_by_one(self, batch: dict[str, Any]) -> list[float | None]:
        count, hung = len(batch["completions"]), 0
        rewards: list[float | None] = [None] * count
        spread = [count * part // HANGS for part in range(HANGS)]  # of different prompts, one of which may be at fault
        for tried, sample in enumerate(dict.fromkeys([*spread, *range(count)]), 1):
            try:
                (rewards[sample],) = self._in_time({name: [values[sample]] for name, values in batch.items()})
            except Exception as error:
                self.first = self.first or f"sample {sample} with {type(error).__name__}: {ascii(str(error))[:200]}"
                self.failed += 1
                hung += isinstance(error, TimeoutError)
            if self.timeout is not None and hung == tried == HANGS:
                self.failed = count  # it hangs on all
                break
        return rewards

    def _in_time(self, batch: dict[str, Any]) -> Sequence[float | None]:
        if self.timeout is None:
            return self.function(**batch)
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                outcome["rewards"] = self.function(**batch)
            except Exception as error:
                outcome["error"] = error

        thread = threading.Thread(target=work, name=self.__name__, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            raise TimeoutError(f"no answer within {self.timeout:g} seconds")
        if "error" in outcome:
            raise outcome["error"]
        rewards: Sequence[float | None] = outcome["rewards"]
        return rewards
