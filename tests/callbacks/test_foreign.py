"""Callbacks and limits of Lightning's that would do nothing here, or the wrong thing, are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from tiny_grpo import Rows, fit, module, quiet
from torch.utils.data import DataLoader

from sparse_rl_lightning.errors import UserError


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (StochasticWeightAveraging(swa_lrs=0.1), "would average nothing. Take EMAWeightAveraging"),
        (ModelPruning("l1_unstructured", amount=0.1), "would prune none"),
        (OnExceptionCheckpoint("here"), "saves within a step"),
        (ModelCheckpoint(save_on_exception=True), "with save_on_exception saves within a step"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_do_not_act_are_refused(callback: Callback, said: str) -> None:
    named = f"trainer.callbacks: {type(callback).__name__} {'.*' if said[0] == 'w' else ''}"
    with pytest.raises(UserError, match=named):
        fit(module(), 1, [callback], enable_checkpointing=True)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"overfit_batches": 4}, "trainer.overfit_batches=4 replaces the order"),
        ({"limit_train_batches": 6}, "An epoch has 6 batches .*no multiple of trainer.accumulate_grad_batches=4"),
    ],
)
def test_limits_that_cut_an_optimizer_step_are_refused(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        fit(module(steps_per_generation=4), 2, accumulate_grad_batches=4, **limits)
    whole = {"limit_train_batches": 8, "max_epochs": 1}
    assert fit(module(steps_per_generation=4), -1, accumulate_grad_batches=4, **whole).global_step == 2


def test_what_is_saved_within_a_step_is_refused(tmp_path: Path) -> None:
    """The block of micro-batches was a step further than the loader, for the rest of the epoch."""

    class Saves(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    fit(module(steps_per_generation=4), 2, [Saves()])
    with pytest.raises(UserError, match="this checkpoint was saved within a training step"):
        fit(module(steps_per_generation=4), 3, ckpt_path=tmp_path / "within.ckpt")


def test_batches_of_a_loader_that_are_never_drawn_for_are_told_of() -> None:
    rows = Rows().train_rows()
    loader = DataLoader(rows, batch_size=4, collate_fn=list)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="A rollout takes 4 batches of the training loader"):
        quiet(1).fit(module(steps_per_generation=4), loader)


def test_a_fused_optimizer_skips_an_overflow_of_float16_itself() -> None:
    """It asks what was found in the gradients, which must then be there."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    grpo = module(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True))
    trainer = fit(grpo, 3, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert trainer.callback_metrics["skipped_steps"] > 0
    assert all(p.isfinite().all() for p in grpo.parameters())
