"""A rollout served as micro-batches: which sequences, in which order, and what their losses are divided by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock
from sparse_rl_lightning.learner.loss import Denominators, GRPOLoss
from sparse_rl_lightning.records import Rollout

PLAN = BlockPlan(prompts=6, num_generations=2, steps_per_generation=6, num_iterations=2, accumulate=3)


def rollout() -> Rollout:
    """Twelve sequences of different lengths; the number of a sequence is its first token."""
    mask = torch.arange(1, 10) < torch.randint(2, 10, (12, 1))
    return Rollout(
        sequences=torch.cat([torch.arange(12)[:, None], torch.randint(3, 20, (12, 9))], dim=1),
        prompt_lengths=torch.ones(12, dtype=torch.long),
        completion_mask=torch.cat([torch.zeros(12, 1, dtype=torch.bool), mask], dim=1),
        finished=torch.rand(12) < 0.7,
        sampler_logprobs=torch.zeros(12, 10),
        keep=torch.cat([torch.zeros(12, 1, dtype=torch.bool), mask & (torch.rand(12, 1) < 0.6)], dim=1),
    )


def objective(**options: Any) -> GRPOLoss:
    return GRPOLoss(**{"denominator": "kept", "beta": 0.1, **options})


def expected(options: dict[str, Any], window: Rollout) -> tuple[int, int]:
    """Items of policy and penalty, counted sequence by sequence."""
    mask = window.completion_mask & window.finished[:, None] if options.get("mask_truncated_completions") else None
    mask = window.completion_mask if mask is None else mask
    kept = mask & window.keep
    by_policy, by_penalty = kept, kept if options.get("kl_on") == "kept" else mask
    tokens = options.get("loss_type") == "dapo"
    return tuple(sum(int(row.sum()) if tokens else int(row.any()) for row in each) for each in (by_policy, by_penalty))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "dapo"},
        {"loss_type": "dapo", "kl_on": "kept"},
        {"loss_type": "dapo", "mask_truncated_completions": True},
    ],
)
def test_items_are_those_of_the_whole_step_and_counted_once(options: dict[str, Any]) -> None:
    data, windows = rollout(), []

    def count(window: Rollout) -> Denominators:
        windows.append(window)
        return objective(**options).denominators(window, 9)

    block = RolloutBlock(PLAN, data, index=3, seed=0, count=count)
    served = [block.next() for _ in range(PLAN.micro_batches)]
    assert block.is_spent
    assert len(windows) == PLAN.optimizer_steps
    for step in range(PLAN.optimizer_steps):
        parts = served[step * PLAN.accumulate : (step + 1) * PLAN.accumulate]
        numbers = torch.cat([part.sequences[:, 0] for part, _ in parts])
        for _, items in parts:
            assert (int(items.policy), int(items.penalty)) == expected(options, data[numbers])
    for first in (0, PLAN.steps_per_generation):
        one_pass = torch.cat([part.sequences[:, 0] for part, _ in served[first : first + PLAN.steps_per_generation]])
        assert sorted(one_pass.tolist()) == list(range(12))


def test_no_micro_batch_is_wider_than_its_longest_sequence() -> None:
    """Without packing too: with lengths of a quarter of the longest, half of the learner's tokens were padding."""
    block = RolloutBlock(PLAN, rollout(), index=3, seed=0, count=lambda window: objective().denominators(window, 9))
    widths = [(part.sequences.shape[1], int(part.lengths.max())) for part, _ in (block.next() for _ in range(6))]
    assert all(width == longest for width, longest in widths)
    assert len(set(widths)) > 1


def test_no_two_passes_have_one_order() -> None:
    orders = torch.cat([PLAN.order(index, 0, torch.device("cpu")).view(2, 12) for index in range(3)])
    assert len({tuple(order) for order in orders.tolist()}) == 6


@pytest.mark.parametrize("packs", [False, True])
def test_a_block_taken_up_inside_a_step_counts_the_whole_step(packs: bool) -> None:
    data, items, plan = rollout(), objective(loss_type="dapo").denominators, replace(PLAN, packs=packs)
    block = RolloutBlock(plan, data, index=3, seed=0, count=items)
    served = [block.next() for _ in range(plan.micro_batches)]
    for cursor in range(plan.micro_batches):
        again = RolloutBlock.from_state(plan, {"rollout": data.state(), "index": 3, "cursor": cursor}, 0, items)
        part, counts = again.next()
        assert torch.equal(part.sequences, served[cursor][0].sequences)
        assert counts == served[cursor][1]


def test_what_every_micro_batch_divides_by_itself_is_not_counted() -> None:
    assert objective(loss_type="bnpo").denominators(rollout()) == Denominators()
    assert Denominators().summed(torch.neg) == Denominators()
    assert objective(beta=0.0).denominators(rollout()).penalty is None
