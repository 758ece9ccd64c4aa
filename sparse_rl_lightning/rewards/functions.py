r"""Reward functions for configurations, given there by their import path.

Answers are paid 0 or 1, so that nothing is gained by hedging, padding or half an answer; only
:func:`worked_steps_reward` pays shares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from exact_answers import evaluate_expression
from exact_answers.thoughts import outside_thoughts
from sparse_rl_lightning.errors import check_choice
from sparse_rl_lightning.rewards.base import cell_text, counting
from sparse_rl_lightning.rewards.math import (
    TAIL,
    Convention,
    MathChecker,
    answer_kind,
    extract_boxed,
    find_last_box,
    tolerance_of,
)

_MAY_FOLLOW_BOX = " \t\r\n$.)]\\"
"""Characters allowed after the final box: the end of a formula and of a sentence."""


class MathReward:
    r"""1 if the last ``\boxed{}`` of the completion is the answer; None if the row has none that can be checked.

    A row may have a ``tolerance``: the largest relative difference of a number that is not an integer. Any failure of
    the check pays 0; the number of failures is logged under ``rewards/MathReward/``.

    Args:
        num_workers: Number of processes for the few answers that only math-verify can compare.
        timeout: Seconds such a comparison may take before its process is killed.
        answers: Convention, ``strict``, or ``lenient`` to also pay what papers' graders do, such as ``2+3`` for 5.
        boxes_in_thoughts: Whether a box in ``<think>`` counts too.
    """

    def __init__(
        self,
        num_workers: int = 1,
        timeout: float = 3.0,
        answers: Convention = "strict",
        boxes_in_thoughts: bool = False,
    ) -> None:
        self.checker = MathChecker(num_workers, timeout, boxes_in_thoughts)
        check_choice("answers", answers, Convention)
        self.answers = answers

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Any], answer: Sequence[str],
        tolerance: Sequence[float] | None = None, **_: Any,
    ) -> list[float | None]:  # fmt: skip
        """The rewards of a batch."""
        golds = [_text(gold) or "" for gold in answer]
        allowed = None if tolerance is None else [*map(tolerance_of, tolerance)]
        right = self.checker.check_by(self.answers, completions, golds, allowed)
        usable = {gold: bool(gold) and answer_kind(gold) != "uncheckable" for gold in set(golds)}
        return [float(paid) if usable[gold] else None for paid, gold in zip(right, golds, strict=True)]

    def take_counters(self) -> dict[str, int]:
        """The counts since the last call."""
        return self.checker.take_counters()


def _text(gold: object) -> str | None:
    """An answer, which files may hold as a number; None for a missing one, for which pandas has NaN among floats."""
    is_missing = gold is None or (isinstance(gold, float) and math.isnan(gold))
    return None if is_missing else cell_text(gold)


@lru_cache(maxsize=1)
def _default_reward() -> MathReward:
    return MathReward()


@counting(lambda: _default_reward().take_counters())
def boxed_math_reward(
    prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Any], answer: Sequence[str],
    tolerance: Sequence[float] | None = None, **_: Any,
) -> list[float | None]:  # fmt: skip
    """The reward of ``MathReward`` with its defaults."""
    return _default_reward()(prompts, completions, completion_ids, answer, tolerance)


def boxed_format_reward(
    prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Any], **_: Any
) -> list[float | None]:
    r"""1 if the completion has exactly one ``\boxed{}`` outside of its thoughts, not empty, and ends with it."""
    return [float(_ends_with_its_only_box(completion)) for completion in completions]


def arithmetic_reward(
    prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Any], answer: Sequence[str],
    task: Sequence[str] | None = None, **_: Any,
) -> list[float | None]:  # fmt: skip
    """1 if the text after the last ``#`` is the answer, None without an answer; for ``ArithmeticTasks``.

    In countdown any expression counts that reaches the target with the given numbers, each used at most once. Both
    are read from the row's own answer, which uses every given number.
    """
    tasks = task or [""] * len(completions)
    return [
        None if gold is None else float(_is_right(completion, gold, name == "countdown"))
        for completion, gold, name in zip(completions, map(_text, answer), tasks, strict=True)
    ]


def worked_steps_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Any],
    solution: Sequence[str | None],
    **_: Any,
) -> list[float | None]:
    """The share of right steps among the worked solution's or, where there are more, among those the completion takes.

    For ``ArithmeticTasks``. It pays for a right beginning, up to the first other step, and so distinguishes a lucky
    answer from a reasoned one. Skipping a step loses all later ones, and every step beyond the solution's number, a
    repeated one too, lowers what the right ones are paid: going on instead of answering costs.
    """
    return [
        None if worked is None else _share_of_steps(text, worked)
        for text, worked in zip(completions, solution, strict=True)
    ]


def _share_of_steps(completion: str, solution: str) -> float:
    wanted, begun = (text.partition("#")[0].split(";") for text in (solution, completion))
    right = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, begun, strict=False))
    taken = completion.count(";") + completion.count("#") + 1 - ("#" in completion)  # all but the last mark's answer
    return sum(1 for _ in right) / max(len(wanted), taken)


def _is_right(completion: str, gold: str, any_expression: bool) -> bool:
    _, mark, text = completion.rpartition("#")
    if not mark:
        return False
    return _reaches_target(text.strip(), gold) if any_expression else text.strip() == gold


def _reaches_target(text: str, gold: str) -> bool:
    tried, target = evaluate_expression(text), evaluate_expression(gold)
    if tried is None or target is None:
        return False
    return tried[0] == target[0] and Counter(tried[1]) <= Counter(target[1])


def _ends_with_its_only_box(completion: str) -> bool:
    *before, last = outside_thoughts(completion)
    if "".join([*before, last]).count("\\boxed") != 1 or extract_boxed(last) is None:
        return False
    tail = last[-TAIL:]
    span = find_last_box(tail)
    return span is not None and not tail[span[2] + 1 :].strip(_MAY_FOLLOW_BOX)
