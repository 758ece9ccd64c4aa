"""ExportPolicy: leave a Hugging Face folder behind when training has ended."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from sparse_rl_lightning.callbacks.folders import writable_folder


class ExportPolicy(Callback):
    """Write policy and tokenizer as a Hugging Face folder at the end of ``fit``, all of it or nothing.

    A run that is interrupted or only tried out (``fast_dev_run``) leaves an existing folder as it is. The weights
    must be whole on rank zero, so this is for strategies that do not shard parameters.

    Args:
        folder: Where to; the export of an earlier run there is replaced.

    Raises:
        ValueError: At the start of ``fit``, if the folder cannot be written, holds something else than a model, or
            the module cannot export.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out before training that the folder can be written."""
        if stage != "fit":
            return
        if not hasattr(pl_module, "export"):
            raise ValueError(
                f"ExportPolicy: {type(pl_module).__name__} has no export(folder). Use it with the modules of "
                "sparse_rl_lightning, or define that method."
            )
        if trainer.is_global_zero:
            writable_folder(self.folder.absolute().parent, "ExportPolicy: the parent of folder")
            if self.folder.exists():
                self._check_replaceable()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export beside the folder, then rename."""
        if not trainer.is_global_zero:
            return
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info(f"ExportPolicy: a trial run (fast_dev_run), {self.folder} is left as it is.")
            return
        new, old = (self.folder.with_name(f".{self.folder.name}.{end}-{os.getpid()}") for end in ("new", "old"))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        pl_module.export(new)  # type: ignore[operator]  # checked in setup
        if self.folder.exists():
            self.folder.rename(old)
        new.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        rank_zero_info(f"Policy written to {self.folder}")

    def _check_replaceable(self) -> None:
        path = writable_folder(self.folder, "ExportPolicy: folder")
        if any(path.iterdir()) and not (path / "config.json").is_file():
            raise ValueError(
                f"ExportPolicy: folder={str(path)!r} is not empty and holds no model (no config.json), so it is not "
                "replaced. Give a new folder, or empty this one."
            )
