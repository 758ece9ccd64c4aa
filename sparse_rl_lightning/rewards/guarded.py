"""GuardedReward: a reward function that fails on a sample costs that sample, not the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sparse_rl_lightning.rewards.base import RewardFunction, reward_name


class GuardedReward:
    """Calls a reward function; samples on which it raises or does not return in time get None, and are counted.

    After a failure every sample is judged by itself. If none can be judged, the function is at fault and not the
    samples: the error is raised. A call that does not return goes on in its thread, which cannot be ended from outside;
    a function that may hang for good should do its work in a process of its own.

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
        rewards: list[float | None] = []
        for sample in range(len(batch["completions"])):
            try:
                (reward,) = self._in_time({name: [values[sample]] for name, values in batch.items()})
            except Exception as error:
                self.first = self.first or f"sample {sample} with {type(error).__name__}: {ascii(str(error))[:200]}"
                reward = None
                self.failed += 1
            rewards.append(reward)
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
