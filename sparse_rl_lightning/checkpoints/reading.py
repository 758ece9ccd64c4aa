"""Reading a checkpoint file: checks that it is one and unchanged, and unpickles no objects."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from sparse_rl_lightning.checkpoints.manifest import NAME
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import check_regular
from sparse_rl_lightning.text import printable

PARTS = ("state_dict", "global_step", "pytorch-lightning_version")
"""The entries of every Lightning checkpoint."""


def read_checkpoint(
    path: Path, map_location: Callable[..., Any] | str | None = "cpu", weights_only: bool = True
) -> dict[str, Any]:
    """A checkpoint of one device or DDP; a folder, a damaged or any other file, and pickled objects are refused.

    Devices of the tensors are as for ``torch.load``. ``weights_only`` reads tensors, numbers and texts only.
    """
    check_whole(path)
    setting = f"ckpt_path={str(path)!r}"
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location, weights_only=weights_only)
    except pickle.UnpicklingError:
        raise UserError(
            f"{setting} holds pickled objects{_named(path)}, which could run any code, and is not read: what this "
            "package saves now is tensors, numbers and texts. Give another checkpoint, or start anew from weights: an "
            "earlier save has its policy's in the folder weights/ beside it."
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # torch may raise anything on made-up bytes
        raise UserError(f"{setting} cannot be read: {type(error).__name__}. Give another checkpoint.") from None
    missing = [name for name in PARTS if not isinstance(checkpoint, dict) or name not in checkpoint]
    if missing:
        raise UserError(
            f"{setting} is not a Lightning checkpoint: it has no {missing[0]!r}. A model folder or a file of weights "
            "belongs under model.policy."
        )
    return checkpoint


def _named(path: Path) -> str:
    """The classes and functions that a file refers to, which are not looked up."""
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # torch may raise anything on made-up bytes
        return ""
    return f" ({printable(', '.join(sorted(names)), 100)})" if names else ""


def check_whole(path: Path) -> None:
    """Compare a file with the checksums that ``torch.save`` wrote into it, which ``torch.load`` does not do."""
    setting = f"ckpt_path={str(path)!r}"
    if path.is_dir():
        raise UserError(_why_no_file(path))
    try:
        check_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4)
            if start != b"PK\x03\x04":
                what = "is empty" if size == 0 else "is not a checkpoint: torch.save did not write it"
                raise UserError(f"{setting} {what}. Give the path of a checkpoint, or 'last'.")
            with zipfile.ZipFile(file) as archive:
                is_bomb = sum(entry.file_size for entry in archive.infolist()) > size  # torch.save does not compress
                damaged = "its contents" if is_bomb else archive.testzip()
    except OSError as error:
        raise UserError(f"{setting} cannot be read: {error}. Give the path of a checkpoint, or 'last'.") from None
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, EOFError, RuntimeError, UnicodeError) as error:
        damaged = f"it is cut off, or its directory is damaged: {error}"
    if damaged is not None:
        raise UserError(
            f"{setting} is not as it was written ({damaged}). Resume from another checkpoint of the folder, or start "
            "anew from weights of its folder weights/."
        )


def _why_no_file(folder: Path) -> str:
    """An explanation of what a folder in place of a checkpoint file is, and how to use it."""
    setting = f"ckpt_path={str(folder)!r} is a"
    if (folder / NAME).is_file():
        return (
            f"{setting} checkpoint folder of DeepSpeed or FSDP2, one device and DDP read a single file. Resume with "
            "--trainer.strategy=sparse_rl_deepspeed_stage_1, _2 or _3, or sparse_rl_fsdp2, or write its weights with "
            "sparse-rl export and name that folder under model.policy."
        )
    if (folder / "config.json").is_file():
        return f"{setting} model folder, not a checkpoint. Name it under model.policy."
    return f"{setting} folder without a checkpoint of DeepSpeed or FSDP2. Name a file, or last."
