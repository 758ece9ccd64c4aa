"""The command line: ``sparse-rl fit|validate|test|predict --config FILE``, a plain LightningCLI, and ``doctor``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# imported so that a configuration can name their classes without the whole path
import sparse_rl_lightning.callbacks
import sparse_rl_lightning.compressors
import sparse_rl_lightning.data
import sparse_rl_lightning.modules
import sparse_rl_lightning.rewards  # noqa: F401
from sparse_rl_lightning import __version__, doctor
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.modules.base import PolicyModule


class SparseRLCLI(LightningCLI):
    """LightningCLI that refuses a missing ``last`` checkpoint instead of silently starting over."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the number of torch threads: on a small machine one's own choice beats the default."""
        parser.add_argument("--num_threads", type=int | None, default=None, help="CPU threads of torch, null: default")

    def before_instantiate_classes(self) -> None:
        """Settle what must hold before any model is built.

        Raises:
            ValueError: If the checkpoint to resume from does not exist, or the output folder cannot be written.
        """
        config = self.config[self.subcommand] if self.subcommand else self.config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        _check_writable(config.trainer.default_root_dir)
        _check_checkpoint(config.get("ckpt_path"), config)

    def before_fit(self) -> None:
        """Nothing yet: a place for subclasses."""


def main(args: ArgsType = None) -> LightningCLI:
    """Run the command line, or the same from Python with a list of arguments.

    Args:
        args: Arguments as on the command line, default those of the process.

    Returns:
        The CLI with its ``trainer``, ``model`` and ``datamodule``.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own class_path: mine.Compressor
    return SparseRLCLI(
        PolicyModule,
        PromptDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        # not config.yaml: the folder may hold the user's own
        save_config_kwargs={"overwrite": True, "config_filename": "run_config.yaml"},
        parser_kwargs={"version": __version__},
        args=args,
    )


def console() -> None:
    """The console script ``sparse-rl``: user errors end with one line, not with a traceback."""
    if sys.argv[1:] == ["doctor"]:
        doctor.main()
    else:
        main()


def _check_writable(folder: str | os.PathLike[str] | None) -> None:
    """Find out now, not after the first rollout, that nothing can be written."""
    path = Path(folder or ".")
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(
            f"trainer.default_root_dir={str(path)!r} cannot be written (checked {str(existing)!r}). "
            "Give a folder you may write to."
        )


def _check_checkpoint(ckpt_path: Any, config: Any) -> None:
    """A missing checkpoint, ``last`` above all, must not become a silent start from zero."""
    if ckpt_path is None or ckpt_path in ("best", "hpc", "registry"):
        return
    if ckpt_path != "last":
        if not Path(ckpt_path).exists():
            raise ValueError(f"ckpt_path={str(ckpt_path)!r} does not exist. Give the path of a checkpoint, or 'last'.")
        return
    folders = [
        callback.init_args.get("dirpath")
        for callback in config.trainer.callbacks or []
        if callback.class_path.endswith("ModelCheckpoint")
    ]
    found = [path for folder in folders if folder for path in Path(folder).glob("last*.ckpt")]
    if not found:
        raise ValueError(
            f"ckpt_path=last: there is no last.ckpt in {folders or 'any ModelCheckpoint.dirpath'}. Give the "
            "ModelCheckpoint callback a fixed dirpath and save_last: true, or leave ckpt_path out to start anew."
        )
