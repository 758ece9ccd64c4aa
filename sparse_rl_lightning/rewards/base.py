"""Reward functions: their type, and calls whose failures name the function and the sample."""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.fingerprints import is_installed, is_own
from sparse_rl_lightning.text import printable, shown

_F = TypeVar("_F", bound=Callable[..., Any])
_ARGUMENTS = ("prompts", "completions", "completion_ids")
RESERVED = {*_ARGUMENTS, "self"}
"""Columns that the data may not have, because functions get such an argument already."""
PROMPT_TEXTS = "prompt_texts"
"""Argument of functions that name it: the prompts as the policy read them, rendered, with special tokens."""
_ASYNC = "The reward function {} is async. Write a plain one that calls asyncio.run() on it."


RewardFunction: TypeAlias = Callable[..., Sequence[float | None]]
"""Scores a batch of completions: ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``.

The arguments are lists with one entry per sample, passed by name: the prompt as the data module gave it, the
completion's text, its token ids, and every other column of the row (``answer``, ...). A function takes the columns it
needs by name and the rest as ``**columns``. None means that it does not apply to a sample; an error, NaN, an infinite
number or anything else that is no number means that it failed on it. The signature is TRL's, so its reward functions
fit. (This is a plain callable type, because the command line matches a protocol's signature exactly and would refuse
every function that names a column.)
"""

Returned: TypeAlias = float | str | None
"""A sample's reward; None where the function does not apply, a text where it failed: what it returned, no number."""


class RewardMistake(UserError):
    """A mistake in a reward function's code: it cannot be called, or its result cannot be read, for any sample."""


class RewardFailure(Exception):
    """A reward function gave no rewards for a batch; the text continues after its name: ``raised KeyError('x')``."""


def reward_batch(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> dict[str, Sequence[Any]]:
    """The arguments of reward functions for B samples, by name."""
    for name in filter(RESERVED.__contains__, columns):
        raise UserError(f"The data may not have a column named {name!r}: reward functions get it already.")
    named = dict(zip(_ARGUMENTS, (prompts, completions, completion_ids), strict=True)) | dict(columns)
    for name, values in named.items():
        if len(values) != len(completions):
            raise UserError(f"{name} has {len(values)} entries for {len(completions)} completions.")
    return named


def reward_table(per_function: Sequence[Sequence[float | None]]) -> Tensor:
    """The table (B, F) float32 of F lists of B rewards, NaN for None."""
    rows = [[math.nan if reward is None else reward for reward in rewards] for rewards in per_function]
    return torch.tensor(rows, dtype=torch.float32).T.contiguous()


def cell_text(value: object) -> str:
    """A cell of a file as text; a whole number that it holds as a float has no point.

    >>> cell_text(2.0), cell_text(2.5), cell_text("2.0")
    ('2', '2.5', '2.0')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


ROUNDING = 2**-24
"""Share of a sum's terms below which it may be what their rounding to 32 bits has left."""


def weighted_rewards(table: Tensor, weights: Sequence[float] | None) -> Tensor:
    """The sums (B,) over the functions of a table (B, F) times their weights, NaN if none of them applies."""
    factors = torch.ones(table.shape[1]) if weights is None else torch.tensor(weights, dtype=torch.float32)
    terms = table.nan_to_num().double() * factors
    # terms that cancel to nothing leave their rounding, which could be the only difference between samples
    sums = terms.sum(dim=1)
    rewards = sums.masked_fill(sums.abs() <= ROUNDING * terms.abs().sum(dim=1), 0.0).float()
    if not rewards.isfinite().all():
        raise UserError("A weighted sum of rewards is beyond float32's range: lower reward_weights, or the rewards.")
    counted = table[:, factors != 0] if factors.any() else table  # one of weight 0 is only logged
    return rewards.masked_fill(counted.isnan().all(dim=1), math.nan)


def attempt(function: RewardFunction, name: str, batch: Mapping[str, Sequence[Any]]) -> list[Returned]:
    """One function's rewards of a batch, read completely, whatever lazy object it returns.

    The function gets copies of the lists, so that its changes to them affect nobody else. What it changes of
    the process is put back after the call.

    Raises:
        RewardMistake: If the columns do not fit its signature, or it does not return a list with an entry per sample.
        RewardFailure: If it raises anything, even to end the program; KeyboardInterrupt passes through.
    """
    _check_columns(function, name, batch)
    try:
        with undisturbed():
            arguments = {argument: _copied(list(values)) for argument, values in batch.items()}
            return _read(name, function(**arguments), len(batch["completions"]))
    except RewardMistake:
        raise
    except KeyboardInterrupt:
        warnings.warn(f"KeyboardInterrupt in the reward function {name}.", stacklevel=2)
        raise
    except BaseException as error:
        raise RewardFailure(f"raised {shown(error)}") from error


def check_rewards(functions: Sequence[RewardFunction], columns: Iterable[str]) -> None:
    """Refuse reward functions that are async or do not fit the rows' columns, before anything is drawn."""
    columns = list(columns)
    for function, name in zip(functions, reward_names(functions), strict=True):
        arguments = [*_ARGUMENTS, *columns, *([PROMPT_TEXTS] if asks_for_prompt_texts(function, columns) else [])]
        call = getattr(function, "__call__", None)  # noqa: B004  # of a class
        checks = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_async(code) for is_async in checks for code in (function, call)):
            raise UserError(_ASYNC.format(name))
        _check_columns(function, name, arguments)


def asks_for_prompt_texts(function: RewardFunction, columns: Sequence[str]) -> bool:
    """Whether a function names the argument ``prompt_texts``, and the data have no column of that name."""
    return PROMPT_TEXTS not in columns and PROMPT_TEXTS in named_arguments(function)


def named_arguments(function: RewardFunction) -> list[str]:
    """The names of a function's arguments."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins need not have a signature
        return []


def counting(take: Callable[[], Mapping[str, float]]) -> Callable[[_F], _F]:
    """Decorate a reward function that counts things: ``take()`` returns the counts since its last call."""

    def mark(function: _F) -> _F:
        setattr(function, "take_counters", take)  # noqa: B010  # functions declare no attributes
        return function

    return mark


def reward_name(function: Any) -> str:
    """The name of a single reward function."""
    return str(getattr(function, "__name__", type(function).__name__))


def reward_names(functions: Sequence[Any]) -> list[str]:
    """Names in metrics, tables and errors, all different: the second function named ``f`` is ``f_2``."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for base in map(reward_name, functions):
        seen[base] += 1
        name = base if seen[base] == 1 else f"{base}_{seen[base]}"
        while name in names:  # another function's own name
            name += "_"
        names.append(name)
    return names


def _check_columns(function: RewardFunction, name: str, columns: Iterable[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins need not have one
        return
    try:
        signature.bind(**dict.fromkeys(columns))
    except TypeError as error:
        raise RewardMistake(
            f"The reward function {name}{signature} does not fit the data: {error}. It is called with "
            f"{', '.join(columns)}; give the data the missing column, and the function **columns for those it ignores."
        ) from error


def _copied(value: Any) -> Any:
    """A copy of lists, tuples and dictionaries; their other contents are shared."""
    if isinstance(value, list):
        return value[:] if value and type(value[0]) is int else [_copied(entry) for entry in value]  # token ids: many
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return tuple(_copied(entry) for entry in value) if type(value) is tuple else value


def _read(name: str, returned: Any, count: int) -> list[Returned]:
    """The result of a reward function as plain numbers."""
    if inspect.isawaitable(returned) or hasattr(returned, "__aiter__"):
        if inspect.iscoroutine(returned):
            returned.close()  # otherwise Python warns that it was never awaited
        raise RewardMistake(_ASYNC.format(name))
    try:
        values = None if isinstance(returned, (str, bytes, Mapping, Set)) else iter(returned)
    except TypeError:
        values = None
    if values is None:
        raise RewardMistake(
            f"The reward function {name} returned {shown(returned, 80)}, of type {type(returned).__name__}; it must "
            f"return a list with one number per sample, here {count}, in their order."
        )
    rewards = list(islice(values, count + 1))  # at most one more: it may be endless
    if len(rewards) != count:
        amount = f"more than {count}" if len(rewards) > count else len(rewards)
        raise RewardMistake(f"The reward function {name} returned {amount} rewards for {count} samples.")
    return [_finite(reward) for reward in rewards]


def _finite(reward: Any) -> Returned:
    if reward is None:
        return None
    try:
        value = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    return value if abs(value) <= torch.finfo(torch.float32).max else shown(reward, 80)


SIGNALS = sorted(signal.valid_signals())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back what a call has changed of the process, so that it can neither move the log nor end the run.

    That is the working directory, torch's gradient mode, default type, default device and number of threads, standard
    output and error, and in the main thread the handlers of signals and an alarm that was not set before. Of a call in
    a thread of its own the process has all but the gradient mode: wrap what waits for it.
    """
    dtype, device, num_threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    streams, handlers, had_alarm = (sys.stdout, sys.stderr), _handlers(), any(signal.getitimer(signal.ITIMER_REAL))
    folder = None
    with suppress(OSError):  # the folder was removed meanwhile
        folder = os.getcwd()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        if not had_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        sys.stdout, sys.stderr = streams
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with suppress(OSError):
            if folder is not None:
                os.chdir(folder)


def _handlers() -> dict[int, signal._HANDLER]:
    """The handlers of signals that this thread can set: none but in the main one, and none that C code has set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def users_line(error: BaseException) -> str:
    """Where a user's code raised an error, as `` (mine.py:12)``: its last line outside of libraries; empty if none."""
    lines = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    users = [(file, line) for file, line in lines if not (is_installed(file) or is_own(file))]
    return _place(*users[-1]) if users else ""


def users_function(function: Any) -> str:
    """Where a user's function begins, as `` (mine.py:12)``; empty if it has no lines."""
    code = getattr(function, "__code__", None)
    return "" if code is None else _place(Path(code.co_filename), code.co_firstlineno)


def _place(file: Path, line: int | None) -> str:
    return f" ({printable(file.name)}:{line})"
