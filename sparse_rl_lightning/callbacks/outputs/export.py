"""ExportPolicy: a Hugging Face folder of the policy at the end of training."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from sparse_rl_lightning.callbacks.outputs.checkpoint import checkpoint_folder
from sparse_rl_lightning.callbacks.outputs.device import on_training_device
from sparse_rl_lightning.checkpoints.exports import Kept, check_replaceable, export_place
from sparse_rl_lightning.checkpoints.folders import check_dtype
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import incomplete, replace_folder
from sparse_rl_lightning.rollout.generator import Generator


class ExportPolicy(Callback):
    """Write policy and tokenizer as a Hugging Face folder at the end of ``fit``, atomically.

    An interrupted run or a trial run (``fast_dev_run``) leaves an existing folder unchanged; if it is killed between
    the two renames at its end, the next one that exports there brings that folder back first. Weights that are
    sharded over ranks are gathered.

    Args:
        folder: Folder to write; the export of an earlier run there is replaced, and nothing else: no folder with other
            files in it, none that holds the run, and none that is, holds or is in a folder of its checkpoints or log
            or that of ``model.policy``.
        dtype: Type of the weights in it, ``float32``, ``bfloat16`` or ``float16``; null for that of the trained policy,
            float32 unless the policy was given another. ``bfloat16`` halves a float32 export, and rounds it.

    Raises:
        ValueError: At the start of ``fit``, if the folder cannot be written, must not be replaced, or the module cannot
            export; at its end, if the folder must not be replaced any more, or weights are not finite.
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
            check_replaceable(self.folder, "ExportPolicy: folder", kept_folders(trainer, pl_module))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export beside the folder, then rename."""
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info(f"ExportPolicy: a trial run (fast_dev_run), {self.folder} is left as it is.")
            return
        if isinstance(generator := getattr(pl_module, "generator", None), Generator):
            generator.release()  # the copy that adapters are merged into takes its memory
        with on_training_device(trainer):
            write_policy(pl_module, self.folder, self.dtype, kept_folders(trainer, pl_module))


def write_policy(module: LightningModule, folder: Path, dtype: str | None = None, kept: Kept = ()) -> None:
    """Export beside the folder, of :func:`export_place`, then rename. All ranks call this, rank zero writes.

    Raises:
        ValueError: If something else has come to the folder since it was checked, which stays.
    """
    options = {} if dtype is None else {"dtype": dtype}  # a user's module may have none

    def write(new: Path) -> None:
        module.export(new, **options)  # type: ignore[operator]  # checked in setup
        if module.global_rank == 0:
            check_replaceable(folder, "folder", kept)

    if module.global_rank == 0:
        replace_folder(folder, write)
        rank_zero_info(f"Policy written to {folder}")
    else:
        write(incomplete(folder))


def kept_folders(trainer: Trainer, module: LightningModule) -> Kept:
    """The folders that no export may replace: the run's, those of log and checkpoints, and the policy's own.

    Each has a name, and says whether it counts what lies in it too: a run's folder may hold the run's export.
    """
    source: Any = getattr(module, "policy_source", None)
    while hasattr(source, "base"):
        source = source.base
    folders = {
        "the log's folder": [getattr(logger, "log_dir", None) for logger in trainer.loggers],
        "a folder of checkpoints": [checkpoint_folder(callback, trainer) for callback in trainer.checkpoint_callbacks],
        "the folder of model.policy": [getattr(source, "path", None)],
    }
    root = export_place(trainer.default_root_dir)
    return [
        ("trainer.default_root_dir", str(root), False),
        *(
            (name, path, not root.is_relative_to(export_place(path)))
            for name, paths in folders.items()
            for path in paths
            if path and "://" not in str(path)
        ),
    ]
