"""What a reward function is, and calling several of them so that every failure names its function and sample."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparse_rl_lightning.ranges import check_number

_F = TypeVar("_F", bound=Callable[..., Any])
_ARGUMENTS = ("prompts", "completions", "completion_ids")


RewardFunction: TypeAlias = Callable[..., Sequence[float | None]]
"""Scores a batch of completions: ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``.

The arguments are lists with one entry per sample, passed by name: the prompt as the data module gave it, the
completion's text, its token ids, and every other column of the row (``answer``, ...). A function takes the columns it
needs by name and the rest as ``**columns``. None means that it does not apply to a sample. The signature is TRL's, so
its reward functions fit. (A plain callable type, because the command line holds a protocol to the letter of its
signature and would refuse every function that names a column.)
"""


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
        functions: F reward functions.
        weights: F factors, or None for ones.
        prompts: B prompts.
        completions: B texts.
        completion_ids: B lists of token ids.
        columns: Further columns of the rows, B entries each.

    Returns:
        Rewards (B,) and the unweighted reward of each function (B, F), both float32, NaN where None was returned.

    Raises:
        ValueError: If lengths do not fit, a column is missing, or a reward is no finite number.
        RuntimeError: If a reward function raises.
    """
    if weights is not None and len(weights) != len(functions):
        raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions.")
    for place, weight in enumerate(weights or ()):
        check_number(f"reward_weights[{place}]", weight)
    if not functions:
        raise ValueError("At least one reward function is needed.")
    batch = _batch(prompts, completions, completion_ids, columns)
    per_function = torch.stack([_call(function, batch) for function in functions], dim=1)
    factors = torch.ones(len(functions)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    applies = ~per_function.isnan()
    rewards = (per_function.nan_to_num() * factors).sum(dim=1)
    return rewards.masked_fill(~applies.any(dim=1), math.nan), per_function


def check_rewards(functions: Sequence[RewardFunction], columns: Iterable[str]) -> None:
    """Refuse reward functions that cannot be called, before anything is drawn.

    Args:
        functions: Reward functions.
        columns: Names of the rows' columns besides the prompt.

    Raises:
        ValueError: If one is async, or its signature does not fit the columns.
    """
    names = [*_ARGUMENTS, *columns]
    for function in functions:
        name = reward_name(function)
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"The reward function {name} is async. Write a plain one that calls asyncio.run() on it.")
        _check_columns(function, names)


def counting(take: Callable[[], Mapping[str, float]]) -> Callable[[_F], _F]:
    """Decorator of a reward function that counts things: ``take()`` gives the counts since its last call."""

    def mark(function: _F) -> _F:
        setattr(function, "take_counters", take)  # noqa: B010  # a function declares no attributes
        return function

    return mark


def reward_counters(functions: Sequence[RewardFunction]) -> dict[str, float]:
    """What reward functions have counted since the last call, as ``{function}/{counter}``.

    Args:
        functions: Reward functions; those with a method ``take_counters() -> dict[str, float]`` count.
    """
    return {
        f"{reward_name(function)}/{name}": float(value)
        for function in functions
        if hasattr(function, "take_counters")
        for name, value in function.take_counters().items()
    }


def reward_name(function: RewardFunction) -> str:
    """The name of a reward function in metrics, tables and errors."""
    return str(getattr(function, "__name__", type(function).__name__))


def _batch(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> dict[str, list[Any]]:
    reserved = [name for name in (*_ARGUMENTS, "self") if name in columns]
    if reserved:
        raise ValueError(f"The data may not have a column named {reserved[0]!r}: reward functions get it already.")
    named = dict(zip(_ARGUMENTS, (prompts, completions, completion_ids), strict=True)) | dict(columns)
    for name, values in named.items():
        if len(values) != len(completions):
            raise ValueError(f"{name} has {len(values)} entries for {len(completions)} completions.")
    return {name: list(values) for name, values in named.items()}


def _call(function: RewardFunction, batch: dict[str, list[Any]]) -> Tensor:
    """One function's rewards (B,), NaN for None."""
    name, completions = reward_name(function), batch["completions"]
    _check_columns(function, batch)
    try:
        rewards = list(function(**batch))
    except Exception as error:
        sample = _first_failure(function, batch)
        where = "the batch as a whole" if sample is None else _describe(sample, completions[sample])
        raise RuntimeError(f"The reward function {name} raised {ascii(error)[:200]} on {where}.") from error
    if len(rewards) != len(completions):
        raise ValueError(f"The reward function {name} returned {len(rewards)} rewards for {len(completions)} samples.")
    return torch.tensor(
        [_finite(name, sample, completions[sample], reward) for sample, reward in enumerate(rewards)],
        dtype=torch.float32,
    )


def _check_columns(function: RewardFunction, names: Iterable[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins need not have one
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"The reward function {reward_name(function)}{signature} does not fit the data: {error}. It is called with "
            f"{', '.join(names)}; give the data the missing column, and the function **columns for those it ignores."
        ) from error


def _first_failure(function: RewardFunction, batch: dict[str, list[Any]]) -> int | None:
    """The first sample on which the function fails alone."""
    for sample in range(len(batch["completions"])):
        try:
            function(**{name: [values[sample]] for name, values in batch.items()})
        except Exception:
            return sample
    return None


def _finite(name: str, sample: int, completion: str, reward: Any) -> float:
    if reward is None:
        return math.nan
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"The reward function {name} returned {ascii(reward)[:80]} for {_describe(sample, completion)}; a reward "
            "is a finite number, or None where the function does not apply."
        )
    return value


def _describe(sample: int, completion: str) -> str:
    """Which sample: its index and its text, shortened, nothing in it able to steer a terminal or break a log."""
    text = completion if len(completion) <= 120 else f"{completion[:60]} [...] {completion[-60:]}"
    return f"sample {sample}, completion {text!a}"
