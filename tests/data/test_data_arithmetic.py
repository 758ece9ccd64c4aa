from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from tiny_grpo import module

from exact_answers.arithmetic import evaluate_expression
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.data import ArithmeticTasks, Row
from sparse_rl_lightning.data.arithmetic import is_validation_question
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.rewards import arithmetic_reward
from sparse_rl_lightning.testing import character_tokenizer

TASKS = ["sum", "product", "modulo", "reduction", "countdown", "calculator", "calculator_restated"]
SCRATCHPADS = ["sum", "product", "modulo", "countdown"]  # every step restates an equation


def rows(tasks: str | list[str] = "sum", **arguments: Any) -> list[Row]:
    return ArithmeticTasks(tasks, **({"num_train": 200, "num_val": 100} | arguments)).train_rows()


def warmup_alphabet(config: str) -> str:
    """That of the policy which a configuration warms up."""
    values = read_file(Path(__file__).resolve().parents[2] / "configs" / f"{config}.yaml")
    alphabet: str = values["model"]["init_args"]["policy"].get("init_args", {}).get("alphabet", ARITHMETIC_ALPHABET)
    return alphabet


def reward(row: Row, completion: str) -> float | None:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    return arithmetic_reward([row["prompt"]], [completion], [[]], **columns)[0]


@pytest.mark.parametrize("task", TASKS)
def test_questions_look_as_documented(task: str) -> None:
    pattern = {
        "sum": r"\d\d\+\d\d\+\d\d\+\d\d=",
        "product": r"\d\d\*\d\d\*\d\d\*\d\d=",
        "modulo": r"\(\d\d\+\d\d\+\d\d\+\d\d\)%\d\d=",
        "reduction": r"\(\d\d\+\d\d\+\d\d\+\d\d\)=",
        "countdown": r"\d\d,\d\d,\d\d,\d\d>\d+=",
        "calculator": r"\d\d([-+*]\d\d){3};",
        "calculator_restated": r"\d\d([-+*]\d\d){3};",
    }[task]
    for row in rows(task):
        assert re.fullmatch(pattern, row["prompt"])
        assert set(row) == {"prompt", "answer", "solution", "task"}
        assert row["task"] == task


@pytest.mark.parametrize("task", TASKS)
def test_answer_by_independent_arithmetic(task: str) -> None:
    for row in rows(task, num_terms=3):
        question = row["prompt"].removesuffix("=")
        if task == "countdown":
            numbers, _, target = question.partition(">")
            value = evaluate_expression(row["answer"])
            assert value[0] == int(target)
            assert sorted(value[1]) == sorted(int(number) for number in numbers.split(","))
        else:
            python = re.sub(r"0*(\d+)", r"\1", question).rstrip(";")
            if task.startswith("calculator"):  # as a pocket calculator does, from left to right
                python = re.sub(r"^(\d+[-+*]\d+)", r"(\1)", python)
            assert row["answer"] == str(eval(python))


@pytest.mark.parametrize("task", SCRATCHPADS)
def test_every_step_of_the_scratchpad_is_true_and_follows(task: str) -> None:
    for row in rows(task):
        work, _, answer = row["solution"].partition("#")
        steps = [step.split("=") for step in work.split(";")]
        assert answer == row["answer"]
        assert len(steps) == (4 if task == "modulo" else 3)
        for (left, right), following in zip(steps, [*steps[1:], None], strict=True):
            assert str(eval(left)) == right
            assert following is None or re.match(rf"{right}[-+*%]", following[0])


def test_every_step_of_a_reduction_says_all_that_is_needed_to_go_on() -> None:
    for row in rows("reduction"):
        work, _, answer = row["solution"].partition("#")
        question = [int(term) for term in row["prompt"].strip("()=").split("+")]
        terms = [question, *([int(term) for term in step.split("+")] for step in work.split(";"))]
        assert terms[-1] == [int(answer)]
        assert len(terms) == 4
        for before, after in itertools.pairwise(terms):
            assert after == [before[0] + before[1], *before[2:]]


def test_every_answer_that_restates_is_a_question_with_the_same_answer() -> None:
    for row in rows("calculator_restated", num_terms=6):
        questions = [row["prompt"], *re.findall(r"\?([^;]*;)", row["solution"])]
        assert questions[-1] == f"{row['answer']};"
        for before, after in itertools.pairwise(questions):
            first = re.match(r"(\d+[-+*]\d+)(.*)", before)
            call = re.sub(r"0*([0-9]+)", r"\1", first[1])
            assert after == f"{eval(call)}{first[2]}"


@pytest.mark.parametrize(("num_terms", "digits"), [(8, 2), (30, 1), (12, 3)])
def test_every_turn_of_a_calculation_follows_from_the_last_answer_and_the_prompt(num_terms: int, digits: int) -> None:
    grown = 0
    for row in rows("calculator", num_terms=num_terms, digits=digits):
        steps = [step.split("?") for step in row["solution"].partition("#")[0].split(";")]
        assert steps.pop() == [""]  # the last answer, too, ends with ;
        first = row["prompt"][:digits]
        operands = re.findall(r"[-+*]\d+", row["prompt"])
        assert [call for call, _ in steps] == [
            left + operand for left, operand in zip([first, *(result for _, result in steps)], operands, strict=False)
        ]
        for call, result in steps:
            assert int(result) == eval(re.sub(r"0*(\d+)", r"\1", call))
            assert 0 <= int(result) < 10 ** (digits + 2)
        grown += int(steps[-1][1]) >= 10**digits
        assert row["answer"] == steps[-1][1]
    assert grown > 100  # of 200: numbers do get large


def test_a_question_worked_out_by_hand() -> None:
    assert rows()[0] == {
        "prompt": "64+88+54+47=",
        "answer": "253",
        "solution": "64+88=152;152+54=206;206+47=253#253",
        "task": "sum",
    }


@pytest.mark.parametrize("task", TASKS)
def test_reward_of_the_solution_and_of_a_wrong_one(task: str) -> None:
    data = rows(task)
    assert {reward(row, row["solution"]) for row in data} == {1.0}
    assert {reward(row, row["solution"] + "1") for row in data} == {0.0}
    assert {reward(row, row["solution"].replace("#", "")) for row in data} == {0.0}


@pytest.mark.parametrize("task", TASKS)
def test_characters_lie_in_the_alphabet(task: str) -> None:
    alphabet = warmup_alphabet("warmup_tools" if task.startswith("calculator") else "warmup")
    text = "".join(row["prompt"] + row["solution"] for row in rows(task))
    assert set(text) <= set(alphabet)
    assert len(set(alphabet)) == len(alphabet)
    tokenizer = character_tokenizer(alphabet)
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_question_leaks_under_any_seed(seed: int) -> None:
    # two terms of two digits: a space so small that independent draws would collide by the hundred
    train = {row["prompt"] for row in rows(num_terms=2, num_train=5000, seed=seed)}
    for other in range(3):
        validation = ArithmeticTasks(num_terms=2, num_val=500, seed=other).val_rows()
        assert train.isdisjoint(row["prompt"] for row in validation)
        assert len({row["prompt"] for row in validation}) == 500
    assert len(train) == 5000


def test_split_is_fixed_for_all_time() -> None:
    questions = [f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)]
    chosen = [question for question in questions if is_validation_question(question)]
    assert chosen[:4] == ["00+00=", "00+06=", "00+14=", "00+19="]
    assert len(chosen) == pytest.approx(10_000 / 8, rel=0.1)


def test_seeds() -> None:
    assert rows(seed=1) == rows(seed=1)
    one, two = ({row["prompt"] for row in rows(seed=seed)} for seed in (1, 2))
    assert len(one & two) < 5
    assert ArithmeticTasks(seed=1).val_rows() == ArithmeticTasks(seed=1, num_train=7).val_rows()


def test_tasks_take_turns() -> None:
    assert Counter(row["task"] for row in rows(TASKS, num_train=280)) == dict.fromkeys(TASKS, 40)


@pytest.mark.parametrize("digits", [1, 3])
def test_digits_and_terms(digits: int) -> None:
    numbers = [re.findall(r"\d+", row["prompt"]) for row in rows(digits=digits, num_terms=5)]
    assert {len(number) for question in numbers for number in question} == {digits}
    assert {len(question) for question in numbers} == {5}


@pytest.mark.parametrize("command", ["validate", "test"])
def test_nothing_to_evaluate_on_is_an_error(command: str) -> None:
    """Asked for by name, silence would look like success; in training there need be none."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"ArithmeticTasks has no validation rows.*data\.num_val"):
        getattr(trainer, command)(module(), datamodule=ArithmeticTasks(num_train=20, num_val=0))
