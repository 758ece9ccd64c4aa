"""ReasoningGym: real tasks of reasoning-gym, paid by their scorers, of which those that run answers are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse_rl_lightning.data.gym import ReasoningGym, reasoning_gym_reward
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards import compute_rewards

pytest.importorskip("reasoning_gym", reason="reasoning-gym is an extra (gym)")
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3},
    "products": {},
    "gsm_symbolic": {},
    "base_conversion": {},
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


@pytest.mark.parametrize(
    ("task", "call"),
    [("countdown", "parse_expr"), ("spiral_matrix", "eval"), ("n_queens", "eval"), ("simple_integration", "parse_expr"),
     ("coin_flip", "Fraction")],
)  # fmt: skip
def test_a_task_whose_scorer_runs_answers_is_refused(task: str, call: str) -> None:
    with pytest.raises(UserError, match=f"the scorer of '{task}' calls {call}, which runs or reads whatever"):
        ReasoningGym([task])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("complex_arithmetic", "gives 'nan' the whole"),
        ("game_of_life_halting", "the whole reward"),
        ("word_ladder", "in every"),
    ],
)  # fmt: skip
def test_a_task_that_pays_for_anything_or_is_never_the_same_is_refused(task: str, said: str) -> None:
    with pytest.raises(UserError, match=f"'{task}' .*{said}"):
        ReasoningGym([task])


def test_a_task_whose_answers_are_longer_than_a_box_is_refused() -> None:
    with pytest.raises(UserError, match=r"answers of 'tower_of_hanoi' are not read from a box, .* \d+ characters"):
        ReasoningGym({"tower_of_hanoi": {"min_disks": 6, "max_disks": 6}})


def test_a_generator_that_seeds_numpy_leaves_its_state() -> None:
    np.random.seed(1)
    want = np.random.rand()
    np.random.seed(1)
    ReasoningGym(["pool_matrix"], num_train=2, num_val=0, seed=1).train_rows()
    assert np.random.rand() == want


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["nothing"], "task 'nothing' with {} is not to be had: Dataset 'nothing' not registered"),
        ({"chain_sum": {"terms": 3}}, "unexpected keyword argument 'terms'"),
        ({"chain_sum": {"min_terms": 0}}, "min_terms must be positive"),
        ({"chain_sum": {"seed": 3}}, r"\['seed'\] of task 'chain_sum' are num_train, num_val and seed of the data"),
        (
            {"composite": {"datasets": [{"name": "chain_sum", "weight": 1}]}},
            "task 'composite' with .* not to be had",
        ),
        ([], "tasks is empty"),
    ],
)
def test_what_there_is_not_is_refused_by_name(tasks: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ReasoningGym(tasks)
