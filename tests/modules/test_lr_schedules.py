"""Schedules that follow a metric, and what else may be given as ``lr_scheduler``, in Python and from files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from tiny_grpo import fit, module
from tiny_run import config, write
from transformers import get_cosine_schedule_with_warmup

from sparse_rl_lightning.callbacks import RolloutCheckpoint
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.errors import UserError


def level(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [0.5] * len(completions)


def rate(trainer: Any) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def plateau(monitor: str = "reward", **options: Any) -> Any:
    return lambda optimizer: ReduceLROnPlateau(optimizer, monitor=monitor, **{"patience": 1, "mode": "max", **options})


def test_it_is_stepped_by_its_metric_every_optimizer_step() -> None:
    """A reward that never changes: after the first step, every second one lowers the rate."""
    rates = [rate(fit(module(level, lr=1.0, lr_scheduler=plateau()), steps)) for steps in (1, 2, 3, 5)]
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_a_metric_of_validation_counts_once_for_each() -> None:
    grpo = module(level, lr=1.0, lr_scheduler=plateau("val/reward_dense", patience=0))
    trainer = fit(grpo, 8, limit_val_batches=1, val_check_interval=2)  # four validations, the first sets the level
    assert "val/reward_dense" in trainer.callback_metrics
    assert rate(trainer) == pytest.approx(1e-3)


def test_ranks_follow_the_mean_of_what_each_has_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of their own would pull the parts of one policy apart."""
    monkeypatch.setattr(ranks, "of_all_ranks", lambda own: [own, {"entropy": 3.0}])
    monkeypatch.setattr(Trainer, "world_size", 2)
    grpo, seen = module(), []
    grpo._trainer = Trainer(accelerator="cpu", logger=False)
    schedule = plateau("entropy")(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    monkeypatch.setattr(type(grpo.trainer), "callback_metrics", {"entropy": torch.tensor(1.0)})
    monkeypatch.setattr(schedule, "step", seen.append)
    grpo.lr_scheduler_step(schedule, None)
    assert seen == [2.0]


def test_a_metric_that_is_not_logged_is_named() -> None:
    for name in ("rewerd", "val/rewerd"):
        with pytest.raises(UserError, match=rf"there is no metric '{name}' to follow. Known are .*reward"):
            fit(module(level, lr_scheduler=plateau(name)), 2, limit_val_batches=1, val_check_interval=2)


def test_torchs_own_without_a_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"ReduceLROnPlateau does not know what it looks at. Give lightning\.pytorch"):
        fit(module(level, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau), 1)


def test_a_resumed_run_goes_on_with_what_it_saw(tmp_path: Path) -> None:
    def run(steps: int, schedule: Any, **options: Any) -> Any:
        saving = RolloutCheckpoint(dirpath=str(tmp_path), every_n_train_steps=2)
        own = module(level, lr=1.0, lr_scheduler=schedule)
        return fit(own, steps, [saving], enable_checkpointing=True, default_root_dir=str(tmp_path), **options)

    assert rate(run(5, plateau())) == pytest.approx(0.01)
    for file in tmp_path.glob("*.ckpt"):
        file.unlink()
    run(2, plateau())
    last = str(tmp_path / "last.ckpt")
    assert rate(run(5, plateau(), ckpt_path=last)) == pytest.approx(0.01)
    other = run(6, plateau(factor=0.5, patience=9), ckpt_path=last)  # begins anew, with its own settings
    assert other.global_step == 6
    assert rate(other) == 1.0
    assert other.lr_scheduler_configs[0].scheduler.factor == 0.5


def test_a_run_that_is_resumed_within_a_rollout_knows_its_metrics(tmp_path: Path) -> None:
    """What a rollout has logged is followed by the rest of its steps, by monitors and by schedules."""

    def run(steps: int, **options: Any) -> Any:
        own = module(lr=1.0, lr_scheduler=plateau(), steps_per_generation=4)
        return fit(own, steps, [RolloutCheckpoint(tmp_path)], enable_checkpointing=True, **options)

    whole, _ = run(7), run(2)
    resumed = run(7, ckpt_path=tmp_path / "last.ckpt")
    assert rate(resumed) == rate(whole) < 1.0
    assert resumed.callback_metrics["reward"] == whole.callback_metrics["reward"]


def test_a_function_of_transformers_in_python() -> None:
    grpo = module(level, lr=1.0, lr_scheduler=lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 1, 5))
    assert rate(fit(grpo, 3)) == pytest.approx(0.5 * (1 + math.cos(math.pi * 2 / 4)))


def test_it_works_from_a_file(folder: Path) -> None:
    values = config(max_steps=2)
    values["model"]["init_args"]["lr_scheduler"] = {
        "class_path": "lightning.pytorch.cli.ReduceLROnPlateau", "init_args": {"monitor": "reward", "patience": 0}
    }  # fmt: skip
    cli = main(["fit", "--config", write(values)])
    (found,) = cli.trainer.lr_scheduler_configs
    assert (found.scheduler.monitor, found.interval) == ("reward", "step")
    assert rate(cli.trainer) == pytest.approx(1e-7)  # of 1e-6: the reward does not fall


REFUSED = {
    "torch.optim.lr_scheduler.ReduceLROnPlateau": {"patience": 1},
    "transformers.get_cosine_schedule_with_warmup": {"num_warmup_steps": 1, "num_training_steps": 4},
    "transformers.optimization.get_linear_schedule_with_warmup": {"num_warmup_steps": 1, "num_training_steps": 4},
    "transformers.get_constant_schedule": {},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_made_from_a_file_is_refused_when_it_is_parsed(
    path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = config(max_steps=2)
    values["model"]["init_args"]["lr_scheduler"] = {"class_path": path, "init_args": REFUSED[path]}
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", write(values)])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "A schedule in a file is a class: one of torch.optim.lr_scheduler, lightning.pytorch.cli.Reduce" in said
    assert not Path("runs").exists()
