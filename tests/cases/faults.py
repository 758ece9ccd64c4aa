"""Cases of checkpoints, folders and disks: a run was there before, or the machine fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cases.case import Case

LAST = Path("runs/own/checkpoints/last.ckpt")


class Planted:
    """Runs a command when somebody unpickles it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def shortened(folder: Path) -> None:
    """The last checkpoint without its second half."""
    content = (folder / LAST).read_bytes()
    (folder / "old.ckpt").write_bytes(content[: len(content) // 2])


def planted(*, zipped: bool = True) -> Callable[[Path], None]:
    """A checkpoint with a command in it, in torch's format or its old one."""
    return lambda folder: torch.save({"x": Planted()}, folder / "old.ckpt", _use_new_zipfile_serialization=zipped)


def link_that_leads_nowhere(folder: Path) -> None:
    """In place of the last checkpoint."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "last.ckpt").symlink_to("gone.ckpt")


def planted_link(folder: Path) -> None:
    """A link where checkpoints are written before they get their name."""
    (folder / "victim").write_text("mine")
    (folder / "runs/own/checkpoints/.incomplete").mkdir(exist_ok=True)
    (folder / "runs/own/checkpoints/.incomplete/last.ckpt").symlink_to(folder / "victim")


OLD = "--ckpt_path=old.ckpt"
CASES = [
    Case("`--ckpt_path` of a folder without a checkpoint",
         "ckpt_path='empty' is a folder without a checkpoint of DeepSpeed or FSDP2. Name a file, or last.", 1,
         "--ckpt_path=empty", prepare=lambda folder: (folder / "empty").mkdir()),
    Case("a checkpoint that is cut off", "ckpt_path='old.ckpt'", 1, OLD, prepare=shortened),
    Case("a checkpoint with a command in it", "ckpt_path='old.ckpt'", 1, OLD, prepare=planted()),
    Case("the same in torch's old format", "ckpt_path='old.ckpt'", 1, OLD, prepare=planted(zipped=False), slow=True),
    Case("`--ckpt_path=last`, which is a link that leads nowhere", "is a link to 'gone.ckpt', which is not there", 1,
         "--ckpt_path=last", prepare=link_that_leads_nowhere,
         edit=lambda values: values["trainer"]["callbacks"][-1]["init_args"].update(dirpath="elsewhere")),
    Case("resume with another `num_iterations`", "`max_steps=5` reached", 0,
         "--ckpt_path=last --trainer.max_steps=5",
         edit=lambda values: values["model"]["init_args"].update(num_iterations=2)),
    Case("a link planted under `.incomplete/`", prepare=planted_link, slow=True),
]  # fmt: skip
