"""What was changed in a configuration counts when a run is resumed; what was not goes on bit by bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_grpo import fit, module, weights
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

Schedule = Callable[[Any], Any] | None
AdamW = functools.partial(torch.optim.AdamW, lr=0.01)
STOP, STEPS = 2, 5


class Rates(Callback):
    """The learning rate, and the weight decay, of every step."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, float]] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen[trainer.global_step] = float(group["lr"]), group["weight_decay"]


def run(
    folder: Path, steps: int, lr: float, schedule: Schedule = None, ckpt_path: str | None = None, decay: float = 0.01
) -> tuple[dict[int, tuple[float, float]], torch.Tensor]:
    """Train with AdamW and keep the last checkpoint."""
    grpo, rates = (
        module(optimizer=lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=decay), lr_scheduler=schedule),
        Rates(),
    )
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, enable_version_counter=False)
    fit(grpo, steps, [rates, saves], enable_checkpointing=True, ckpt_path=ckpt_path)
    return rates.seen, weights(grpo)


def warmup(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)


def cosine(length: int) -> Schedule:
    return lambda optimizer: CosineAnnealingLR(optimizer, length)


def warm_then_linear(optimizer: Any) -> SequentialLR:
    parts = [LambdaLR(optimizer, functools.partial(warmup, 3)), LinearLR(optimizer, 1.0, 0.1, 10)]
    return SequentialLR(optimizer, parts, [3])


SCHEDULES: dict[str, Schedule] = {
    "none": None,
    "cosine": cosine(10),
    "partial": lambda optimizer: LambdaLR(optimizer, functools.partial(warmup, 4)),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "several": warm_then_linear,
}


def fast(names: Iterable[str], *chosen: str) -> list[Any]:
    """All names, those that were not chosen marked as slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", fast(SCHEDULES, "cosine", "partial"))
def test_nothing_changed_goes_on_bitwise(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = SCHEDULES[name]
    whole, end = run(tmp_path / "whole", STEPS, 0.01, schedule)
    run(tmp_path / "cut", STOP, 0.01, schedule)
    caplog.clear()
    rest, again = run(tmp_path / "cut", STEPS, 0.01, schedule, str(tmp_path / "cut" / "last.ckpt"))
    assert rest == {step: rate for step, rate in whole.items() if step >= STOP}
    assert torch.equal(end, again)
    assert "Resumed as configured now" not in caplog.text


CHANGES: dict[str, tuple[Schedule, Schedule, float, str]] = {
    "constant": (None, None, 0.001, "lr was 0.01 and is 0.001"),
    "base of a schedule": (cosine(10), cosine(10), 0.001, "lr was 0.00"),
    "length of a schedule": (cosine(10), cosine(6), 0.01, "T_max=6"),
    "none instead of a schedule": (cosine(10), None, 0.01, "the schedule was torch.optim.lr_scheduler.CosineAnn"),
    "of functions": (SCHEDULES["partial"], lambda o: LambdaLR(o, functools.partial(warmup, 9)), 0.01, "lr was 0.0"),
    "to functions": (cosine(10), SCHEDULES["lambda"], 0.01, "is torch.optim.lr_scheduler.LambdaLR"),
    "with momentum": (None, lambda o: OneCycleLR(o, 0.1, 20), 0.01, "betas was (0.9, 0.999) and is (0.9"),
}


@pytest.mark.parametrize("name", fast(CHANGES, "constant", "length of a schedule", "none instead of a schedule"))
def test_what_was_changed_counts_and_is_said(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the step it is resumed at, the run has the learning rates of one that was configured so from its start."""
    before, after, lr, said = CHANGES[name]
    run(tmp_path / "cut", STOP, 0.01, before)
    whole, _ = run(tmp_path / "whole", STEPS, lr, after)
    caplog.clear()
    rest, _ = run(tmp_path / "cut", STEPS, lr, after, str(tmp_path / "cut" / "last.ckpt"))
    assert rest == {step: rate for step, rate in whole.items() if step >= STOP}
    lines = [record.getMessage() for record in caplog.records if "Resumed as configured now" in record.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]


def test_other_settings_of_the_optimizer_count_too(tmp_path: Path) -> None:
    run(tmp_path, STOP, 0.01)
    rest, _ = run(tmp_path, STEPS, 0.01, ckpt_path=str(tmp_path / "last.ckpt"), decay=0.5)
    assert set(rest.values()) == {(0.01, 0.5)}


def test_a_resume_without_a_step_leaves_the_next_fit_alone(tmp_path: Path) -> None:
    run(tmp_path, STOP, 0.01, SCHEDULES["partial"])
    grpo, rates = module(lr_scheduler=SCHEDULES["partial"], optimizer=AdamW), Rates()
    fit(grpo, STOP, ckpt_path=tmp_path / "last.ckpt")
    fit(grpo, 1, [rates])
    assert rates.seen[0][0] == pytest.approx(0.01 * warmup(4, 0))


class Counting(torch.optim.SGD):
    """Keeps in its groups what it has found out, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float, most: float = math.inf) -> None:
        super().__init__(params, lr)
        self.defaults |= {"most": most, "found": 0}
        for group in self.param_groups:
            group |= {"most": most, "found": 0}

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["found"] += 1
        return super().step(closure)


def test_what_an_optimizer_counts_in_its_groups_is_the_checkpoints(tmp_path: Path) -> None:
    """A schedule of functions is made anew at every resume. An optimizer's own infinite limit is no mistake."""

    def train(steps: int, most: float, ckpt_path: Path | None = None) -> dict[str, Any]:
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, enable_version_counter=False)
        grpo = module(optimizer=lambda p: Counting(p, 0.1, most), lr_scheduler=SCHEDULES["partial"])
        trainer = fit(grpo, steps, [saves], enable_checkpointing=True, ckpt_path=ckpt_path)
        return trainer.optimizers[0].param_groups[0]

    assert train(STOP, math.inf)["found"] == STOP
    group = train(STEPS, 3.0, tmp_path / "last.ckpt")
    assert (group["found"], group["most"]) == (STEPS, 3.0)
    with pytest.raises(ValueError, match=r"model.optimizer.most must be a finite number, got most=nan"):
        train(1, math.nan)


@pytest.mark.slow
def test_a_checkpoint_without_a_description_takes_the_configuration(tmp_path: Path) -> None:
    """Of a version that kept none: nothing changed is bitwise the same, and a change counts."""
    whole, end = run(tmp_path / "whole", STEPS, 0.01, cosine(10))
    run(tmp_path / "cut", STOP, 0.01, cosine(10))
    path = tmp_path / "cut" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["sparse_rl_optimizer"]
    torch.save(checkpoint, path)
    rest, again = run(tmp_path / "again", STEPS, 0.01, cosine(10), str(path))
    assert rest == {step: rate for step, rate in whole.items() if step >= STOP}
    assert torch.equal(end, again)
    rest, _ = run(tmp_path / "other", STEPS, 0.02, cosine(10), str(path))
    assert rest[STOP][0] == pytest.approx(0.01 * (1 + math.cos(math.pi * STOP / 10)))


def test_a_reference_policy_is_asked_about_the_rest_of_a_rollout(tmp_path: Path) -> None:
    """The checkpoint falls into the middle of a rollout, for which the run that stopped needed no reference policy."""
    saves = functools.partial(ModelCheckpoint, tmp_path, save_last=True, enable_version_counter=False)
    fit(module(steps_per_generation=2), 1, [saves(every_n_train_steps=1)], enable_checkpointing=True)
    grpo = module(steps_per_generation=2, beta=0.1)
    fit(grpo, 2, [saves(every_n_train_steps=1)], enable_checkpointing=True, ckpt_path=str(tmp_path / "last.ckpt"))
    assert grpo.trainer.global_step == 2
