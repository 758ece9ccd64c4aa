"""ReasoningGym: real tasks of reasoning-gym, paid by their scorers, which run nothing that a policy writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparse_rl_lightning.data.gym import ReasoningGym, reasoning_gym_reward
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards import compute_rewards

pytest.importorskip("reasoning_gym", reason="reasoning-gym is an extra (gym)")
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3},
    "countdown": {},
    "gsm_symbolic": {},
    "spiral_matrix": {},
}


def paid(answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return reasoning_gym_reward(
        [rf"Step by step: \boxed{{{answer}}}" for answer in answers], [row["gym"] for row in rows]
    )


def test_every_task_comes_as_often_and_its_own_answers_are_right() -> None:
    data = ReasoningGym(TASKS, num_train=12, num_val=4, seed=3)
    rows = data.train_rows()
    assert paid([row["answer"] for row in rows], rows) == [1.0] * 12
    assert max(paid(["17"] * 12, rows)) < 1
    assert [row["answer"] for row in rows] == [row["answer"] for row in ReasoningGym(TASKS, 12, 4, seed=3).train_rows()]
    others = (data.val_rows(), ReasoningGym(TASKS, 12, 4, seed=4).train_rows()[:4])
    assert all(rows[:4] != theirs for theirs in others)
    assert reasoning_gym_reward(["no box", r"\boxed{}"], [rows[0]["gym"]] * 2) == [0.0, 0.0]


def test_it_is_a_reward_as_any_other() -> None:
    rows = ReasoningGym(["chain_sum"], num_train=2, num_val=0, seed=1).train_rows()
    texts = [rf"\boxed{{{row['answer']}}}" for row in rows[:1]] + ["?"]
    columns = {name: [row[name] for row in rows] for name in ("answer", "gym")}
    prompts = [row["prompt"] for row in rows]
    total, _ = compute_rewards([reasoning_gym_reward], None, prompts, texts, [[1], [2]], columns)
    assert total.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("task", ["countdown", "spiral_matrix", "puzzle24", "number_sorting", "binary_matrix"])
def test_scorers_that_run_answers_are_given_numbers_and_operators_alone(task: str, tmp_path: Path) -> None:
    rows = ReasoningGym([task], num_train=1, num_val=0, seed=1).train_rows()
    assert paid([rows[0]["answer"]], rows) == [1.0]
    mark = tmp_path / "ran"
    for answer in (f"open('{mark}', 'w')", f"[open('{mark}', 'w')]", "9**9**9**9", "1\n+9**9**9**9", "'1'*9999999999"):
        assert paid([answer], rows) == [0.0]
    assert not mark.exists()


@pytest.mark.parametrize("task", ["n_queens", "simple_integration", "polynomial_multiplication", "string_insertion"])
def test_a_task_whose_answers_need_more_is_refused(task: str) -> None:
    with pytest.raises(UserError, match=f"the scorer of '{task}' would run what the policy writes as Python"):
        ReasoningGym([task])


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["nothing"], "task 'nothing' with {} is not to be had: Dataset 'nothing' not registered"),
        ({"chain_sum": {"terms": 3}}, "unexpected keyword argument 'terms'"),
        ({"chain_sum": {"min_terms": 0}}, "min_terms must be positive"),
        ([], "tasks is empty"),
    ],
)
def test_what_there_is_not_is_refused_by_name(tasks: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ReasoningGym(tasks)
