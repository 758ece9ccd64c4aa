"""The calculator: what it answers, what it pays, and that hostile turns cost nothing."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from exact_answers.arithmetic import evaluate_expression
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.environments import Calculator
from sparse_rl_lightning.errors import UserError

ROW = {"prompt": "07+12*03;", "answer": "57", "solution": "07+12?19;19*03?57;#57", "task": "calculator"}


def begun(row: dict[str, Any] = ROW, **arguments: Any) -> Calculator:
    calculator = Calculator(**arguments)
    assert calculator.reset(row) is None  # type: ignore[func-returns-value]  # the row's own prompt
    return calculator


def played(turns: list[str], row: dict[str, Any] = ROW, **arguments: Any) -> tuple[list[str | None], list[float]]:
    calculator = begun(row, **arguments)
    answered = [calculator.step(turn) for turn in turns]
    return [observation for observation, _ in answered], [reward for _, reward in answered]


def test_a_conversation_by_hand() -> None:
    assert played(["07+12?", "19*03?", "#57"], step_share=0.5) == (["19;", "57;", None], [0.25, 0.25, 1.0])
    assert played(["07+12?", "19*03?", "#57"]) == (["19;", "57;", None], [0.0, 0.0, 1.0])


def test_a_conversation_that_restates_by_hand() -> None:
    row = ROW | {"solution": "07+12?19*03;19*03?57;#57"}
    turns = ["07+03?", "07+12?", "19*03?", "#57"]
    assert played(turns, row, restates=True)[0] == ["10;", "19*03;", "57;", None]


@pytest.mark.parametrize("restates", [False, True])
@pytest.mark.parametrize("num_terms", [2, 8, 20])
def test_every_solution_of_the_task_is_a_conversation_with_it(num_terms: int, restates: bool) -> None:
    task = "calculator_restated" if restates else "calculator"
    data = ArithmeticTasks(task, num_terms=num_terms, num_train=100, num_val=50)
    for row in [*data.train_rows(), *data.val_rows()]:
        calculator, told, total = begun(row, step_share=0.5, restates=restates), "", 0.0
        turns = re.findall(r"[^;?]+\?|#\d+$", row["solution"])
        for turn in turns:
            observation, reward = calculator.step(turn)
            told, total = told + turn + (observation or ""), total + reward
        assert observation is None
        assert told == row["solution"]
        assert len(turns) == num_terms
        assert total == pytest.approx(1.5)


def test_values_are_those_of_an_outside_implementation() -> None:
    random = Random(0)
    for _ in range(500):
        left, right = (random.randrange(10 ** random.randrange(1, 7)) for _ in range(2))
        for symbol in "+-*":
            found = evaluate_expression(f"{left}{symbol}{right}")
            value, negative = found[0], f"-{left}{symbol}{right}"
            assert begun().step(f"{left}{symbol}{right}?") == (f"{value};", 0.0)
            assert begun().step(f"{left:07d}{symbol}{right:07d}") == (f"{value};", 0.0)
            other = Fraction(-left) + {"+": right, "-": -right}.get(symbol, 0) if symbol != "*" else -value
            assert begun().step(negative) == (f"{other};", 0.0)


@pytest.mark.parametrize("answer", ["", "57 ", "057", "5 7", "58", "-57", "5", "57.0", "57#57", "\u0665\u0667"])
def test_only_the_answer_itself_is_paid(answer: str) -> None:
    expected = 1.0 if answer == "57 " else 0.0  # space around a turn does not matter
    assert begun().step(f"#{answer}") == (None, expected)


NOT_CALLS = [
    "", "?", "7", "7+", "+7", "7+12??", "7+12=19", "7+12;", "7+12?19;19*3", "7/2", "7**2", "9**9**9", "(7+12)", "7+-12",
    "7 + 12", "--7+1", "7+12#57", "7.5+1", "1e9+1", "\u0667+\u0661", "7²+1", "0x7+1", "7_0+1", "__import__('os')",
    "\x00", "7+12\n3", "<eos>", "!;", "1" * 19 + "+1", "9" * 10**7, "9" * 10**7 + "*" + "9" * 10**7,
    "0" * 10**7 + "7+12", "#" + "5" * 10**7,
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_CALLS, ids=lambda text: repr(text[:12]))
def test_what_is_no_call_is_said_so_and_costs_nothing(text: str) -> None:
    calculator = begun(step_share=1.0)
    start = time.process_time()
    for _ in range(20):
        assert calculator.step(text) == ("!;", pytest.approx(0.0))
    assert time.process_time() - start < 0.1
    assert calculator.step("07+12?")[0] == "19;"  # it goes on


def test_the_display_bounds_numbers() -> None:
    most = "9" * 18
    assert begun(max_digits=18).step(f"{most}-1") == (f"{10**18 - 2};", 0.0)
    assert begun(max_digits=18).step(f"{most}*{most}") == ("!;", 0.0)
    assert begun(max_digits=3).step("999+1") == ("!;", 0.0)
    assert begun(max_digits=3).step("-999-1") == ("!;", 0.0)
    assert begun(max_digits=3).step("999+0") == ("999;", 0.0)
    assert begun(max_digits=3).step("1000-999") == ("!;", 0.0)
    longest = max(len(begun().step(f"{'9' * a}*{'9' * b}")[0] or "") for a in range(1, 19) for b in range(1, 19))
    assert longest <= 13


# ---------------------------------------------------------------- what steps are paid


def test_a_wrong_call_is_answered_and_can_be_made_good() -> None:
    turns = ["07+03?", "12+07?", "nonsense", "07+12?", "19*03?", "#57"]
    observations, rewards = played(turns, step_share=0.6)
    assert observations == ["10;", "19;", "!;", "19;", "57;", None]
    # 1 of 2 calls right after 4 calls, 2 of 2 after 5: 0.6 * 1/4, then 0.6 * 2/5
    assert rewards == pytest.approx([0, 0, 0, 0.6 / 4, 0.6 * (2 / 5 - 1 / 4), 1.0])


def test_no_further_call_is_ever_paid_more_than_its_step() -> None:
    """Random players: what is paid never exceeds the share, and a call that is not the next step never pays."""
    random = Random(1)
    calls = ["07+12?", "19*03?", "7+12", "19*3", "12+7?", "0+0?", "x"]
    for _ in range(300):
        calculator, total = begun(step_share=0.5), 0.0
        for _ in range(random.randrange(1, 12)):
            before = calculator.num_right
            _, reward = calculator.step(random.choice(calls))
            total += reward
            assert reward <= 0 or calculator.num_right == before + 1
            assert -1e-12 <= total <= 0.5 * calculator.num_right / 2 + 1e-12


def test_going_on_after_the_work_costs() -> None:
    _, rewards = played(["07+12?", "19*03?", "19*03?", "19*03?"], step_share=1.0)
    assert rewards[:2] == [0.5, 0.5]
    assert all(reward < 0 for reward in rewards[2:])


def test_an_answer_without_work_is_paid_as_the_answer_alone() -> None:
    assert played(["#57"], step_share=0.5) == ([None], [1.0])


# ---------------------------------------------------------------- arguments


def test_a_second_conversation_starts_anew() -> None:
    calculator = begun(step_share=0.5)
    calculator.step("07+12?")
    calculator.reset({"answer": "3", "solution": "1+2?3;#3"})
    assert [calculator.step("1+2?"), calculator.step("#3")] == [("3;", 0.5), (None, 1.0)]


def test_instances_are_cheap() -> None:
    start = time.process_time()
    for _ in range(2000):
        begun(step_share=0.5)
    assert time.process_time() - start < 1


def test_rows_without_what_is_needed() -> None:
    begun({"answer": 57})
    with pytest.raises(UserError, match=r"needs the columns \['answer'\], but a row has \['prompt'\]"):
        begun({"prompt": "1+1;"})
    with pytest.raises(UserError, match="solution"):
        begun({"answer": 57}, step_share=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_share": -0.1}, "Calculator: step_share must be at least 0"),
        ({"step_share": float("nan")}, "step_share"),
        ({"max_digits": 0}, "max_digits"),
        ({"max_digits": 19}, "at most 18"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Calculator(**arguments)
