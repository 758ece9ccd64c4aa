r"""ReasoningGym: tasks of reasoning-gym (arXiv 2505.24760) as prompts, and the reward that its own scorers give.

Some of its scorers run what a completion says as Python, or read numbers of any size. Such tasks are refused.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from sparse_rl_lightning.data.base import PromptDataModule, Row
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.rewards.math import extract_boxed

PROMPT = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
UNSAFE = re.compile(r"\b(eval|exec|parse_expr|sympify|Fraction|Decimal)\(")
"""What a scorer must not do with an answer: the last two take hours for ``1e999999999``."""

UNSTABLE = {"word_ladder", "ransom_note", "isomorphic_strings"}
"""Tasks that draw from sets of texts, whose order Python's hash seed decides."""


class ReasoningGym(PromptDataModule):
    """Generated tasks of the package reasoning-gym by their names, each as often as the others.

    Rows have the columns prompt, a chat, answer, and gym, from which ``reasoning_gym_reward`` makes the problem again.

    Args:
        tasks: Names of tasks, or settings of each by its name: ``{chain_sum: {min_terms: 3}}``.
        num_train: Training problems.
        num_val: Held-out problems, drawn with another seed.
        **blocks: Arguments of PromptDataModule.

    Raises:
        ValueError: If reasoning-gym is not installed, a task or setting is unknown, the task's scorer would run what a
            policy writes, or its answers are too long for a box.
    """

    def __init__(
        self,
        tasks: Sequence[str] | Mapping[str, Mapping[str, Any]],
        num_train: int = 4000,
        num_val: int = 256,
        **blocks: Any,
    ) -> None:
        super().__init__(**blocks)
        check_number("num_train", num_train, least=1, owner="ReasoningGym")
        check_number("num_val", num_val, least=0, owner="ReasoningGym")
        self.tasks = {name: {} for name in tasks} if not isinstance(tasks, Mapping) else dict(tasks)
        if not self.tasks:
            raise UserError("ReasoningGym: tasks is empty. Name one or more, such as chain_sum.")
        self.num_train, self.num_val = num_train, num_val
        for name, settings in self.tasks.items():
            check_task(name, settings)

    def train_rows(self) -> list[Row]:
        """The training problems."""
        return self._rows(self.num_train, "train")

    def val_rows(self) -> list[Row]:
        """The held-out problems."""
        return self._rows(self.num_val, "held out")

    def _rows(self, count: int, use: str) -> list[Row]:
        drawn = {"seed": Random(f"{self.seed}/{use}").randrange(2**31), "size": count}
        specs = [json.dumps([name, {**settings, **drawn}]) for name, settings in self.tasks.items()]
        rows = []
        for number in range(count):
            spec, index = specs[number % len(specs)], number // len(specs)
            problem = _problem(spec, index)
            prompt = [{"role": "user", "content": PROMPT.format(problem["question"])}]
            rows.append({"prompt": prompt, "answer": str(problem["answer"]), "gym": json.dumps([spec, index])})
        return rows


def check_task(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a task that is unknown, whose scorer is no match for hostile answers, or whose answers cannot be paid.

    Raises:
        ValueError: If so, or if reasoning-gym is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("ReasoningGym needs the package reasoning-gym: pip install 'sparse-rl-lightning[gym]'.")
    if taken := sorted({"seed", "size"} & settings.keys()):
        raise UserError(
            f"ReasoningGym: {taken} of task {name!r} are num_train, num_val and seed of the data. Leave them out."
        )
    if name in UNSTABLE:
        raise UserError(
            f"ReasoningGym: the problems of {name!r} are others in every process, so no run could be resumed. Leave "
            "the task out."
        )
    spec = json.dumps([name, {**settings, "seed": 0, "size": 4}])
    try:
        answers = [str(_problem(spec, index)["answer"]).strip() for index in range(4)]
    except Exception as error:  # generators raise whatever a setting makes them raise
        raise UserError(f"ReasoningGym: task {name!r} with {dict(settings)} is not to be had: {error}.") from error
    if found := UNSAFE.search(inspect.getsource(type(_dataset(spec)).score_answer)):
        raise UserError(
            f"ReasoningGym: the scorer of {name!r} calls {found[1]}, which runs or reads whatever the policy writes. "
            "Leave the task out. Countdown puzzles are in ArithmeticTasks, too."
        )
    if paid := [text for text in ("nan", "?") if any(_score(rf"\boxed{{{text}}}", spec, i) == 1 for i in range(4))]:
        raise UserError(f"ReasoningGym: the scorer of {name!r} gives {paid[0]!r} the whole reward. Leave the task out.")
    if unpaid := [answer for answer in answers if extract_boxed(rf"\boxed{{{answer}}}") != answer]:
        raise UserError(
            f"ReasoningGym: answers of {name!r} are not read from a box, for example one of {len(unpaid[0])} "
            f"characters, {unpaid[0][:60]!r}. Leave the task out, or make it shorter."
        )


def reasoning_gym_reward(completions: Sequence[str], gym: Sequence[str], **_: Any) -> list[float]:
    r"""What the task's scorer gives the last ``\boxed{}``, from 0 to 1; 0 where it cannot read that.

    Args:
        completions: Texts.
        gym: Problems, the column of :class:`ReasoningGym`.
    """
    return [_score(text, *json.loads(problem)) for text, problem in zip(completions, gym, strict=True)]


def _score(completion: str, spec: str, index: int) -> float:
    answer, problem = extract_boxed(completion), _problem(spec, index)
    if answer is None:
        return 0.0
    try:
        return float(_dataset(spec).score_answer(answer, problem))
    except Exception:  # scorers raise whatever reading an answer raises
        return 0.0


@lru_cache(maxsize=4096)  # all samples of a prompt are scored one after the other, and some problems take a second
def _problem(spec: str, index: int) -> Any:
    state = np.random.get_state()  # which a generator seeds anew
    try:
        return _dataset(spec)[index]
    finally:
        np.random.set_state(state)


@lru_cache(maxsize=256)
def _dataset(spec: str) -> Any:
    import reasoning_gym

    name, settings = json.loads(spec)
    return reasoning_gym.create_dataset(name, **settings)
