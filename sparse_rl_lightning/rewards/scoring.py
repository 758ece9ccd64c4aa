"""Rewards: scores rollouts by one or several reward functions, whose failure on a sample costs it and not the run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.records import Conversation, Rows, ScoredRollout
from sparse_rl_lightning.rewards.base import (
    PROMPT_TEXTS,
    RESERVED,
    Returned,
    RewardFailure,
    RewardFunction,
    asks_for_prompt_texts,
    attempt,
    check_rewards,
    named_arguments,
    reward_batch,
    reward_name,
    reward_names,
    reward_table,
    weighted_rewards,
)
from sparse_rl_lightning.rewards.process import LostProcess, RewardProcess
from sparse_rl_lightning.text import printable

LOST = 3
"""Number of samples without an answer, before any other outcome, after which a function counts as hanging."""


@dataclass
class Failures:
    """Samples that were judged, and those among them that are left out because a function failed on them."""

    judged: int = 0
    failed: int = 0
    error: Exception | None = None  # of the last one that failed first


class Rewards:
    """Calls reward functions on a rollout's completions and adds up what they return.

    A sample on which a function with a weight fails has no reward at all, whatever the others say: if a failure were
    worth 0, breaking a function that punishes would pay.

    Args:
        functions: Reward functions with TRL's signature, a single one or several.
        weights: Factor of each function, default 1.
        timeout: Seconds that a function may take, None for any time; see :class:`GuardedReward`.
        warn: Shows the user a warning.
        environment: Whether an environment rewards conversations too, with the factor 1: no function is needed then,
            and each gets the messages of its conversations as ``conversations``.
        failure_limit: Share of the samples at which failures end the run, when :meth:`settle` is called.

    Raises:
        ValueError: If there is no function, or weights are not one finite number per function.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction] | None,
        weights: Sequence[float] | float | None = None,
        timeout: float | None = None,
        warn: Callable[[str], None] = warnings.warn,
        environment: bool = False,
        failure_limit: float = 1.0,
    ) -> None:
        functions = [] if functions is None else list(functions) if isinstance(functions, Sequence) else [functions]
        if not functions and not environment:
            raise UserError("reward_funcs is empty: at least one reward function is needed, or an environment.")
        weights = [weights] if isinstance(weights, (int, float)) else weights
        self.weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(self.weights) != len(functions):
            raise UserError(
                f"reward_weights has {len(self.weights)} numbers for {len(functions)} reward_funcs: "
                "give one number per function."
            )
        for index, weight in enumerate(self.weights):
            check_number(f"reward_weights[{index}]", weight)
        named = zip(functions, reward_names(functions), strict=True)
        if environment and "environment" in reward_names(functions):
            raise UserError("a reward function may not be named environment, as the reward of the environment is.")
        self.guards = [GuardedReward(function, timeout, name) for function, name in named]
        self._conversations = ["conversations"] if environment else []  # columns besides those of the rows
        self.failure_limit = failure_limit
        self.failures = Failures()  # since the last settle()
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()
        self._fitting: list[str] | None = None  # columns that the functions were found to fit
        self._reading = set[GuardedReward]()  # functions that read the prompts as the policy does, by those columns

    @property
    def functions(self) -> list[RewardFunction]:
        """The reward functions, in the order of the weights."""
        return [guard.function for guard in self.guards]

    def check(self, rows: Rows) -> None:
        """Refuse functions that the rows' columns do not fit, before anything is drawn.

        Raises:
            ValueError: If a function does not fit.
        """
        columns = columns_of(rows) + self._conversations
        if self._conversations and "conversations" in columns_of(rows):
            raise UserError("The data may not have a column named 'conversations': reward functions get those drawn.")
        self._fit(columns)

    def _fit(self, columns: list[str]) -> None:
        """Check the functions against the columns, and find those that read prompts as the policy does."""
        if columns != self._fitting:  # the same in most rollouts
            check_rewards(self.functions, columns)
            self._fitting = columns
            self._reading = {guard for guard in self.guards if asks_for_prompt_texts(guard.function, columns)}

    def admit(self, rows: Rows, locate: Callable[[int], str]) -> Rows:
        """The rows of a data set, checked before anything is drawn: None in place of columns that others have.

        Args:
            rows: All rows.
            locate: Where a row comes from, by its index.

        Raises:
            ValueError: If a row has a column that functions get already, or a function does not fit the columns.
        """
        columns = columns_of(rows)
        for name in filter(RESERVED.__contains__, columns):
            index = next(index for index, row in enumerate(rows) if name in row)
            raise UserError(
                f"The data may not have a column named {name!r}: reward functions get it already ({locate(index)})."
            )
        self.check(rows)
        lacking = [index for index, row in enumerate(rows) if len(row) - ("prompt" in row) < len(columns)]
        if not lacking:
            return rows
        self._warn_of_lacking(rows, lacking, columns, locate)
        empty, rows = dict.fromkeys(columns), list(rows)
        for index in lacking:
            rows[index] = empty | rows[index]
        return rows

    def __call__(self, scored: ScoredRollout) -> Tensor:
        """(B,) weighted sums of the functions' rewards; each function's own values go into the reward table."""
        samples, ids = scored.num_generations, scored.rollout.completion_ids
        repeated = [row for row in scored.rows for _ in range(samples)]
        columns = {name: [row.get(name) for row in repeated] for name in columns_of(scored.rows)}
        dialogs = scored.conversations
        if dialogs is not None:
            columns["conversations"] = [dialog.messages for dialog in dialogs]
        batch = reward_batch([row["prompt"] for row in repeated], scored.completions, ids, columns)
        self._fit(list(columns))
        read = batch | {PROMPT_TEXTS: scored.prompt_texts()} if self._reading and scored.prompt_texts else batch
        judged = {guard.__name__: guard.judge(read if guard in self._reading else batch) for guard in self.guards}
        weights = self.weights
        if dialogs is not None:
            judged["environment"] = [None if dialog.has_failed else dialog.reward for dialog in dialogs]
            weights = [*weights, 1.0]
        table = reward_table(list(judged.values()))
        scored.reward_table = {name: table[:, i] for i, name in enumerate(judged)}
        scored.reward_counters = {
            f"{guard.__name__}/{name}": float(count)
            for guard in self.guards
            for name, count in guard.take_counters().items()
        }
        scored.reward_failures = {guard.__name__: len(guard.failures) for guard in self.guards}
        rewards = weighted_rewards(table, weights)
        if dialogs is not None:
            self._count_failures(scored, dialogs)
        self.failures.judged += len(rewards)
        for guard, weight in zip(self.guards, self.weights, strict=True):
            if guard.first:
                self._warn_of_failure(guard, weight)
            if guard.failures:
                scored.failed[guard.__name__] = torch.zeros(len(rewards), dtype=torch.bool)
                scored.failed[guard.__name__][list(guard.failures)] = True
        if scored.failed:
            rewards = self._without_failed(rewards, scored)
        return rewards.to(scored.rollout.sequences.device)

    def settle(self) -> None:
        """Reset the counts, after a training rollout or a whole validation.

        Raises:
            RuntimeError: If at least the limit's share of the samples judged since the last call has failed; a
                ValueError if it was by what a function returned.
        """
        failures, self.failures = self.failures, Failures()
        if failures.error is None or failures.failed < self.failure_limit * failures.judged:
            return
        raise type(failures.error)(
            f"{failures.error} {failures.failed} of {failures.judged} samples failed, and "
            f"model.rollout.reward_failure_limit={self.failure_limit:g} is the share at which the run ends."
        ) from failures.error.__cause__

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

    def _without_failed(self, rewards: Tensor, scored: ScoredRollout) -> Tensor:
        """The rewards (B,), NaN where the environment or a function with a weight failed; those are counted."""
        ignored = {guard.__name__ for guard, weight in zip(self.guards, self.weights, strict=True) if not weight}
        lost = torch.zeros_like(rewards, dtype=torch.bool)
        for name in scored.failed.keys() - ignored - {"environment"}:
            lost |= scored.failed[name]
        self.failures.failed += int(lost.sum())
        for guard in self.guards:
            if guard.error is not None and guard.__name__ not in ignored:
                self.failures.error = guard.error
        return rewards.masked_fill(lost | scored.failed.get("environment", lost), math.nan)

    def _warn_of_lacking(
        self, rows: Rows, lacking: Sequence[int], columns: Sequence[str], locate: Callable[[int], str]
    ) -> None:
        """Warn once of columns that a function names and some rows lack."""
        for guard in self.guards:
            for column in set(named_arguments(guard.function)) & set(columns):
                without = [index for index in lacking if column not in rows[index]]
                if without:
                    self._warn_once(
                        ("lacking", f"{guard.__name__} {column}"),
                        f"{len(without)} of {len(rows)} rows have no column {column!r}, which the reward function "
                        f"{guard.__name__} names: it gets None there. First: {locate(without[0])}.",
                    )

    def _warn_of_failure(self, guard: GuardedReward, weight: float) -> None:
        """Warn once that a function has failed, and say what becomes of these samples."""
        left = "They are left out: no baseline counts them, and their advantage is 0"
        left = left if weight else "They are trained on, because its weight is 0"
        self._warn_once(
            ("failed", guard.__name__),
            f"The reward function {guard.__name__} failed on {len(guard.failures)} sample(s), first: {guard.first}. "
            f"{left}; rewards/{guard.__name__}/failed counts such samples from now on.",
        )

    def _count_failures(self, scored: ScoredRollout, dialogs: Sequence[Conversation]) -> None:
        """Count the conversations that their environment broke off, and warn of the first."""
        failed, ends = [dialog for dialog in dialogs if dialog.has_failed], [dialog.end for dialog in dialogs]
        scored.reward_failures["environment"] = len(failed)
        scored.failures = {"turns/failed": ends.count("failed"), "turns/timeouts": ends.count("timeout")}
        if failed:
            scored.failed["environment"] = torch.tensor([dialog.has_failed for dialog in dialogs])
            self._warn_once(
                ("failed", "environment"),
                f"The environment failed in {len(failed)} conversation(s), first: {failed[0].error}. They end there "
                "and get no reward; turns/failed and turns/timeouts count such conversations from now on.",
            )

    def _warn_once(self, key: tuple[str, str], text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)


def columns_of(rows: Rows) -> list[str]:
    """Names of the rows' columns besides the prompt; a row that lacks one has None."""
    return list(dict.fromkeys(name for row in rows for name in row if name != "prompt"))


class GuardedReward:
    """Calls a reward function; samples on which it fails get None, and are remembered with the reason.

    It fails on a sample where it raises, times out, or returns something that is no finite number. After an error or a
    timeout every sample is scored by itself. With a timeout the function runs in a process of its own
    (``RewardProcess``), which is killed when its time is up. A function that always hangs is given up after
    ``(LOST + 1) * timeout`` seconds, as soon as it has answered for none of ``LOST`` samples in a row taken from all
    over the batch. One that answers for some
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
        self.failures: dict[int, RewardFailure] = {}  # of samples of the last batch
        self.first = ""  # the first of them and its error
        self.error: Exception | None = None  # to end the run with, should that be too many
        self._process = RewardProcess(function, self.__name__)

    def judge(self, batch: Mapping[str, Sequence[Any]]) -> list[float | None]:
        """The rewards of a batch from ``reward_batch``.

        Raises:
            ValueError: If the function cannot be called or its result cannot be read.
            RuntimeError: If it hangs.
        """
        self.failures, self.first, self.error = {}, "", None
        try:
            returned = self._attempt(batch)
        except RewardFailure as failure:
            returned = self._one_by_one(batch, failure)
        texts = {sample: reward for sample, reward in enumerate(returned) if isinstance(reward, str)}
        wanted = "not a finite number (or None where it does not apply)"
        self.failures |= {sample: RewardFailure(f"returned {text}, {wanted},") for sample, text in texts.items()}
        if self.failures:
            self.error = self._error(batch["completions"], UserError if texts else RuntimeError)
        return [None if isinstance(reward, str) else reward for reward in returned]

    def take_counters(self) -> Mapping[str, float]:
        """The function's counts since the last call, wherever it runs."""
        if self.timeout is not None:
            return self._process.take_counters()
        counts: Mapping[str, float] = getattr(self.function, "take_counters", dict)()
        return counts

    def close(self) -> None:
        """End the function's process, if it has one."""
        self._process.close()

    def _one_by_one(self, batch: Mapping[str, Sequence[Any]], together: RewardFailure) -> list[Returned]:
        completions = batch["completions"]
        count, lost = len(completions), 0
        rewards: list[Returned] = [None] * count
        spread = [count * third // LOST for third in range(LOST)]  # of different prompts, one of which may be at fault
        for tried, sample in enumerate(dict.fromkeys([*spread, *range(count)]), 1):
            try:
                (rewards[sample],) = self._attempt({name: [values[sample]] for name, values in batch.items()})
            except RewardFailure as failure:
                self.failures[sample] = failure
                lost += isinstance(failure, LostProcess)
            if lost == tried == LOST < count:
                raise self._error(completions, RuntimeError)
        if not self.failures:
            self.first = f"it {together} on all of them together, on none alone"
        return rewards

    def _attempt(self, batch: Mapping[str, Sequence[Any]]) -> list[Returned]:
        if self.timeout is None:
            return attempt(self.function, self.__name__, batch)
        return self._process.judge(batch, self.timeout)

    def _error(self, completions: Sequence[str], error_type: type[Exception]) -> Exception:
        """The first failure as an error; it is noted, too."""
        sample, failure = next(iter(self.failures.items()))
        where = f"sample {sample}, completion '{printable(completions[sample], 120)}'"
        self.first = f"it {failure} on {where}"
        text = f"The reward function {self.__name__} {failure} on {where}."
        if self.timeout is not None and (isinstance(failure, LostProcess) or "CUDA" in str(failure)):
            text += (
                f" With reward_timeout ({self.timeout:g} seconds) it runs in a process of its own, where there is no "
                "GPU and where it starts anew after each call that was ended: load what it needs when its file is "
                "imported, and give it time enough."
            )
        error = error_type(text)
        error.__cause__ = failure.__cause__
        return error


def compute_rewards(
    functions: Sequence[RewardFunction],
    weights: Sequence[float] | None,
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[Tensor, Tensor]:
    """The weighted sum of several reward functions over a batch of B samples.

    A function that does not apply to a sample is left out of its sum. Where none applies the reward is NaN.

    Args:
        functions: Reward functions, F of them.
        weights: Factors of the functions, or None for ones.
        prompts: Prompts of the B samples.
        completions: Texts of the samples.
        completion_ids: Token ids of the samples.
        columns: Further columns of the rows, B entries each.

    Returns:
        Rewards (B,) and the unweighted reward of each function (B, F), both float32, NaN where None was returned.

    Raises:
        ValueError: If lengths do not fit, a column is missing, or a reward is not a finite number.
        RuntimeError: If a reward function raises.
    """
    guards = Rewards(functions, weights).guards
    batch = reward_batch(prompts, completions, completion_ids, columns)
    judged = [guard.judge(batch) for guard in guards]
    for guard in guards:
        if guard.first:
            raise guard.error or RuntimeError(f"The reward function {guard.__name__} failed: {guard.first}.")
    table = reward_table(judged)
    return weighted_rewards(table, weights), table
