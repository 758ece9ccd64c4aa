"""RolloutCheckpoint: where it writes without being told, and that a run is resumed from there."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import nullcontext as does_not_raise
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from tiny_grpo import fit, module, weights
from tiny_run import config, write
from torch import Tensor

from sparse_rl_lightning.callbacks import ExportPolicy, RolloutCheckpoint
from sparse_rl_lightning.callbacks.guards.preemption import last_path
from sparse_rl_lightning.checkpoints import durable
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.training.checks import check_checkpoint
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import SparseGRPO


def test_its_defaults_are_those_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    callback = RolloutCheckpoint()
    assert (callback.save_last, callback._enable_version_counter, callback._every_n_train_steps) == (True, False, 40)
    logger = CSVLogger(tmp_path / "logs")
    trainer = Trainer(default_root_dir=tmp_path, callbacks=[callback], logger=logger, accelerator="cpu")
    assert last_path(trainer) == str(tmp_path / "checkpoints" / "last.ckpt")  # before setup
    assert callback.dirpath is None
    callback.setup(trainer, module(), "fit")
    assert callback.dirpath == str(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_n_train_steps": 3}, 3),
        ({"every_n_epochs": 1}, 0),
        ({"train_time_interval": timedelta(minutes=5)}, 0),
        ({"monitor": "reward", "save_top_k": 2}, 40),
    ],
)
def test_other_intervals_take_the_place_of_its_own(options: dict[str, Any], steps: int) -> None:
    assert RolloutCheckpoint(**options)._every_n_train_steps == steps


class Watch(Callback):
    """Notes the optimizer steps done, and the step and the batches of last.ckpt, before every batch."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[tuple[int, int | None, int | None]]()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not self.path.exists():
            self.seen.append((trainer.global_step, None, None))
            return
        saved = torch.load(self.path, weights_only=True)
        batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        self.seen.append((trainer.global_step, saved["global_step"], batches))


@pytest.mark.parametrize(
    ("minutes", "saves", "save_last"),
    [(10.0, False, True), (1e-9, True, True), (1e-9, True, "link"), (None, False, True)],
)
def test_a_slow_run_writes_last_by_the_clock_behind_an_optimizer_step(
    minutes: float | None, saves: bool, save_last: Any, tmp_path: Path
) -> None:
    callback = RolloutCheckpoint(dirpath=tmp_path, minutes=minutes, save_last=save_last)
    watch = Watch(tmp_path / "last.ckpt")
    run(tmp_path, 3, [callback, watch], module(steps_per_generation=4), accumulate_grad_batches=2)
    steps = [0, 0, 1, 1, 2, 2]
    assert watch.seen == [(step, step, 2 * step) if saves and step else (step, None, None) for step in steps]
    assert callback.state_key == RolloutCheckpoint(dirpath=tmp_path).state_key  # that of older checkpoints


def run(folder: Path, steps: int, callbacks: list[Any], grpo: SparseGRPO | None = None, **options: Any) -> Trainer:
    return fit(grpo or module(), steps, callbacks, enable_checkpointing=True, default_root_dir=folder, **options)


@pytest.fixture(scope="module")
def seven_steps(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The weights of a run that nothing ended before."""
    folder = tmp_path_factory.mktemp("whole")
    return weights(run(folder, 7, [RolloutCheckpoint(folder)]).lightning_module)


def stop(trainer: Trainer, *_: Any) -> None:
    """As EarlyStopping and a time limit do."""
    trainer.should_stop = trainer.global_step >= 5


@pytest.mark.parametrize(
    ("steps", "callbacks", "limits", "end"),
    [
        (5, [], {}, 5),
        (-1, [LambdaCallback(on_train_batch_end=stop)], {"min_epochs": 0}, 5),
        (-1, [], {"max_epochs": 1}, 4),
    ],
    ids=["max_steps", "stopped", "max_epochs"],
)
def test_the_end_of_training_is_saved_whatever_ends_it(
    steps: int, callbacks: list[Any], limits: dict[str, Any], end: int, seven_steps: Tensor, tmp_path: Path
) -> None:
    """With 40 steps between two checkpoints, the last of 60 was lost; going on from it is as if it had not ended."""
    first = module()
    run(tmp_path, steps, [*callbacks, RolloutCheckpoint(tmp_path, every_n_train_steps=3)], first, **limits)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == end
    assert saved["state_dict"]["policy.lm_head.weight"].equal(first.policy.lm_head.weight)
    resumed = run(tmp_path, 7, [RolloutCheckpoint(tmp_path)], ckpt_path=tmp_path / "last.ckpt")
    assert weights(resumed.lightning_module).equal(seven_steps)


SLOW = pytest.mark.slow
VALIDATED = {"limit_val_batches": 1, "val_check_interval": 2}
LINKED = [
    pytest.param(5, {}, {}, id="no step of the interval"),
    pytest.param(5, {"every_n_train_steps": 2}, {}, id="a step behind the last of the interval"),
    pytest.param(4, {"every_n_train_steps": 2}, {}, id="the last of the interval", marks=SLOW),
    pytest.param(5, {"every_n_train_steps": 2, "minutes": 1e-9}, {}, id="by the clock"),
    pytest.param(5, {"every_n_train_steps": 2, "minutes": 1e-9, "save_top_k": -1}, {}, id="all are kept"),
    pytest.param(5, {"every_n_train_steps": 2, "save_top_k": 0}, {}, id="none is kept", marks=SLOW),
    pytest.param(5, {"every_n_train_steps": 2, "monitor": "reward", "mode": "max"}, {}, id="the best", marks=SLOW),
    pytest.param(5, {"every_n_train_steps": 1, "monitor": "one", "save_top_k": 2}, {}, id="none is ever better"),
    pytest.param(5, {"every_n_train_steps": 1, "monitor": "val/reward_dense"}, VALIDATED, id="of the validation"),
    pytest.param(-1, {"every_n_train_steps": 3}, {"max_epochs": 2}, id="two epochs"),
    pytest.param(-1, {}, {"max_epochs": 2}, id="two epochs, none due", marks=SLOW),
    pytest.param(-1, {"every_n_epochs": 1}, {"max_epochs": 2}, id="of epochs", marks=SLOW),
    pytest.param(5, {"every_n_train_steps": 2, "filename": "last"}, {}, id="one name for both"),
    pytest.param(5, {"every_n_train_steps": 2, "enable_version_counter": True}, {}, id="numbered", marks=SLOW),
]
"""Steps, arguments of the callback and of the trainer with which ``last.ckpt`` may be a link."""


@pytest.mark.parametrize(("steps", "arguments", "limits"), LINKED)
def test_a_link_leads_to_the_end_of_the_run(
    steps: int, arguments: dict[str, Any], limits: dict[str, Any], tmp_path: Path
) -> None:
    """What the clock writes is a file, and Lightning linked it to itself, or to a checkpoint that is older."""
    names, logs = [], LambdaCallback(on_train_batch_end=lambda _, grpo, *__: grpo.log("one", 1.0))
    for kind in (True, "link"):
        folder = tmp_path / str(kind)
        saves = RolloutCheckpoint(folder, save_last=kind, **arguments)
        end = run(tmp_path, steps, [logs, saves], **limits).global_step
        assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == end
        names.append(sorted(path.name for path in folder.glob("epoch*.ckpt")))
    assert names[0] == names[1]
    again = RolloutCheckpoint(folder, save_last="link", **arguments)
    run(tmp_path, end + 1, [logs, again], ckpt_path=folder / "last.ckpt")
    newest = max(folder.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert torch.load(newest, weights_only=True)["global_step"] == end + 1


def test_a_link_never_leads_to_what_was_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning removed the good link first, and slurm.sh then began anew over the run."""
    writes, write = itertools.count(), durable.write_files

    def full(*args: Any, **options: Any) -> None:
        if next(writes):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args, **options)

    monkeypatch.setattr(durable, "write_files", full)
    saves = RolloutCheckpoint(tmp_path, every_n_train_steps=2, save_last="link")
    with pytest.warns(UserWarning, match="could not be saved"), pytest.raises(SystemExit):
        run(tmp_path, 4, [saves])
    assert (tmp_path / "last.ckpt").is_symlink()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


class Spoil(Callback):
    """Writes NaN into one weight behind an optimizer step, and the number it had there behind the next."""

    def __init__(self, step: int, heals: bool) -> None:
        self.step, self.heals, self.was = step, heals, 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        weight = next(own for name, own in pl_module.policy.named_parameters() if "norm" in name).data
        if trainer.global_step == self.step:
            self.was = float(weight[0])
            weight[0] = torch.nan
        elif self.heals and trainer.global_step == self.step + 1:
            weight[0] = self.was


@pytest.mark.parametrize("kind", [True, "link"])
@pytest.mark.parametrize("heals", [False, True])
def test_weights_that_are_not_finite_never_replace_those_that_are(heals: bool, kind: Any, tmp_path: Path) -> None:
    """They were saved, the last good ones were removed, and nothing could be resumed from them."""
    saves = RolloutCheckpoint(tmp_path, every_n_train_steps=1, save_last=kind)
    good, refused = ("4" if heals else "2"), pytest.raises(UserError, match=r"^export: 1 weights hold NaN")
    said = r"could not be saved: step 3: 1 weights hold NaN or infinity, for example '\S*norm\S*'\. The run goes on"
    own = [Spoil(3, heals), ExportPolicy(tmp_path / "policy"), saves]
    with does_not_raise() if heals else refused, pytest.warns(UserWarning, match=said):
        run(tmp_path, 4 if heals else 3, own, module(steps_per_generation=2))
    assert [path.name for path in tmp_path.glob("epoch*.ckpt")] == [f"epoch=0-step={good}.ckpt"]
    for path in (tmp_path / "last.ckpt", next(tmp_path.glob("epoch*.ckpt"))):
        assert torch.load(path, weights_only=True)["global_step"] == int(good)
    for path in (tmp_path / "weights").glob("*.safetensors"):
        assert all(bool(value.isfinite().all()) for value in load_file(path).values())
    assert (tmp_path / "policy").exists() == heals


def test_a_folder_that_is_full_is_not_forgotten_for_another(tmp_path: Path) -> None:
    """Two callbacks with folders of their own: that one saves does not mean that the other does."""
    plugin, old = durable.DurableCheckpointIO(), tmp_path / "full" / "old.ckpt"
    old.parent.mkdir()
    old.touch()
    with pytest.warns(UserWarning, match="could not be saved"):
        plugin.failed(old.with_name("new.ckpt"), OSError("full"))
    plugin.saved(tmp_path / "other" / "new.ckpt")
    plugin.remove_checkpoint(old)
    assert plugin.is_failing
    assert old.exists()
    plugin.saved(old.with_name("newer.ckpt"))
    assert not plugin.is_failing
    assert not old.exists()


def test_names_with_a_dot_have_weights_of_their_own(tmp_path: Path) -> None:
    plugin = durable.DurableCheckpointIO()
    for value in (1.0, 2.0):
        state = {"state_dict": {"policy.w": torch.tensor([value])}, "global_step": 1}
        plugin.save_checkpoint(state, tmp_path / f"reward=0.{value:.0f}")
    assert [load_file(tmp_path / f"weights/reward=0.{n}.safetensors")["w"].item() for n in (1, 2)] == [1.0, 2.0]


def test_a_remote_last_checkpoint_has_its_address(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=[RolloutCheckpoint("memory://here/run")], logger=False, accelerator="cpu")
    assert last_path(trainer) == "memory://here/run/last.ckpt"
    arguments = Namespace(dirpath="memory://here/run")
    folder = Namespace(class_path="sparse_rl_lightning.callbacks.RolloutCheckpoint", init_args=arguments)
    given = Namespace(trainer=Namespace(callbacks=[folder], default_root_dir=None), ckpt_path="last")
    for subcommand, says in {
        "fit": r"--ckpt_path=memory://here/run/last\.ckpt, or leave ckpt_path out to start anew\.$",
        "test": r"--ckpt_path=memory://here/run/last\.ckpt, or leave ckpt_path out to take model\.policy as it is\.$",
        "export": r"Copy memory://here/run/last\.ckpt to this machine, and give --ckpt_path=FILE\.$",
    }.items():
        with pytest.raises(UserError, match=says):
            check_checkpoint(given, subcommand)


def test_a_home_folder_behind_an_equals_sign_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "last.ckpt").touch()
    given = Namespace(ckpt_path="~/last.ckpt")
    check_checkpoint(given)
    assert given.ckpt_path == str(tmp_path / "last.ckpt")


def test_the_clock_leaves_the_best_to_their_metric(tmp_path: Path) -> None:
    kinds = {"monitor": "reward", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2}
    for name, minutes in (("plain", None), ("clock", 1e-9)):
        callback = RolloutCheckpoint(dirpath=tmp_path / name, minutes=minutes, **kinds)
        run(tmp_path, 5, [callback])
    names = [sorted(path.name for path in (tmp_path / name).glob("epoch*.ckpt")) for name in ("plain", "clock")]
    assert names[0] == names[1]


class ByStep(SparseGRPO):
    """Validates to the number of optimizer steps."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/step", float(self.trainer.global_step))


@pytest.mark.parametrize(
    ("steps", "every", "limits", "saved"),
    [
        (8, 2, {"val_check_interval": 2, "check_val_every_n_epoch": None}, [2, 4, 6, 8]),
        (
            8,
            2,
            {"val_check_interval": 3, "check_val_every_n_epoch": None},
            [3, 6],
        ),  # it waits
        (12, 4, {}, [4, 8, 12]),  # one behind each epoch
    ],
    ids=["at the same steps", "at others", "by epochs"],
)
def test_a_checkpoint_is_ranked_by_a_validation_of_its_own_weights(
    steps: int, every: int, limits: dict[str, Any], saved: list[int], tmp_path: Path
) -> None:
    best = RolloutCheckpoint(tmp_path, every, monitor="val/step", mode="max", save_top_k=-1)
    run(tmp_path, steps, [best], module(kind=ByStep), limit_val_batches=1, **limits)
    ranked = {int(path.partition("step=")[2][:-5]): int(score) for path, score in best.best_k_models.items()}
    assert ranked == {step: step for step in saved}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == steps


def test_a_validation_that_ends_training_loses_no_step(tmp_path: Path) -> None:
    def end(trainer: Trainer, _: Any) -> None:
        trainer.should_stop = trainer.global_step == 6

    limits = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    run(tmp_path, 20, [LambdaCallback(on_validation_end=end), RolloutCheckpoint(tmp_path, 4)], **limits)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6


@pytest.mark.parametrize(
    "arguments",
    [{"every_n_train_steps": 2}, {"every_n_train_steps": 2, "monitor": "val/reward_dense"}, {"every_n_epochs": 1}],
    ids=["steps", "monitor", "epochs"],
)
def test_a_resumed_schedule_has_followed_the_same_validations(arguments: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint of a step with a validation is behind what that makes of the learning rate: it is not repeated."""
    follows = partial(ReduceLROnPlateau, monitor="val/reward_dense", mode="max", patience=0, threshold=10.0)
    limits = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}

    def ended(folder: str, **options: Any) -> tuple[float, Tensor]:
        callback = RolloutCheckpoint(tmp_path / folder, save_top_k=-1, **arguments)
        trainer = run(tmp_path, 7, [callback], module(lr_scheduler=follows), **limits, **options)
        return trainer.optimizers[0].param_groups[0]["lr"], weights(trainer.lightning_module)

    rate, whole = ended("whole")
    saved = sorted((tmp_path / "whole").glob("epoch*.ckpt"))
    assert len(saved) == 3
    for number, path in enumerate(saved):
        of_resumed, resumed = ended(f"resumed {number}", ckpt_path=path)
        assert of_resumed == rate
        assert resumed.equal(whole)


@pytest.mark.parametrize("other", [RolloutCheckpoint, ModelCheckpoint])
def test_two_that_would_remove_each_others_files_are_refused(other: Any, tmp_path: Path) -> None:
    first = RolloutCheckpoint(tmp_path, 1)
    with pytest.raises(UserError, match="two checkpoint callbacks write files of the same names"):
        run(tmp_path, 2, [first, other(tmp_path, every_n_train_steps=1, monitor="reward")])
    best = other(tmp_path, every_n_train_steps=1, monitor="reward", mode="max", filename="best")
    run(tmp_path, 2, [RolloutCheckpoint(tmp_path, 1), best])
    assert Path(best.best_model_path).is_file()


def test_preemption_keeps_the_last_of_an_earlier_run_and_writes_over_its_own(tmp_path: Path) -> None:
    """Under a version counter, as Lightning names them: a run that is preempted twice goes on from the second time."""

    def stopped(steps: int, ckpt_path: Path | None = None) -> None:
        kills = LambdaCallback(
            on_train_batch_start=lambda trainer, *_: trainer.global_step == steps - 1 and os.kill(os.getpid(), SIGTERM)
        )
        callback = RolloutCheckpoint(tmp_path, 9, enable_version_counter=True)
        with pytest.raises(SystemExit):
            run(tmp_path, 7, [kills, callback], ckpt_path=ckpt_path)

    run(tmp_path, 1, [RolloutCheckpoint(tmp_path)])
    stopped(2)
    stopped(5, tmp_path / "last-v1.ckpt")
    names = {path.name: torch.load(path, weights_only=True)["global_step"] for path in tmp_path.glob("last*.ckpt")}
    assert names == {"last.ckpt": 1, "last-v1.ckpt": 5}


def test_a_validation_within_a_step_ranks_nothing(tmp_path: Path) -> None:
    """A checkpoint there would lack a part of a gradient."""
    best = RolloutCheckpoint(tmp_path, 1, monitor="val/reward_dense", save_top_k=-1)
    limits = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    run(tmp_path, 3, [best], module(steps_per_generation=2), accumulate_grad_batches=2, **limits)
    assert [path.name for path in tmp_path.glob("epoch*.ckpt")] == ["epoch=0-step=3.ckpt"]


def test_a_metric_of_training_may_begin_like_one_of_validation(tmp_path: Path) -> None:
    class Valued(SparseGRPO):
        def training_step(self, *args: Any) -> Any:
            self.log("value_loss", 1.0)
            return super().training_step(*args)

    run(tmp_path, 4, [RolloutCheckpoint(tmp_path, 2, monitor="value_loss", save_top_k=-1)], module(kind=Valued))
    assert len([*tmp_path.glob("epoch*.ckpt")]) == 2
    with pytest.raises(UserError, match="train_time_interval would save other weights"):
        RolloutCheckpoint(monitor="val/reward", train_time_interval=timedelta(minutes=5))


def test_a_trial_run_writes_no_last(tmp_path: Path) -> None:
    run(tmp_path, 1, [RolloutCheckpoint(tmp_path)])
    before = (tmp_path / "last.ckpt").read_bytes()
    run(tmp_path, 1, [RolloutCheckpoint(tmp_path)], fast_dev_run=True)
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_lightnings_own_last_is_found(tmp_path: Path) -> None:
    """Without the command line too, where Lightning looks for it before any setup."""
    run(tmp_path, 2, [RolloutCheckpoint(every_n_train_steps=1)])
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt"))
    assert saved == ["epoch=0-step=2.ckpt", "last.ckpt"]
    trainer = run(tmp_path, 4, [RolloutCheckpoint(every_n_train_steps=1)], ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert trainer.global_step == 4


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "runs/own/checkpoints").glob("*.ckpt")}


def test_it_saves_and_resumes_as_the_long_incantation(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the command line, where the run's name stands once: log, checkpoints and ``last`` follow from it."""
    values = config()
    values["trainer"]["callbacks"][-1] = {"class_path": "RolloutCheckpoint", "init_args": {"every_n_train_steps": 1}}
    del values["trainer"]["logger"]
    path = write(values)
    main(["fit", "--config", path, "--trainer.max_steps=2"])
    assert sorted(checkpoints(folder)) == ["epoch=0-step=2.ckpt", "last.ckpt"]
    assert (folder / "runs/own/version_0/metrics.csv").is_file()
    resumed = main(["fit", "--config", path, "--ckpt_path=last"])
    assert resumed.config["fit"]["ckpt_path"] == "runs/own/checkpoints/last.ckpt"
    assert resumed.trainer.global_step == 4
    assert sorted(checkpoints(folder)) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert (folder / "runs/own/version_1/metrics.csv").is_file()
    long = main(["fit", "--config", write(config()), "--trainer.default_root_dir=runs/long"])
    for mine, other in zip(resumed.model.parameters(), long.model.parameters(), strict=True):
        assert mine.equal(other)


def test_a_logger_of_ones_own_and_none_stay(folder: Path) -> None:
    main(["fit", "--config", write(config(max_steps=1)), "--trainer.logger=false"])
    assert not list((folder / "runs/own").glob("version_*"))
