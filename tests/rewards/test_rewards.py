from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

import exact_answers
from exact_answers.arithmetic import MAX_LENGTH, evaluate_expression
from exact_answers.expressions import MAX_DEPTH
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards import (
    MathReward,
    arithmetic_reward,
    boxed_format_reward,
    boxed_math_reward,
    check_rewards,
    compute_rewards,
    reward_name,
    worked_steps_reward,
)


def length(prompts: Any, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def only_short(prompts: Any, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float | None]:
    return [1.0 if len(completion) < 3 else None for completion in completions]


def fails_on_x(prompts: Any, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
    for completion in completions:
        if completion.count("x") == 1:
            raise KeyError(completion)
    return [0.0] * len(completions)


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: Sequence[str], bonus: Sequence[float], **_: Any) -> list[float]:
        return [self.factor * value for value in bonus]


def rewards_of(
    functions: list[Any], completions: list[str], weights: list[float] | None = None, **columns: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    n = len(completions)
    return compute_rewards(functions, weights, ["p"] * n, completions, [[0]] * n, columns)


def test_weighted_sum() -> None:
    total, table = rewards_of([length, Scaled(2.0)], ["a", "bbbb"], [0.5, -1.0], bonus=[3.0, 5.0])
    assert table.tolist() == [[1.0, 6.0], [4.0, 10.0]]
    assert total.tolist() == [0.5 - 6.0, 2.0 - 10.0]
    assert total.dtype == table.dtype == torch.float32
    assert rewards_of([length, Scaled(2.0)], ["a", "bbbb"], bonus=[3.0, 5.0])[0].tolist() == [7.0, 14.0]


def test_none_is_left_out_and_nothing_at_all_is_nan() -> None:
    total, table = rewards_of([length, only_short], ["a", "bbbb"], [1.0, 10.0])
    assert total.tolist() == [11.0, 4.0]
    assert table[0].tolist() == [1.0, 1.0]
    assert table[1, 0] == 4.0
    assert table[1, 1].isnan()
    alone, _ = rewards_of([only_short], ["a", "bbbb"])
    assert alone[0] == 1.0
    assert alone[1].isnan()


def test_reward_functions_see_every_column_by_name() -> None:
    seen: dict[str, Any] = {}

    def spy(**batch: Any) -> list[float]:
        seen.update(batch)
        return [0.0, 0.0]

    compute_rewards([spy], None, ["p", "q"], ["a", "b"], [[1], [2, 3]], {"answer": ("x", "y")})
    assert seen == {
        "prompts": ["p", "q"],
        "completions": ["a", "b"],
        "completion_ids": [[1], [2, 3]],
        "answer": ["x", "y"],
    }


def test_names() -> None:
    assert [reward_name(length), reward_name(Scaled(1.0))] == ["length", "Scaled"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, "high", [1.0], 10**400])
def test_a_reward_that_is_no_finite_number_names_function_and_sample(bad: Any) -> None:
    def broken(completions: list[str], **_: Any) -> list[Any]:
        return [0.0, bad]

    with pytest.raises(ValueError, match=r"broken returned .* on sample 1, completion 'bb'"):
        rewards_of([broken], ["aa", "bb"])


def test_wrong_number_of_rewards() -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [0.0]

    with pytest.raises(ValueError, match="short returned 1 rewards for 2 samples"):
        rewards_of([short], ["a", "b"])


def test_a_raising_function_names_the_sample_with_its_text_made_harmless() -> None:
    hostile = "x\x1b[2J\u202e\ud800\n" + "y" * 500
    with pytest.raises(RuntimeError) as caught:
        rewards_of([length, fails_on_x], ["a", "xx", hostile, "b"])
    message = str(caught.value)
    assert "fails_on_x raised KeyError" in message
    assert "sample 2" in message
    assert r"x\x1b[2J\u202e\ud800\ny" in message
    assert message.isprintable()
    assert len(message) < 500
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_fails_on_no_single_sample() -> None:
    def pairwise(completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise KeyError("together")
        return [0.0]

    with pytest.raises(RuntimeError, match=r"pairwise failed: it raised KeyError\('together'\) on all of them"):
        rewards_of([pairwise], ["a", "b"])


def test_functions_are_checked_before_anything_is_drawn() -> None:
    async def later(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    check_rewards([boxed_math_reward], ["answer"])
    with pytest.raises(ValueError, match=r"boxed_math_reward.*missing a required argument: 'answer'.*gold"):
        check_rewards([boxed_math_reward], ["gold"])
    with pytest.raises(ValueError, match=r"later is async.*asyncio\.run"):
        check_rewards([later], [])


def test_a_missing_column_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"boxed_math_reward.*missing a required argument: 'answer'.*completion_ids, gold"
    ):
        rewards_of([boxed_math_reward], ["a"], gold=["1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([length], [1.0, 2.0], ["p"], ["a"], [[0]], {}), "reward_weights has 2 numbers for 1"),
        (([], None, ["p"], ["a"], [[0]], {}), "at least one reward function"),
        (([length], None, ["p"], ["a", "b"], [[0]] * 2, {}), "prompts has 1 entries for 2"),
        (([length], None, ["p"], ["a"], [[0]], {"answer": []}), "answer has 0 entries for 1"),
        (([length], None, ["p"], ["a"], [[0]], {"completions": ["b"]}), "column named 'completions'"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_rewards(*arguments)


def test_boxed_math_reward() -> None:
    completions = [r"\boxed{1/2}", r"\boxed{2}", "0.5", r"\boxed{3}"]
    assert boxed_math_reward([], completions, [], answer=["0.5", "0.5", "0.5", ""], other=[]) == [1.0, 0.0, 0.0, None]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"thus $\boxed{5}$.", 1.0),
        ("thus \\[\\boxed{5}\\].\n", 1.0),
        (r"\boxed{5}", 1.0),
        (r"\boxed{5} as asked", 0.0),
        (r"\boxed{5} \boxed{5}", 0.0),
        (r"\boxed{\boxed{5}}", 0.0),
        (r"\boxed{} \boxed{5}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{5", 0.0),
        ("\\boxed{1}" + "x" * 10_000 + "\\boxed{5}", 0.0),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_boxed_format_reward(completion: str, reward: float) -> None:
    assert boxed_format_reward([], [completion], []) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "task", "reward"),
    [
        ("7+12=19;19+25=44;44+3=47#47", "47", "sum", 1.0),
        ("no work #47 \n", "47", "sum", 1.0),
        ("#46#47", "47", "sum", 1.0),
        ("#47#46", "47", "sum", 0.0),
        ("47", "47", "sum", 0.0),
        ("#047", "47", "sum", 0.0),
        ("#47 or 48", "47", "sum", 0.0),
        ("#", "47", "sum", 0.0),
        ("#٤٧", "47", "sum", 0.0),
        ("#(7+12)*3", "(7+12)*3", "countdown", 1.0),
        ("#3*(12+07)", "(7+12)*3", "countdown", 1.0),
        ("#12*7", "(7+12)*3+27", "countdown", 1.0),
        ("#57", "(7+12)*3", "countdown", 0.0),
        ("#7+12*3", "(7+12)*3", "countdown", 0.0),
        ("#12+12+3", "12+3+12", "countdown", 1.0),
        ("#12+12+3", "12+15", "countdown", 0.0),
        ("#7*12-12*7+3*19", "(7+12)*3", "countdown", 0.0),
        ("#__import__('os').getcwd()", "(7+12)*3", "countdown", 0.0),
        ("#9**9**9**9", "(7+12)*3", "countdown", 0.0),
        ("#" + "(" * 10_000, "(7+12)*3", "countdown", 0.0),
        ("#(7+12)*3", "(7+12)*3+0", "sum", 0.0),
    ],
)
def test_arithmetic_reward(completion: str, answer: str, task: str, reward: float) -> None:
    assert arithmetic_reward([], [completion], [], answer=[answer], task=[task], solution=[""]) == [reward]


def test_arithmetic_reward_without_tasks_is_exact() -> None:
    assert arithmetic_reward([], ["#1+1", "#2"], [], answer=["2", "2"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("1-2-3", -4, [1, 2, 3]),
        ("8/4/2", 1, [8, 4, 2]),
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("2*(3-(4+5))", -12, [2, 3, 4, 5]),
        ("1/3+1/6", Fraction(1, 2), [1, 3, 1, 6]),
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, 1, [1]),
    ],
)
def test_expression(text: str, value: Fraction, numbers: list[int]) -> None:
    assert evaluate_expression(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        *["", "+", "1+", "-1", "1 +1", "(1", "1)", "()", "1(2)", "2**3", "1//2", "1/0", "1/(2-2)", "a", "1e3", "1.5"],
        *["²", "٤", "1+" * (MAX_LENGTH // 2) + "1", "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)],
    ],
)
def test_no_expression(text: str) -> None:
    assert evaluate_expression(text) is None


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("7+12=19;19+25=44;44+3=47#47", 1.0),
        ("7+12=19;19+25=44;44+3=47", 1.0),  # the answer is another function's business
        ("7+12=19;19+25=45;45+3=48#48", 1 / 3),
        ("7+12=18;19+25=44;44+3=47#47", 0.0),  # a lucky answer
        ("7+12=19;7+12=19;7+12=19#47", 1 / 3),
        (
            "7+12=19;19+25=44;44+3=47;44+3=47#47",
            3 / 4,
        ),  # a step too many costs, right or not, with or without an answer
        ("7+12=19;19+25=44;44+3=47;47+7=54", 3 / 4),
        ("7+12=19;19+25=44;44+3=47;47+7=54;54+12=66;", 3 / 6),  # and every further one costs more
        ("7+12=19;19+25=44;44+3=47;", 3 / 4),
        ("7+12=19;19+25=44;44+3=47#47;47+3=50;50+1=51#47", 3 / 6),  # nor does it help to answer before
        ("7+12=19;19+25=44;44+3=47#47#1+1=2#2+2=4#47", 3 / 6),
        ("7+12=19;19+25=44;44+3=47#", 1.0),
        ("7+12=19;19+25=44#44+3=47#47", 2 / 3),
        ("", 0.0),
        ("#47", 0.0),
    ],
)
def test_worked_steps_are_paid_up_to_the_first_other_one(completion: str, share: float) -> None:
    solution = ["7+12=19;19+25=44;44+3=47#47"]
    assert worked_steps_reward(["07+12+25+03="], [completion], [[]], solution=solution) == [pytest.approx(share)]


@pytest.mark.parametrize(
    "wrong", [{"timeout": math.nan}, {"timeout": 0.0}, {"timeout": 1e10}, {"timeout": 1e39}, {"num_workers": 0}]
)
def test_the_checkers_refusals_are_for_users(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_workers must be at least 1 and timeout above 0 seconds, got"):
        exact_answers.MathChecker(**wrong)
    with pytest.raises(UserError, match=next(iter(wrong))):
        MathReward(**wrong)
