"""Cases of checkpoints, folders and disks: a run was there before, or the machine fails."""

from __future__ import annotations

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

# Corrupt and foreign checkpoints, other data, a changed learning rate, links, locks, full disks: rows to be added.
CHECKPOINTS: list[Case] = []
DISKS: list[Case] = []

TOPICS = {"Resuming": RESUME, "Checkpoints": CHECKPOINTS, "Folders and disks": DISKS}
