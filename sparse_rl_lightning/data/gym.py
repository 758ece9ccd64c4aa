r"""ReasoningGym: tasks of reasoning-gym (arXiv 2505.24760) as prompts, and the reward that its own scorers give.

Some of its scorers run what a completion says as Python. Here an answer reaches them only if it consists of what the
task's own answers consist of, numbers, operators and brackets, and tasks that need more are refused.
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

from sparse_rl_lightning.data.base import PromptDataModule, Row
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.rewards.math import extract_boxed

PROMPT = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
RUNS = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
HARMLESS = re.compile(r"(?![\s\S]*\*\*)[\d\s+\-*/().]{1,200}|[\d\s\-.,\[\]'\"]{1,2000}")
"""Sums without powers, and lists of numbers."""


class ReasoningGym(PromptDataModule):
    """Generated tasks of the package reasoning-gym by their names, each as often as the others.

    Rows have the columns prompt, a chat, answer, and gym, from which ``reasoning_gym_reward`` makes the problem again.

    Args:
        tasks: Names of tasks, or settings of each by its name: ``{chain_sum: {min_terms: 3}}``.
        num_train: Training problems.
        num_val: Held-out problems, drawn with another seed.
        **blocks: Arguments of PromptDataModule.

    Raises:
        ValueError: If reasoning-gym is not installed, a task or setting is unknown, or the task's scorer would run what
            a policy writes.
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
            problem = _dataset(spec)[index]
            prompt = [{"role": "user", "content": PROMPT.format(problem["question"])}]
            rows.append({"prompt": prompt, "answer": str(problem["answer"]), "gym": json.dumps([spec, index])})
        return rows


def check_task(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a task that is unknown, or whose scorer runs answers that cannot be told to be harmless.

    Raises:
        ValueError: If so, or if reasoning-gym is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("ReasoningGym needs the package reasoning-gym: pip install 'sparse-rl-lightning[gym]'.")
    try:
        dataset = _dataset(json.dumps([name, {**settings, "seed": 0, "size": 8}]))
        answers = [str(problem["answer"]) for problem in dataset]
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"ReasoningGym: task {name!r} with {dict(settings)} is not to be had: {error}.") from error
    if _runs_answers(dataset) and not all(map(HARMLESS.fullmatch, answers)):
        raise UserError(
            f"ReasoningGym: the scorer of {name!r} would run what the policy writes as Python, and its answers, such "
            f"as {answers[0][:60]!r}, are not numbers and operators alone. Leave the task out."
        )


def reasoning_gym_reward(completions: Sequence[str], gym: Sequence[str], **_: Any) -> list[float]:
    r"""What the task's scorer gives the last ``\boxed{}``, from 0 to 1; 0 where it fails, or would run something else.

    Args:
        completions: Texts.
        gym: Problems, the column of :class:`ReasoningGym`.
    """
    return [_score(text, *json.loads(problem)) for text, problem in zip(completions, gym, strict=True)]


def _score(completion: str, spec: str, index: int) -> float:
    dataset, answer = _dataset(spec), extract_boxed(completion)
    if answer is None or (_runs_answers(dataset) and not HARMLESS.fullmatch(answer)):
        return 0.0
    try:
        return float(dataset.score_answer(answer, dataset[index]))
    except Exception:  # scorers raise whatever reading an answer raises
        return 0.0


def _runs_answers(dataset: Any) -> bool:
    return RUNS.search(inspect.getsource(type(dataset).score_answer)) is not None


@lru_cache(maxsize=256)
def _dataset(spec: str) -> Any:
    import reasoning_gym

    name, settings = json.loads(spec)
    return reasoning_gym.create_dataset(name, **settings)
