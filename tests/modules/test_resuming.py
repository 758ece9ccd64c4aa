"""Optimizers and schedules in a resumed run, without one: what is refused, what has changed, what is taken over."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

from sparse_rl_lightning.learner.random_state import random_state, restore_random_state
from sparse_rl_lightning.modules.resume.optimizer import (
    KEY,
    advance,
    apply_settings,
    check_optimizer,
    check_parts,
    check_weights,
    describe_optimizer,
    schedule_change,
)


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def saved(optimizer: torch.optim.Optimizer, schedule: LRScheduler | None = None) -> dict[str, object]:
    return {KEY: describe_optimizer(optimizer, schedule), "optimizer_states": [optimizer.state_dict()]}


def test_the_state_of_another_optimizer_is_refused() -> None:
    checkpoint = saved(AdamW(parameters()))
    check_optimizer(checkpoint, AdamW(parameters(), lr=0.5))
    with pytest.raises(ValueError, match=r"is of torch.optim.adamw.AdamW, model.optimizer is torch.optim.sgd.SGD"):
        check_optimizer(checkpoint, SGD(parameters()))
    with pytest.raises(ValueError, match="other groups of parameters"):
        check_optimizer(checkpoint, AdamW(parameters(3)))
    check_optimizer({}, SGD(parameters()))  # sharded strategies keep the state elsewhere


def test_a_schedule_has_changed_if_its_class_or_a_number_has() -> None:
    def described(length: int | None) -> dict[str, str]:
        optimizer = SGD(parameters(), lr=0.1)
        return describe_optimizer(optimizer, None if length is None else CosineAnnealingLR(optimizer, length))

    was = described(10)
    assert schedule_change(was, described(10)) == []
    assert schedule_change({}, described(10)) == []  # not known
    (said,) = schedule_change(was, described(6))
    assert "T_max=10" in said
    assert "T_max=6" in said
    name = "the schedule was torch.optim.lr_scheduler.CosineAnnealingLR("
    assert schedule_change(was, described(None))[0].startswith(name)
    assert schedule_change(described(None), described(10))[0].startswith("the schedule was None and is torch.")
    optimizer = SGD(parameters(), lr=0.1)
    lambdas = [LambdaLR(optimizer, lambda step: 0.9**step), LambdaLR(optimizer, lambda step: 0.8**step)]
    first, second = (describe_optimizer(optimizer, schedule) for schedule in lambdas)
    assert schedule_change(first, second)[0].startswith("the code of the schedule, torch.optim.lr_scheduler.LambdaLR(")


def test_a_schedule_goes_to_its_step_and_one_of_a_metric_begins_anew() -> None:
    optimizer = SGD(parameters(), lr=1.0)
    advance(StepLR(optimizer, 2, 0.1), 5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    plateau = ReduceLROnPlateau(SGD(parameters(), lr=1.0))
    advance(plateau, 5)
    assert plateau.last_epoch == 0


def test_settings_are_taken_over_and_what_an_optimizer_counts_is_not() -> None:
    own, wanted = (
        AdamW(parameters(), lr=lr, weight_decay=decay) for lr, decay in ((torch.tensor(0.1), 0.0), (0.2, 0.0))
    )
    address, weights = own.param_groups[0]["lr"], own.param_groups[0]["params"]
    for one, first in ((own, 0.1), (wanted, 0.3)):
        one.param_groups[0]["initial_lr"] = first
    assert apply_settings(own, wanted) == ["lr was 0.10000000149011612 and is 0.2"]
    assert own.param_groups[0]["lr"] is address  # graphs use it
    assert float(address) == pytest.approx(0.2)
    assert own.param_groups[0]["params"] is weights
    assert own.param_groups[0]["initial_lr"] == 0.3
    assert apply_settings(own, AdamW(parameters(), lr=0.2, weight_decay=0.5)) == [
        "lr was 0.20000000298023224 and is 0.2", "weight_decay was 0.0 and is 0.5"
    ]  # fmt: skip


def test_a_checkpoint_must_have_what_training_needs_and_be_of_this_model() -> None:
    check_parts({"loops": 1}, ["loops"])
    with pytest.raises(ValueError, match="this checkpoint has no 'a', 'b', so training"):
        check_parts({"loops": 1}, ["a", "loops", "b"])
    one, two = torch.ones(1), torch.ones(2)
    check_weights({"policy.a": one}, {"policy.a": two[:1]})
    for other, said in (
        ({"policy.a": two}, "0 unknown, 0 missing and 1 weights of another shape, for example 'policy.a'"),
        ({"policy.b": one}, "1 unknown, 1 missing and 0 weights of another shape, for example 'policy.b'"),
        ({}, "0 unknown, 1 missing and 0 weights of another shape, for example 'policy.a'"),
        (
            {"policy.a": one, "policy.b": one},
            "1 unknown, 0 missing and 0 weights of another shape, for example 'policy.b'",
        ),
        ({"policy.a": one / 0}, "this checkpoint"),
    ):
        with pytest.raises(ValueError, match=said):
            check_weights(other, {"policy.a": one})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_goes_on_where_other_gpus_are_in_sight(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    state = random_state() | {"cuda": [torch.tensor([gpu], dtype=torch.uint8) for gpu in range(2)]}
    restore_random_state(state)
    assert [int(own) for own in restored] == [0, 1][:count]
