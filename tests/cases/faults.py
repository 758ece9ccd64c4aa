"""Cases of checkpoints, folders and disks: a run was there before, or the machine fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cases.case import Case


def checkpoint(content: Any) -> Any:
    """A file old.ckpt, of an object or of bytes."""

    def write(folder: Path) -> None:
        if isinstance(content, bytes):
            (folder / "old.ckpt").write_bytes(content)
        else:
            torch.save(content, folder / "old.ckpt")

    return write


RESUME = [
    Case("`--ckpt_path` of a folder without a checkpoint",
         "ckpt_path='empty' is a folder without a checkpoint of DeepSpeed or FSDP2. Name a file, or last.", 1,
         "--ckpt_path=empty", prepare=lambda folder: (folder / "empty").mkdir()),
]  # fmt: skip

LAST = Path("runs/own/checkpoints/last.ckpt")


class Planted:
    """Runs a command when somebody unpickles it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def shortened(folder: Path) -> None:
    """The last checkpoint without its second half."""
    content = (folder / LAST).read_bytes()
    (folder / "old.ckpt").write_bytes(content[: len(content) // 2])


def damaged(folder: Path) -> None:
    """The last checkpoint with other bytes in its middle."""
    content = bytearray((folder / LAST).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64 * [0xA5])
    (folder / "old.ckpt").write_bytes(content)


def without(key: str) -> Callable[[Path], None]:
    """The last checkpoint without one of its parts."""

    def write(folder: Path) -> None:
        content = torch.load(folder / LAST, weights_only=True)
        del content[key]
        torch.save(content, folder / "old.ckpt")

    return write


def elsewhere(values: dict[str, Any]) -> None:
    """Checkpoints in another folder than before."""
    values["trainer"]["callbacks"][-1]["init_args"]["dirpath"] = "elsewhere"


def made(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """That folder with something in it."""

    def write(folder: Path) -> None:
        (folder / "elsewhere").mkdir()
        make(folder / "elsewhere")

    return write


def model(**settings: Any) -> Callable[[dict[str, Any]], None]:
    """Other arguments of the module."""
    return lambda values: values["model"]["init_args"].update(settings)


def legacy(folder: Path) -> None:
    """A command in a checkpoint of torch's old format."""
    torch.save({"x": Planted()}, folder / "old.ckpt", _use_new_zipfile_serialization=False)


def broken_weight(folder: Path) -> None:
    """The last checkpoint with NaN in one weight."""
    content = torch.load(folder / LAST, weights_only=True)
    next(iter(content["state_dict"].values())).view(-1)[0] = torch.nan
    torch.save(content, folder / "old.ckpt")


OLD, RESUMED, DONE = "--ckpt_path=old.ckpt", "--ckpt_path=last --trainer.max_steps=5", "`max_steps=5` reached"
CHECKPOINTS = [
    Case("an empty file as checkpoint", "ckpt_path='old.ckpt' is empty", 1, OLD, prepare=checkpoint(b""), slow=True),
    Case("a text as checkpoint", "ckpt_path='old.ckpt'", 1, OLD, prepare=checkpoint(b"hello"), slow=True),
    Case("a checkpoint that is cut off", "ckpt_path='old.ckpt'", 1, OLD, prepare=shortened),
    Case("a checkpoint with other bytes in its middle", "ckpt_path='old.ckpt'", 1, OLD, prepare=damaged, slow=True),
    Case("a checkpoint with a command in it", "ckpt_path='old.ckpt'", 1, OLD, prepare=checkpoint({"x": Planted()})),
    Case("the same in torch's old format", "ckpt_path='old.ckpt'", 1, OLD, prepare=legacy, slow=True),
    Case("the same for `sparse-rl validate`", "ckpt_path='old.ckpt'", 1, OLD, "validate", slow=True,
         edit=lambda values: values["trainer"].update(limit_val_batches=1), prepare=checkpoint({"x": Planted()})),
    Case("zeros as checkpoint", "ckpt_path='old.ckpt'", 1, OLD, prepare=checkpoint(bytes(4096)), slow=True),
    Case("JSON as checkpoint", "ckpt_path='old.ckpt'", 1, OLD, prepare=checkpoint(b"[1, 2]"), slow=True),
    Case("a list as checkpoint", "ckpt_path='old.ckpt'", 1, OLD, prepare=checkpoint([1, 2]), slow=True),
    Case("a tensor as checkpoint", "ckpt_path='old.ckpt'", 1, OLD, prepare=checkpoint(torch.zeros(2)), slow=True),
    Case("a checkpoint with NaN in a weight", "NaN", 1, OLD, prepare=broken_weight, slow=True),
    Case("a checkpoint without its loops", "this checkpoint has no 'loops'", 1, OLD, slow=True,
         prepare=without("loops")),
    Case("the weights beside a checkpoint", "ckpt_path='runs/own/checkpoints/weights/last.safetensors'", 1, slow=True,
         args="--ckpt_path=runs/own/checkpoints/weights/last.safetensors"),
    Case("the folder of the checkpoints", "is a folder without a checkpoint", 1, "--ckpt_path=runs/own/checkpoints",
         slow=True),
    Case("`--ckpt_path=last`, which is a link to itself", "is a link to 'last.ckpt'", 1, "--ckpt_path=last",
         edit=elsewhere, prepare=made(lambda folder: (folder / "last.ckpt").symlink_to("last.ckpt")), slow=True),
    Case("weights of something else as checkpoint", "ckpt_path", 1, OLD, slow=True,
         prepare=checkpoint({"state_dict": {"x": torch.zeros(2)}})),
    Case("a checkpoint without its optimizer", "this checkpoint has no 'optimizer_states'", 1, OLD,
         prepare=without("optimizer_states"), slow=True),
    Case("a checkpoint without its part of the data", "this checkpoint has no", 1, OLD,
         prepare=without("sparse_rl"), slow=True),
    Case("`--ckpt_path=last`, which is a link that leads nowhere", "is a link to 'gone.ckpt', which is not there", 1,
         "--ckpt_path=last", edit=elsewhere,
         prepare=made(lambda folder: (folder / "last.ckpt").symlink_to("gone.ckpt"))),
    Case("`--ckpt_path=last` beside a `lastweek.ckpt`", "there is no last.ckpt in", 1, "--ckpt_path=last",
         edit=elsewhere, prepare=made(lambda folder: (folder / "lastweek.ckpt").touch()), slow=True),
]  # fmt: skip

CHANGED = [
    Case("resume with other prompts", "place in the data fits another run", 1, RESUMED, slow=True,
         edit=lambda values: values["data"]["init_args"].update(num_train=12)),
    Case("resume with another `num_iterations`", "`max_steps=5` reached", 0, RESUMED, edit=model(num_iterations=2)),
    Case("resume with another `steps_per_generation`", "`max_steps=5` reached", 0, RESUMED, slow=True,
         edit=model(steps_per_generation=4)),
    Case("resume with other `prompts_per_rollout`", "fits another run", 1, RESUMED, slow=True,
         edit=lambda values: values["data"]["init_args"].update(prompts_per_rollout=2)),
    Case("resume with more layers", "this checkpoint is of another model", 1, RESUMED, slow=True,
         edit=lambda values: values["model"]["init_args"]["policy"]["init_args"].update(num_layers=3)),
    Case("resume with another width", "this checkpoint is of another model", 1, RESUMED, slow=True,
         edit=lambda values: values["model"]["init_args"]["policy"]["init_args"].update(hidden_size=64)),
    Case("resume with a reference policy", DONE, 0, RESUMED, edit=model(loss={"beta": 0.1}), slow=True),
    Case("resume with another compressor", DONE, 0, RESUMED, slow=True, edit=model(
        compressor={"class_path": "SnapKV", "init_args": {"budget": 12, "buffer": 4}})),
    Case("resume with other `num_generations`", DONE, 0, RESUMED, slow=True,
         edit=model(sampling={"num_generations": 4, "max_completion_length": 12})),
    Case("resume with another `max_completion_length`", DONE, 0, RESUMED, slow=True,
         edit=model(sampling={"num_generations": 2, "max_completion_length": 8})),
    Case("resume with another reward", DONE, 0, RESUMED, slow=True,
         edit=model(reward_funcs="sparse_rl_lightning.rewards.arithmetic_reward")),
    Case("resume in another precision", DONE, 0, f"{RESUMED} --trainer.precision=bf16-mixed", slow=True),
    Case("resume with nothing left to do", args="--ckpt_path=last --trainer.max_steps=1", slow=True),
    Case("resume with a schedule", DONE, 0, RESUMED, slow=True, edit=model(
        lr_scheduler={"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}})),
    Case("resume with another optimizer", "model.optimizer is torch.optim.sgd.SGD", 1, RESUMED, slow=True,
         edit=model(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})),
    Case("resume with another learning rate, which counts from now on", DONE, 0, RESUMED, slow=True,
         edit=model(optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}})),
]  # fmt: skip


def planted_link(folder: Path) -> None:
    """A link where checkpoints are written before they get their name."""
    (folder / "victim").write_text("mine")
    (folder / "runs/own/checkpoints/.incomplete").mkdir(exist_ok=True)
    (folder / "runs/own/checkpoints/.incomplete/last.ckpt").symlink_to(folder / "victim")


DISKS = [
    Case("a link planted under `.incomplete/`", prepare=planted_link, slow=True),
]  # fmt: skip

TOPICS = {"Checkpoints": RESUME + CHECKPOINTS, "Resuming": CHANGED, "Folders and disks": DISKS}
