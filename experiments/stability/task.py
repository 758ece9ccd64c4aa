"""Sums and their rewards as they were when seeds 30 to 35 began: the library's own may change, this file may not.

It is ``ArithmeticTasks`` with ``tasks: sum``, ``arithmetic_reward`` and ``worked_steps_reward``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate, takewhile
from random import Random
from typing import Any

from sparse_rl_lightning.data import PromptDataModule


class Sums(PromptDataModule):
    """``07+12+25+03=`` with its steps ``7+12=19;19+25=44;44+3=47`` and ``47``; one question in eight is held out.

    Args:
        tasks: ``sum``.
        num_terms: Numbers per question.
        digits: Digits per number.
        num_train: Training questions.
        num_val: Held-out questions.
        **blocks: Arguments of PromptDataModule.
    """

    def __init__(
        self, tasks: str = "sum", num_terms: int = 4, digits: int = 2, num_train: int = 20_000, num_val: int = 512,
        **blocks: Any,
    ) -> None:  # fmt: skip
        super().__init__(**blocks)
        assert tasks == "sum"
        self.tasks, self.num_terms, self.digits = tasks, num_terms, digits
        self.num_train, self.num_val = num_train, num_val

    def train_rows(self) -> list[dict[str, Any]]:
        """The training questions."""
        return self._rows(self.num_train, is_held_out=False)

    def val_rows(self) -> list[dict[str, Any]]:
        """The held-out questions."""
        return self._rows(self.num_val, is_held_out=True)

    def _rows(self, count: int, is_held_out: bool) -> list[dict[str, Any]]:
        random, rows = Random(f"{self.seed}/{is_held_out}"), dict[str, dict[str, Any]]()
        while len(rows) < count:
            terms = [random.randrange(10**self.digits) for _ in range(self.num_terms)]
            totals = list(accumulate(terms))
            steps = [f"{a}+{b}={c}" for a, b, c in zip(totals, terms[1:], totals[1:], strict=False)]
            prompt = "+".join(f"{term:0{self.digits}d}" for term in terms) + "="
            if prompt not in rows and (hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0) == is_held_out:
                solution = f"{';'.join(steps)}#{totals[-1]}"
                rows[prompt] = {"prompt": prompt, "answer": str(totals[-1]), "solution": solution, "task": self.tasks}
        return list(rows.values())


def right_answer(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the text after the last ``#`` is the answer."""
    ends = [text.rpartition("#")[1:] for text in completions]
    return [float(mark == "#" and text.strip() == gold) for (mark, text), gold in zip(ends, answer, strict=True)]


def right_steps(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """The share of right steps up to the first other one, among the solution's or, where more are taken, those."""
    return [_share(text, worked) for text, worked in zip(completions, solution, strict=True)]


def _share(completion: str, solution: str) -> float:
    wanted, begun = (text.partition("#")[0].split(";") for text in (solution, completion))
    right = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, begun, strict=False))
    taken = completion.count(";") + completion.count("#") + 1 - ("#" in completion)
    return sum(1 for _ in right) / max(len(wanted), taken)
