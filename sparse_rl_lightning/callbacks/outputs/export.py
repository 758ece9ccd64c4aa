"""ExportPolicy: a Hugging Face folder of the policy at the end of training."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from sparse_rl_lightning.callbacks.outputs.device import on_training_device
from sparse_rl_lightning.checkpoints.folders import check_dtype
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import new_folder, recover_folder, replace_folder, writable_folder
from sparse_rl_lightning.rollout.generator import Generator


class ExportPolicy(Callback):
    """Write policy and tokenizer as a Hugging Face folder at the end of ``fit``, atomically.

    An interrupted run or a trial run (``fast_dev_run``) leaves an existing folder unchanged; if it is killed between
    the two renames at its end, the next one that exports there brings that folder back first. Weights that are
    sharded over ranks are gathered.

    Args:
        folder: Folder to write; the export of an earlier run there is replaced.
        dtype: Type of the weights in it, ``float32``, ``bfloat16`` or ``float16``; null for that of the trained policy,
            float32 unless the policy was given another. ``bfloat16`` halves a float32 export, and rounds it.

    Raises:
        ValueError: At the start of ``fit``, if the folder cannot be written, contains something other than a model, or
            the module cannot export.
    """

    def __init__(self, folder: str | Path, dtype: str | None = None) -> None:
        self.folder = export_place(folder)
        check_dtype(dtype, "ExportPolicy: dtype")
        self.dtype = dtype

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the folder can be written."""
        if stage != "fit":
            return
        if not hasattr(pl_module, "export"):
            raise UserError(
                f"ExportPolicy: {type(pl_module).__name__} has no export(folder). Use it with the modules of "
                "sparse_rl_lightning, or define that method."
            )
        if self.dtype is not None and "dtype" not in signature(cast(Callable[..., None], pl_module.export)).parameters:
            raise UserError(f"ExportPolicy: export of {type(pl_module).__name__} takes no dtype. Set dtype to null.")
        if trainer.is_global_zero:
            check_replaceable(self.folder, "ExportPolicy: folder")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export beside the folder, then rename."""
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info(f"ExportPolicy: a trial run (fast_dev_run), {self.folder} is left as it is.")
            return
        if isinstance(generator := getattr(pl_module, "generator", None), Generator):
            generator.release()  # the copy that adapters are merged into takes its memory
        with on_training_device(trainer):
            write_policy(pl_module, self.folder, self.dtype)


def write_policy(module: LightningModule, folder: Path, dtype: str | None = None) -> None:
    """Export beside the folder, of :func:`export_place`, then rename. All ranks call this, rank zero writes."""
    options = {} if dtype is None else {"dtype": dtype}  # a user's module may have none

    def write(new: Path) -> None:
        module.export(new, **options)  # type: ignore[operator]  # checked in setup

    if module.global_rank == 0:
        replace_folder(folder, write)
        rank_zero_info(f"Policy written to {folder}")
    else:
        write(new_folder(folder))


def export_place(folder: str | Path) -> Path:
    """The folder to write, where a link leads: it is made beside that place, and renamed there."""
    return Path(os.path.realpath(Path(folder).expanduser()))


def check_replaceable(folder: Path, argument: str) -> None:
    """Refuse a folder that contains something other than a model, or that cannot be renamed.

    One that a killed process was replacing is brought back first.

    Args:
        folder: The folder, of :func:`export_place`.
        argument: What names it, for the message.

    Raises:
        ValueError: If it is such a folder, or the one around it cannot be written.
    """
    writable_folder(folder.parent, f"{argument}'s parent")
    recover_folder(folder)
    if not os.path.lexists(folder):  # a circle of links is there
        return
    if folder.is_mount():
        raise UserError(f"{argument}={str(folder)!r} is a disk of its own, which is not replaced. Give a folder on it.")
    if Path.cwd().is_relative_to(folder):
        raise UserError(
            f"{argument}={str(folder)!r} is or holds the working directory, which is not replaced. Give a folder in it."
        )
    path = writable_folder(folder, argument)
    if any(path.iterdir()) and not (path / "config.json").is_file():
        raise UserError(
            f"{argument}={str(path)!r} is not empty and holds no model (no config.json), so it is not "
            "replaced. Give a new folder, or empty this one."
        )
