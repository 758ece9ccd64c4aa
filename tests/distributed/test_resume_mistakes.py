"""What may be wrong with a checkpoint to resume from is one sentence: no traceback, and no advice to unpickle."""

from __future__ import annotations

import functools
import math
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import save_file
from tiny_grpo import every_step, fit, module, weights
from tiny_run import config, contents, run_console, write
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.cli.training.checks import last_checkpoint
from sparse_rl_lightning.errors import UserError

LAST = Path("runs/own/checkpoints/last.ckpt")


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("PWNED"),)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[: len(data) // 2], "not as it was written .*cut off"),
    "one bit": (flipped, r"not as it was written \(.*data/"),
    "empty": (lambda _: b"", "is empty"),
    "zeros": (lambda data: bytes(len(data)), "is not a checkpoint"),
    "a text": (lambda _: b"lr: 0.1\n", "is not a checkpoint"),
    "a bare pickle": (lambda _: pickle.dumps(Planted()), "is not a checkpoint"),
}
OBJECTS: dict[str, tuple[Any, str]] = {
    "planted code": (
        {"state_dict": {}, "x": Planted()},
        r"holds pickled objects \(.*PosixPath.*\), .*is not read",
    ),
    "a tensor": (torch.zeros(3), "is not a Lightning checkpoint: it has no 'state_dict'"),
    "a list": ([1, 2], "is not a Lightning checkpoint"),
    "weights alone": ({"w": torch.zeros(3)}, "is not a Lightning checkpoint"),
}


@pytest.mark.parametrize("name", [*BYTES, *OBJECTS, "safetensors", "a legacy file"])
def test_a_file_that_is_no_checkpoint_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.arange(100.0)}, "global_step": 1, "pytorch-lightning_version": "2"}, path)
    assert read_checkpoint(path)["global_step"] == 1
    said = "is not a checkpoint"
    if name in BYTES:
        change, said = BYTES[name]
        path.write_bytes(change(path.read_bytes()))
    elif name in OBJECTS:
        value, said = OBJECTS[name]
        torch.save(value, path)
    elif name == "safetensors":
        save_file({"w": torch.zeros(3)}, path)
    else:
        torch.save({"x": Planted()}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=f"ckpt_path='{path}' .*{said}") as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)
    assert not [word for word in ("weights_only", "torch.load", "trust") if word in str(error.value)]
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert not Path("PWNED").exists()


@dataclass
class Mistake:
    """What is changed, and what is said."""

    says: list[str]
    changes: dict[str, Any] = field(default_factory=dict)
    checkpoint: Callable[[dict[str, Any]], object] | None = None
    args: tuple[str, ...] = ("fit",)


def listed(*kinds: str) -> dict[str, Any]:
    return {"trainer.callbacks": [{"class_path": kind} for kind in kinds]}


MODEL, DATA = "model.init_args", "data.init_args"
MISTAKES = {
    "other data": Mistake(["place in the data fits another run", "was 16 and is 24"], {f"{DATA}.num_train": 24}),
    "prompts": Mistake(["prompts per rollout was 4 and is 2"], {f"{DATA}.prompts_per_rollout": 2}),
    "optimizer": Mistake(
        ["of torch.optim.adamw.AdamW, model.optimizer is torch.optim.sgd.SGD", "weights"],
        {f"{MODEL}.optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}},
    ),
    "no loops": Mistake(["has no 'loops'", "training cannot go on"], checkpoint=lambda c: c.pop("loops")),
    "no block": Mistake(["has no 'sparse_rl'"], checkpoint=lambda c: c.pop("sparse_rl")),
    "weights only": Mistake(["has no 'optimizer_states'"], checkpoint=lambda c: c.pop("optimizer_states")),
    "no version": Mistake(["'pytorch-lightning_version'"], checkpoint=lambda c: c.pop("pytorch-lightning_version")),
    **{
        f"code, {args[0]}": Mistake(["pickled objects"], checkpoint=lambda c: c.update(x=Planted()), args=args)
        for args in (("fit",), ("validate",), ("export", "--folder=policy"))
    },
    "two reports": Mistake(
        ["more than one stateful callback of type `RunSummary`"], listed("RunSummary", "RunSummary")
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_resume_that_cannot_be_is_one_sentence(
    name: str, used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    path = write(config(max_steps=8), mistake.changes)
    if mistake.checkpoint is not None:
        checkpoint = torch.load(LAST, weights_only=True)
        mistake.checkpoint(checkpoint)
        torch.save(checkpoint, LAST)
    before = contents(used_folder / "runs")
    command, *rest = mistake.args
    # two callbacks are refused before a checkpoint is looked for, and these have none that could be
    resume = [] if "two" in name else [f"--ckpt_path={LAST if command == 'export' else 'last'}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = run_console(monkeypatch, command, "--config", path, *resume, *rest)
    shown = capsys.readouterr().err
    assert status == 1, shown
    message = shown.partition("error: ")[2]
    assert [part for part in mistake.says if part not in message] == [], shown
    assert len(message.splitlines()) == 1, shown
    assert "Traceback" not in shown
    assert "weights_only" not in message.replace("save_weights_only", "")
    after = contents(used_folder / "runs")
    assert [path for path, content in before.items() if after.get(path) != content] == []
    assert not Path("PWNED").exists()


def test_a_checkpoint_changes_no_configuration(used_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = torch.load(LAST, weights_only=True)
    checkpoint["hyper_parameters"] = {"_class_path": "SparseGRPO", "reward_funcs": "os.system", "policy": "./planted"}
    torch.save(checkpoint, LAST)
    args = ["fit", "--config", write(config()), f"--ckpt_path={LAST}"]
    assert run_console(monkeypatch, *args) is None


# ---------------------------------------------------------------- which file is the last


def test_last_is_the_file_of_that_name(tmp_path: Path) -> None:
    for name in ("last.ckpt", "lastweek.ckpt", "last-v1.ckpt", "epoch=0-step=4.ckpt"):
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"Beside it is last-v1.ckpt, of a run that was started anew"):
        assert last_checkpoint([tmp_path]) == str(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"there is no last.ckpt in .*, but there are .*lastweek.ckpt.* to start anew"):
        last_checkpoint([tmp_path, tmp_path])
    (tmp_path / "last.ckpt").mkdir()  # DeepSpeed's
    (tmp_path / "last-v1.ckpt").unlink()
    assert last_checkpoint([tmp_path / "none", tmp_path]) == str(tmp_path / "last.ckpt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "last.ckpt").touch()
    with pytest.raises(ValueError, match=r"there are .*/last.ckpt and .*/other/last.ckpt. Give the path of the one"):
        last_checkpoint([tmp_path, tmp_path / "other"])


@pytest.mark.parametrize(
    ("subcommand", "advice"),
    [
        ("fit", "Give the path of a checkpoint, or leave ckpt_path out to start anew."),
        ("validate", "Give the path of a checkpoint, or leave ckpt_path out to take model.policy as it is."),
        ("predict", "Give the path of a checkpoint, or leave ckpt_path out to take model.policy as it is."),
        ("export", "Give the path of a checkpoint: export takes last unless ckpt_path names one."),
    ],
)
def test_what_to_do_without_a_last_checkpoint_is_the_subcommand_s(subcommand: str, advice: str, tmp_path: Path) -> None:
    """To start anew was the advice to export too, which took ``last`` by itself."""
    with pytest.raises(UserError) as error:
        last_checkpoint([tmp_path], subcommand)
    assert advice in str(error.value)


@pytest.mark.parametrize("target", ["gone.ckpt", "last.ckpt"])
def test_a_link_that_leads_nowhere_starts_nothing_anew(
    target: str, used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LAST.unlink()
    LAST.symlink_to(target)
    before = sorted(map(str, (used_folder / "runs").rglob("*")))
    assert run_console(monkeypatch, "fit", "--config", write(config(max_steps=8)), "--ckpt_path=last") == 1
    assert f"last.ckpt is a link to {target!r}, which is not there" in capsys.readouterr().err
    assert sorted(map(str, (used_folder / "runs").rglob("*"))) == before


def test_last_is_not_what_only_begins_so(
    used_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest file beside it is a copy of an older checkpoint."""
    shutil.copy(LAST, LAST.with_name("last-v1.ckpt"))
    checkpoint = torch.load(LAST, weights_only=True)
    assert run_console(monkeypatch, "fit", "--config", write(config(max_steps=5)), "--ckpt_path=last") is None
    assert torch.load(LAST, weights_only=True)["global_step"] == checkpoint["global_step"] + 1
    assert f"Restoring states from the checkpoint path at {LAST}" in caplog.text


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
    rates, optimizer = Rates(), functools.partial(torch.optim.AdamW, lr=lr, weight_decay=decay)
    grpo = module(optimizer=optimizer, lr_scheduler=schedule)
    fit(grpo, steps, [rates, every_step(folder)], enable_checkpointing=True, ckpt_path=ckpt_path)
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
        grpo = module(optimizer=lambda p: Counting(p, 0.1, most), lr_scheduler=SCHEDULES["partial"])
        trainer = fit(grpo, steps, [every_step(tmp_path)], enable_checkpointing=True, ckpt_path=ckpt_path)
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
    fit(module(steps_per_generation=2), 1, [every_step(tmp_path)], enable_checkpointing=True)
    grpo = module(steps_per_generation=2, beta=0.1)
    fit(grpo, 2, [every_step(tmp_path)], enable_checkpointing=True, ckpt_path=str(tmp_path / "last.ckpt"))
    assert grpo.trainer.global_step == 2
