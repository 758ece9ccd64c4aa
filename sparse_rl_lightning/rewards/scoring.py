"""Rewards: scores rollouts by one or several guarded reward functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rewards.base import (
    RewardFunction,
    check_rewards,
    reward_batch,
    reward_counters,
    reward_names,
    reward_table,
    weighted_rewards,
)
from sparse_rl_lightning.rewards.guarded import GuardedReward


class Rewards:
    """Calls reward functions on a rollout's completions and adds up what they return.

    Args:
        functions: Reward functions with TRL's signature, a single one or several.
        weights: Factor of each function, default 1.
        timeout: Seconds that a function may take, None for any time; see :class:`GuardedReward`.
        warn: Shows the user a warning.

    Raises:
        ValueError: If there is no function, or weights are not one finite number per function.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        functions = list(functions) if isinstance(functions, Sequence) else [functions]
        if not functions:
            raise UserError("reward_funcs is empty: at least one reward function is needed.")
        self.weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(self.weights) != len(functions):
            raise UserError(
                f"reward_weights has {len(self.weights)} numbers for {len(functions)} reward_funcs: "
                "give one number per function."
            )
        for place, weight in enumerate(self.weights):
            check_number(f"reward_weights[{place}]", weight)
        named = zip(functions, reward_names(functions), strict=True)
        self.guards = [GuardedReward(function, timeout, name) for function, name in named]
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()

    @property
    def functions(self) -> list[RewardFunction]:
        """The reward functions, in the order of the weights."""
        return [guard.function for guard in self.guards]

    def check(self, rows: Rows) -> None:
        """Refuse functions that the rows' columns do not fit, before anything is drawn.

        Raises:
            ValueError: If a function does not fit.
        """
        check_rewards(self.functions, columns_of(rows))

    def __call__(self, scored: ScoredRollout) -> Tensor:
        """(B,) weighted sums of the functions' rewards; each function's own values go into the reward table."""
        repeated = [row for row in scored.rows for _ in range(scored.num_generations)]
        columns = {name: [row.get(name) for row in repeated] for name in columns_of(scored.rows)}
        batch = reward_batch(
            [row["prompt"] for row in repeated], scored.completions, scored.rollout.completion_ids, columns
        )
        table = reward_table([guard.judge(batch) for guard in self.guards])
        scored.reward_table = {guard.__name__: table[:, i] for i, guard in enumerate(self.guards)}
        scored.reward_counters = reward_counters(self.guards)
        scored.reward_failures = {guard.__name__: guard.failed for guard in self.guards}
        for guard in self.guards:
            if guard.first:
                self._warn_once(
                    ("failed", guard.__name__),
                    f"The reward function {guard.__name__} failed on {guard.failed} sample(s), first: {guard.first}. "
                    f"They get no reward from it; rewards/{guard.__name__}/failed counts such samples from now on.",
                )
        return weighted_rewards(table, self.weights).to(scored.rollout.sequences.device)

    def warn_of_none(self, scored: ScoredRollout) -> None:
        """Warn once per function that returned None for all samples of a training rollout."""
        for name, rewards in scored.reward_table.items():
            if bool(rewards.isnan().all()) and not scored.reward_failures.get(name):
                self._warn_once(
                    ("none", name),
                    f"The reward function {name} returned None for all {len(rewards)} samples of rollout "
                    f"{scored.index}: it says that it applies to none of them, and nothing is learned from it. If that "
                    "is wrong, look at the columns that it reads.",
                )

    def close(self) -> None:
        """End the processes of the functions; the next call starts them again."""
        for guard in self.guards:
            guard.close()

    def _warn_once(self, key: tuple[str, str], text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)


def columns_of(rows: Rows) -> list[str]:
    """Names of the rows' columns besides the prompt; a row that lacks one has None."""
    return list(dict.fromkeys(name for row in rows for name in row if name != "prompt"))
