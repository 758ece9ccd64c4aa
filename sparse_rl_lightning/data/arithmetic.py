"""Verifiable arithmetic with a worked scratchpad: learnable in minutes, no file and no network needed.

========== ================== ============================ ============
task       prompt             scratchpad                   answer
========== ================== ============================ ============
sum        ``07+12+25+03=``   ``7+12=19;19+25=44;44+3=47`` ``47``
product    ``07*12*03=``      ``7*12=84;84*3=252``         ``252``
modulo     ``(07+12+25)%09=`` ``7+12=19;19+25=44;44%9=8``  ``8``
reduction  ``(07+12+25+03)=`` ``19+25+3;44+3;47``          ``47``
countdown  ``12,03,07>57=``   ``7+12=19;19*3=57``          ``(7+12)*3``
calculator ``07+12*03;``      ``07+12?19;19*03?57;``       ``57``
========== ================== ============================ ============

A solution is the scratchpad, ``#`` and the answer. In countdown the numbers before ``>`` must reach the target behind
it; the answer is one expression that uses all of them, and any other that reaches the target is equally right.
In a sum every step takes a number from the prompt. A reduction is the same sum, but every step restates what is left
of it, so nothing older than the last step is needed: a cache that forgets costs the sum more than the reduction.

A calculator question is a conversation with :class:`~sparse_rl_lightning.environments.Calculator`, worked out from left
to right. Its solution is the whole transcript: the policy's turns end with ``?``, what it is given ends with ``;``.
Nothing has to be calculated, but every turn copies a number from the last answer and another from the prompt, ever
farther away. With ``calculator_restated`` the calculator answers by all that is left to do (``07+12?19*03;19*03?57;``),
so nothing older than its last answer is needed. No result is negative or has more than two digits more than the terms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from sparse_rl_lightning.data.base import PromptDataModule, Row
from sparse_rl_lightning.environments.calculator import OPERATORS
from sparse_rl_lightning.errors import UserError, check_number

_VALIDATION_SHARE = 8  # one question in eight belongs to validation
_MAX_MISSES = 10_000  # draws in a row without a new question after which the questions count as used up


class ArithmeticTasks(PromptDataModule):
    """Sums, products, remainders, countdown puzzles and long calculations from seeded generators, each question once.

    A hash of the question alone decides whether it is for training or validation, so no question is ever in both,
    whatever the seeds. Rows have the columns prompt, answer, solution and task. ``seed`` is the seed of the questions
    too, not only of their order.

    Args:
        tasks: Any of sum, product, modulo, reduction, countdown, calculator, calculator_restated; several take turns.
        num_terms: Numbers per question.
        digits: Digits per number; questions show leading zeros.
        num_train: Training questions.
        num_val: Validation questions.
        **blocks: Arguments of PromptDataModule.

    Raises:
        ValueError: If a task is unknown, a number is out of range, or there are too few different questions.
    """

    def __init__(
        self,
        tasks: str | Sequence[str] = "sum",
        num_terms: int = 4,
        digits: int = 2,
        num_train: int = 20_000,
        num_val: int = 512,
        **blocks: Any,
    ) -> None:
        super().__init__(**blocks)
        self.tasks = [tasks] if isinstance(tasks, str) else list(tasks)
        unknown = [task for task in self.tasks if task not in _GENERATORS]
        if unknown or not self.tasks:
            raise UserError(f"tasks must be among {', '.join(_GENERATORS)}, got tasks={tasks!r}.")
        for name, value, least in (
            ("num_terms", num_terms, 2), ("digits", digits, 1), ("num_train", num_train, 1), ("num_val", num_val, 0),
        ):  # fmt: skip
            check_number(name, value, least=least, owner="ArithmeticTasks")
        self.num_terms = num_terms
        self.digits = digits
        self.num_train = num_train
        self.num_val = num_val

    def train_rows(self) -> list[Row]:
        """``num_train`` different questions of the training part."""
        return self._generate(self.num_train, validation=False)

    def val_rows(self) -> list[Row]:
        """``num_val`` different questions of the validation part."""
        return self._generate(self.num_val, validation=True)

    def _generate(self, count: int, validation: bool) -> list[Row]:
        random = Random(f"{self.seed}/{validation}")
        rows: dict[str, Row] = {}
        misses = 0
        while len(rows) < count:
            task = self.tasks[len(rows) % len(self.tasks)]
            prompt, steps, answer = _GENERATORS[task](random, self.num_terms, self.digits)
            if prompt not in rows and is_validation_question(prompt) == validation:
                solution = f"{';'.join(steps)}#{answer}"
                rows[prompt] = {"prompt": prompt, "answer": answer, "solution": solution, "task": task}
                misses = 0
            elif (misses := misses + 1) == _MAX_MISSES:
                name = "num_val" if validation else "num_train"
                raise UserError(
                    f"ArithmeticTasks: {name}={count} questions were asked for, but {task} with num_terms="
                    f"{self.num_terms}, digits={self.digits} has hardly more than the {len(rows)} found for this "
                    f"part. Lower {name}, or raise num_terms or digits."
                )
        return list(rows.values())


def is_validation_question(prompt: str) -> bool:
    """Whether a question belongs to validation: decided by its SHA-256 alone, true for one in eight."""
    return hashlib.sha256(prompt.encode()).digest()[0] % _VALIDATION_SHARE == 0


def _terms(random: Random, num_terms: int, digits: int) -> list[int]:
    return [random.randrange(10**digits) for _ in range(num_terms)]


def _chain(symbols: Sequence[str], terms: Sequence[int]) -> tuple[list[str], int]:
    """The steps of working from left to right, and the result."""
    value, steps = terms[0], []
    for symbol, term in zip(symbols, terms[1:], strict=True):
        result = OPERATORS[symbol](value, term)
        steps.append(f"{value}{symbol}{term}={result}")
        value = result
    return steps, value


def _sum(random: Random, num_terms: int, digits: int, symbol: str = "+") -> tuple[str, list[str], str]:
    terms = _terms(random, num_terms, digits)
    steps, value = _chain(symbol * (num_terms - 1), terms)
    return symbol.join(f"{term:0{digits}d}" for term in terms) + "=", steps, str(value)


def _modulo(random: Random, num_terms: int, digits: int) -> tuple[str, list[str], str]:
    question, steps, total = _sum(random, num_terms, digits)
    modulus = random.randrange(2, 10**digits)
    answer = str(int(total) % modulus)
    return f"({question[:-1]})%{modulus:0{digits}d}=", [*steps, f"{total}%{modulus}={answer}"], answer


def _reduction(random: Random, num_terms: int, digits: int) -> tuple[str, list[str], str]:
    terms = _terms(random, num_terms, digits)
    steps = ["+".join(map(str, (sum(terms[:used]), *terms[used:]))) for used in range(2, num_terms + 1)]
    return f"({'+'.join(f'{term:0{digits}d}' for term in terms)})=", steps, steps[-1]


def _countdown(random: Random, num_terms: int, digits: int) -> tuple[str, list[str], str]:
    terms = _terms(random, num_terms, digits)
    symbols: list[str] = []
    value, expression = terms[0], str(terms[0])
    for term in terms[1:]:
        symbol = random.choice("+*-" if term <= value else "+*")  # no negative numbers on the way
        if symbol == "*" and any(s in "+-" for s in symbols):
            expression = f"({expression})"
        value, expression = OPERATORS[symbol](value, term), f"{expression}{symbol}{term}"
        symbols.append(symbol)
    steps, _ = _chain(symbols, terms)
    random.shuffle(terms)
    return ",".join(f"{term:0{digits}d}" for term in terms) + f">{value}=", steps, expression


def _calculator(random: Random, num_terms: int, digits: int, restates: bool = False) -> tuple[str, list[str], str]:
    terms = _terms(random, num_terms, digits)
    value, written = terms[0], f"{terms[0]:0{digits}d}"
    prompt, operands, calls = written, list[str](), list[tuple[str, int]]()
    for term in terms[1:]:
        results = {symbol: work(value, term) for symbol, work in OPERATORS.items()}
        symbol = random.choice([symbol for symbol, result in results.items() if 0 <= result < 10 ** (digits + 2)])
        value, operand = results[symbol], f"{symbol}{term:0{digits}d}"
        calls.append((f"{written}{operand}", value))
        operands.append(operand)
        prompt, written = prompt + operand, str(value)
    left = ["".join(operands[done:]) if restates else "" for done in range(1, num_terms)]
    steps = [f"{call}?{result}{rest}" for (call, result), rest in zip(calls, left, strict=True)]
    return prompt + ";", [*steps, ""], str(value)  # the last answer of the calculator ends as the others


_GENERATORS: dict[str, Callable[[Random, int, int], tuple[str, list[str], str]]] = {
    "sum": _sum,
    "product": partial(_sum, symbol="*"),
    "modulo": _modulo,
    "reduction": _reduction,
    "countdown": _countdown,
    "calculator": _calculator,
    "calculator_restated": partial(_calculator, restates=True),
}
