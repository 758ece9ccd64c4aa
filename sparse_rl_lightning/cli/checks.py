"""What can be refused before a model is loaded: folders that cannot be written, checkpoints that are not there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.checkpoints import recover
from sparse_rl_lightning.checkpoints.files import replaced
from sparse_rl_lightning.ranges import check_number

NAMED_CHECKPOINTS = ("best", "hpc", "registry")
"""What Lightning's ``ckpt_path`` may say instead of a path, ``last`` apart."""


def check_process_seed(config: Any) -> None:
    """Refuse a seed that numpy does not take.

    Args:
        config: The parsed configuration of a subcommand.

    Raises:
        ValueError: If ``seed_everything`` is negative or has more than 32 bits.
    """
    if not isinstance(config.seed_everything, bool):
        check_number("seed_everything", config.seed_everything, least=0, most=2**32 - 1)


def check_folders(config: Any) -> None:
    """Find out now, not after the first rollout, that nothing can be written.

    Args:
        config: The parsed configuration of a subcommand.

    Raises:
        ValueError: If ``default_root_dir`` or a folder of the logger or of ModelCheckpoint cannot be written.
    """
    _check_writable(config.trainer.default_root_dir or ".", "trainer.default_root_dir")
    for logger in _objects(config.trainer.logger):
        _check_writable(logger.init_args.get("save_dir"), "trainer.logger.init_args.save_dir")
    for folder in checkpoint_folders(config):
        _check_writable(folder, "dirpath of ModelCheckpoint")


def check_checkpoint(config: Any) -> None:
    """A missing checkpoint, ``last`` above all, must not become a silent start from zero.

    Args:
        config: The parsed configuration of a subcommand.

    Raises:
        ValueError: If it is not there.
    """
    ckpt_path = config.get("ckpt_path")
    if ckpt_path is None or ckpt_path in NAMED_CHECKPOINTS:
        return
    if ckpt_path != "last":
        if "://" not in str(ckpt_path) and not Path(ckpt_path).exists():
            raise ValueError(f"ckpt_path={str(ckpt_path)!r} does not exist. Give the path of a checkpoint, or 'last'.")
        return
    folders = list(checkpoint_folders(config))
    for folder in folders:
        recover(Path(folder) / "last.ckpt")
    found = [path for folder in folders for path in Path(folder).glob("*.ckpt")]
    if not any(path.name.startswith("last") for path in found):
        others = f", but there are {', '.join(map(str, found))}" if found else ""
        raise ValueError(
            f"ckpt_path=last: there is no last.ckpt in {folders or 'any ModelCheckpoint.dirpath'}{others}. Give the "
            "path of a checkpoint, or leave ckpt_path out to start anew. ModelCheckpoint writes last.ckpt with "
            "save_last: true and a fixed dirpath."
        )


def warn_of_earlier_run(config: Any) -> None:
    """Say that a new run is going to overwrite what an earlier one left.

    Args:
        config: The parsed configuration of ``fit``.
    """
    if config.get("ckpt_path") is not None or config.trainer.fast_dev_run:
        return
    used = [folder for folder in checkpoint_folders(config) if _holds_checkpoints(Path(folder))]
    if used:
        rank_zero_warn(
            f"{used[0]} holds checkpoints of an earlier run. This run starts anew and overwrites them and the earlier "
            "reports. To go on with the earlier run instead, add --ckpt_path=last."
        )


def checkpoint_folders(config: Any) -> Iterator[str]:
    """The fixed folders of all ModelCheckpoint callbacks."""
    for callback in _objects(config.trainer.callbacks):
        if callback.class_path.endswith("ModelCheckpoint") and callback.init_args.get("dirpath"):
            yield str(callback.init_args.dirpath)


def _holds_checkpoints(folder: Path) -> bool:
    """Whether any is there, be it one that a killed run was replacing."""
    return any(folder.glob("*.ckpt")) or any(replaced(folder / "x").parent.glob("*.ckpt"))


def _objects(value: Any) -> list[Any]:
    """The classes that a configuration names in one place: none, one or a list."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if hasattr(item, "class_path")]


def _check_writable(folder: Any, argument: str) -> None:
    """Try the folder or the first of its parents that exists, without creating any."""
    if folder is None or "://" in str(folder):
        return
    path = Path(folder).expanduser()
    try:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"{argument}={str(path)!r} cannot be written: {error.strerror}. Give a folder you may write to."
        ) from error
