"""Checks of a subcommand's parsed configuration before a model is loaded: folders, checkpoints, callbacks, launch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.callbacks.outputs.checkpoint import RolloutCheckpoint, default_folder
from sparse_rl_lightning.checkpoints.durable import weights_beside
from sparse_rl_lightning.cli.classes import imported, named_classes
from sparse_rl_lightning.distributed.deepspeed import not_deepspeed
from sparse_rl_lightning.distributed.fsdp2 import not_fsdp
from sparse_rl_lightning.distributed.ranks import check_processes
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import recover, replaced

LAST = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"
NAMED_CHECKPOINTS = ("hpc", "registry")
"""Values that Lightning's ``ckpt_path`` allows instead of a path, except ``last``."""
OR_ELSE = {"fit": ", or leave ckpt_path out to start anew", "export": ": export takes last unless ckpt_path names one"}
"""What else there is to do without a ``last``; other subcommands work without a checkpoint."""


def note_seed(config: Any, name: list[str], seed: int) -> None:
    """Set a seed where the configuration has none, so that what is written of a run has those that it drew by."""
    at = config if name[0] == "data" else config["model"]["init_args"]
    for key in name[:-1]:
        at = at[int(key)] if isinstance(at, list) else at.get(key)
        if isinstance(at, Namespace):
            at = at.get("init_args", at)
        elif not isinstance(at, list):
            return  # a path, or an object that Python has made
    if at.get(name[-1], seed) is None:
        at[name[-1]] = seed


def check_process_seed(config: Any) -> None:
    """Refuse a seed that numpy would not accept.

    Raises:
        ValueError: If ``seed_everything`` is negative or has more than 32 bits.
    """
    if not isinstance(config.seed_everything, bool):
        check_number("seed_everything", config.seed_everything, least=0, most=2**32 - 1)


def check_folders(config: Any) -> None:
    """Refuse folders that cannot be written now, instead of failing after the first rollout.

    Raises:
        ValueError: If ``default_root_dir`` or a folder of the logger or of ModelCheckpoint cannot be written.
    """
    _check_writable(config.trainer.default_root_dir or ".", "trainer.default_root_dir")
    for logger in named_classes(config.trainer.logger):
        _check_writable(logger.init_args.get("save_dir"), "trainer.logger.init_args.save_dir")
    for folder in checkpoint_folders(config):
        _check_writable(folder, "dirpath of ModelCheckpoint")
        weights = weights_beside(Path(folder).expanduser() / LAST).parent
        if weights.is_symlink() or weights.is_file():
            raise UserError(
                f"{weights} must be a folder, for the weights beside checkpoints; it is a file, or a link, and nothing "
                "is written through links out of a run's folder. Remove it."
            )


def check_checkpoint(config: Any, subcommand: str = "fit") -> None:
    """Refuse a missing checkpoint, ``last`` above all: it must not become a silent start from zero.

    The word ``last`` is replaced by its path: Lightning would take the newest file whose name begins with it, and start
    anew if it finds none.

    Raises:
        ValueError: If it does not exist.
    """
    ckpt_path = config.get("ckpt_path")
    if ckpt_path == "hpc" and not list(Path(config.trainer.default_root_dir or ".").glob("hpc_ckpt_*.ckpt")):
        raise UserError("ckpt_path=hpc: no scheduler's hpc_ckpt_*.ckpt is in trainer.default_root_dir. Give a path.")
    if ckpt_path is None or ckpt_path in NAMED_CHECKPOINTS:
        return
    if ckpt_path == "last":
        folders = list(checkpoint_folders(config))
        if remote := [folder for folder in folders if "://" in folder]:
            address = f"{remote[0].rstrip('/')}/{LAST}"
            ways = f"Give the address: --ckpt_path={address}{_or_else(subcommand)}."
            if subcommand == "export":  # which reads files only
                ways = f"Copy {address} to this machine, and give --ckpt_path=FILE."
            raise UserError(f"ckpt_path=last looks into local folders, and {remote[0]} is none. {ways}")
        config.ckpt_path = last_checkpoint([Path(folder).expanduser() for folder in folders], subcommand)
    elif ckpt_path in ("", "best"):  # which the trainer knows of a training in the same process only
        raise UserError(f"ckpt_path={ckpt_path!r} names no checkpoint. Give a path, or 'last'{_or_else(subcommand)}.")
    elif "://" not in str(ckpt_path):
        config.ckpt_path = os.path.expanduser(ckpt_path)  # a shell leaves ~ behind an equals sign
        recover(Path(config.ckpt_path))
        _check_exists(Path(config.ckpt_path), f"ckpt_path={str(ckpt_path)!r}")


def last_checkpoint(folders: Sequence[Path], subcommand: str = "fit") -> str:
    """The ``last.ckpt`` of the folders that ModelCheckpoints write to: a file, or the folder of a sharded one.

    Raises:
        ValueError: If there is none, more than one, or a link that leads nowhere.
    """
    paths = [folder / LAST for folder in dict.fromkeys(folders)]
    for path in paths:
        recover(path)
    existing = [path for path in paths if path.exists() or path.is_symlink()]
    if len(existing) > 1:
        raise UserError(
            f"ckpt_path=last: there are {' and '.join(map(str, existing))}. Give the path of the one to go on with."
        )
    if not existing:
        looked = [str(folder) for folder in folders] or "any folder of a checkpoint callback"
        alternatives = ", ".join(str(path) for folder in folders for path in sorted(folder.glob("*.ckpt")))
        but = f", but there are {alternatives}" if alternatives else ""
        raise UserError(
            f"ckpt_path=last: there is no {LAST} in {looked}{but}. Give the path of a checkpoint"
            f"{_or_else(subcommand)}. RolloutCheckpoint writes last.ckpt, and so does ModelCheckpoint with "
            "save_last: true and a fixed dirpath."
        )
    _check_exists(existing[0], f"ckpt_path=last: {existing[0]}")
    if numbered := sorted(existing[0].parent.glob("last-v*.ckpt")):
        rank_zero_warn(
            f"ckpt_path=last is {existing[0]}. Beside it is {numbered[-1].name}, of a run that was started anew in the "
            "same folder (enable_version_counter of ModelCheckpoint); to go on with that one, give its path."
        )
    return str(existing[0])


def _or_else(subcommand: str) -> str:
    """The end of a sentence that asks for a checkpoint."""
    return OR_ELSE.get(subcommand, ", or leave ckpt_path out to take model.policy as it is")


def _check_exists(path: Path, setting: str) -> None:
    if path.exists():
        return
    if path.is_symlink():
        raise UserError(f"{setting} is a link to {os.readlink(path)!r}, which is not there. Give another checkpoint.")
    raise UserError(f"{setting} does not exist. Give the path of a checkpoint, or 'last'.")


def check_launch(config: Any) -> None:
    """Refuse strategies and processes that the module would refuse as well, but that Lightning's trainer meets first.

    Raises:
        ValueError: If the strategy is Lightning's own DeepSpeed or FSDP, there is no GPU to train on, or a different
            number of processes was started.
    """
    strategy = config.trainer.strategy
    name = strategy if isinstance(strategy, str) else str(getattr(strategy, "class_path", "")).rpartition(".")[2]
    if name.startswith("deepspeed") or name == "DeepSpeedStrategy":
        raise UserError(not_deepspeed(f"trainer.strategy={name}"))
    if name.startswith("fsdp") or name in ("FSDPStrategy", "ModelParallelStrategy"):
        raise UserError(not_fsdp(f"trainer.strategy={name}", is_flat=name != "ModelParallelStrategy"))
    devices = config.trainer.devices
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if config.trainer.accelerator in ("gpu", "cuda") and not has_gpu:
        raise UserError(
            f"trainer.accelerator={config.trainer.accelerator}: torch can use no GPU here, and `sparse-rl doctor` says "
            "what is missing. Set it to cpu to train without one."
        )
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if isinstance(devices, int) and devices > 0:
        check_processes(devices * config.trainer.num_nodes)


def warn_of_earlier_run(config: Any) -> None:
    """Warn that a new run is going to overwrite the files of an earlier one."""
    if config.get("ckpt_path") is not None or config.trainer.fast_dev_run:
        return
    used = [folder for folder in checkpoint_folders(config) if _holds_checkpoints(Path(folder).expanduser())]
    if used:
        rank_zero_warn(
            f"{used[0]} holds checkpoints of an earlier run. This run starts anew and overwrites them and the earlier "
            "reports. To go on with the earlier run instead, add --ckpt_path=last."
        )


def checkpoint_folders(config: Any) -> Iterator[str]:
    """The fixed folders of all checkpoint callbacks."""
    for callback in named_classes(config.trainer.callbacks):
        callback_class = imported(callback.class_path)
        if not (isinstance(callback_class, type) and issubclass(callback_class, ModelCheckpoint)):
            continue
        if folder := callback.init_args.get("dirpath"):
            yield str(folder)
        elif issubclass(callback_class, RolloutCheckpoint):
            yield default_folder(config.trainer.default_root_dir)


def name_logger(config: Any, num_added: int = 0) -> None:
    """Write ``metrics.csv`` to ``default_root_dir``, the folder named after the run, if no logger is configured.

    Loggers that the command line adds (``--trainer.logger+=``), so many of them, do not take its place.
    """
    trainer = config.trainer
    added = trainer.logger if isinstance(trainer.logger, list) and len(trainer.logger) == num_added else []
    is_open = trainer.logger is None or trainer.logger is True or added
    if trainer.default_root_dir and is_open and not trainer.barebones:
        folder, name = os.path.split(trainer.default_root_dir.rstrip("/"))
        arguments = {"save_dir": folder or ".", "name": name}
        csv = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": arguments}
        trainer.logger = [csv, *added] if added else csv


def _holds_checkpoints(folder: Path) -> bool:
    """Whether there is any checkpoint, including one that a killed run was replacing."""
    return any(folder.glob("*.ckpt")) or any(replaced(folder / "x").parent.glob("*.ckpt"))


def _check_writable(folder: Any, argument: str) -> None:
    """Try to write to the folder or its first existing parent, without creating any."""
    if folder is None or "://" in str(folder):
        return
    path = Path(folder).expanduser()
    try:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"{argument}={str(path)!r} cannot be written: {error.strerror}. Give a folder you may write to."
        ) from error
