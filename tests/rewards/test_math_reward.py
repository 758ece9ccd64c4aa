"""The reward functions that pay for mathematical answers: golds, formats, tolerances, counters."""

from __future__ import annotations

import pytest
import torch

from sparse_rl_lightning.metrics import rollout_metrics
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.rewards import (
    MathReward,
    boxed_format_reward,
    boxed_math_reward,
    counting,
)
from sparse_rl_lightning.rewards.scoring import GuardedReward, Rewards


@pytest.mark.parametrize(
    ("completion", "paid", "is_formatted"),
    [
        (r"\boxed{6}", 6, True), (r"<think>\boxed{5}</think>\boxed{6}", 6, True), (r"\boxed{5}</think>", None, False),
        (r"\boxed{6}<think>maybe</think> ", 6, False), (r"\boxed{6}<think>\boxed{5}", 6, False),
        (r"<think>\boxed{5}", None, False), (r"<think>a</think>\boxed{6}<think>\boxed{5}</think>.", 6, False),
    ],
)  # fmt: skip
def test_boxes_in_thoughts_are_not_paid_unless_asked_for(completion: str, paid: int | None, is_formatted: bool) -> None:
    assert boxed_format_reward([], [completion], []) == [float(is_formatted)]
    for gold in (5, 6):
        assert boxed_math_reward([], [completion], [], answer=[gold]) == [float(paid == gold)]
    anywhere = MathReward(boxes_in_thoughts=True)
    assert anywhere([], [completion], [], answer=[5 if "5" in completion.rpartition("boxed")[2] else 6]) == [1.0]


def test_a_gold_that_cannot_be_checked_pays_nobody() -> None:
    for function in (MathReward(), boxed_math_reward):
        rewards = function([], [r"\boxed{5}", r"\boxed{5}", r"\boxed{}", r"\boxed{5}"], [], answer=["5", "6", "", "}{"])
        assert rewards == [1.0, 0.0, None, None]


def test_golds_may_be_numbers_of_a_file() -> None:
    for function in (MathReward(), boxed_math_reward):
        boxes = [r"\boxed{5}", r"\boxed{0}", r"\boxed{0.5}", r"\boxed{6}", r"\boxed{5}"]
        assert function([], boxes, [], answer=[5, 0, 0.5, 5, None]) == [1.0, 1.0, 1.0, 0.0, None]


def test_a_row_may_bring_its_tolerance() -> None:
    assert MathReward()([], [r"\boxed{41.8001}"] * 2, [], answer=["41.8"] * 2, tolerance=[1e-4, 0.0]) == [1.0, 0.0]


def test_counters_reach_the_metrics() -> None:
    reward = MathReward()
    GuardedReward(boxed_math_reward).take_counters()  # of other tests
    mask = torch.tensor([[False, True]] * 2)
    rollout = Rollout(torch.ones(2, 2, dtype=torch.long), torch.ones(2), mask, mask[:, 1], torch.zeros(2, 2))
    scored = ScoredRollout(rollout, [{"prompt": "p", "answer": "5"}], [r"\boxed{5}", "x"], {}, 0)
    total = Rewards([reward, boxed_math_reward], [1.0, 0.5])(scored)
    assert total.tolist() == [1.5, 0.0]
    metrics = rollout_metrics(scored)
    assert metrics["rewards/MathReward/no_box"] == 1
    assert metrics["rewards/boxed_math_reward/checks"] == 2
    assert set(reward.take_counters().values()) == {0}


def test_any_function_may_count() -> None:
    @counting(lambda: {"seen": 3})
    def counted(**_: object) -> list[float]:
        return []

    assert GuardedReward(counted).take_counters() == {"seen": 3}
