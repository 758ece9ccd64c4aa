"""Files and folders that appear under their name when all of them is on the disk.

What is being written or replaced is in subfolders, because ``ckpt_path=last`` takes the newest entry beside the
checkpoints whose name has "last" in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparse_rl_lightning.files import own_folder, remove, sync, write_files


class _Watched:
    """A file that remembers why writing failed: torch.save reports a full disk as an internal error."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def incomplete(path: Path) -> Path:
    """Where ``path`` is written."""
    return path.parent / ".incomplete" / path.name


def replaced(path: Path) -> Path:
    """Where what ``path`` was waits until it is replaced."""
    return path.parent / ".replaced" / path.name


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written under another name, and rename it when it is on the disk; see :func:`write_files`."""
    write_files({path: write}, incomplete, durable=True)


def save_tensors(state: Mapping[str, Any], path: Path) -> None:
    """Write with ``torch.save``.

    Raises:
        OSError: If the file cannot be written, a full disk included.
    """
    with path.open("wb") as file:
        watched = _Watched(file)
        try:
            torch.save(state, watched)  # type: ignore[arg-type]  # has all that torch.save asks for
        except (OSError, RuntimeError):
            if watched.error is not None:
                raise watched.error from None
            raise


def save_weights(weights: Mapping[str, Tensor], path: Path, step: int) -> None:
    """Write safetensors: tensors that share memory once, with the number of optimiser steps as metadata.

    Raises:
        OSError: If the file cannot be written.
    """
    own: dict[str, Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, value in weights.items():
        place = (value.data_ptr(), value.numel())
        if value.numel() and place in seen:
            continue  # a tied output head; transformers leaves it out as well
        seen.add(place)
        own[name] = value.detach().cpu().contiguous()
    try:
        save_file(own, path, metadata={"format": "pt", "global_step": str(step)})
    except SafetensorError as error:
        raise OSError(f"safetensors: {error}") from error


def swap_folder(path: Path) -> None:
    """Give the folder at :func:`incomplete` its name; :func:`recover` ends a swap that was cut short."""
    new, old = incomplete(path), replaced(path)
    if path.exists():
        remove(old)
        own_folder(old.parent)
        path.rename(old)
    new.rename(path)
    sync(path.parent)
    remove(old)


def recover(path: Path) -> None:
    """Bring back what ``path`` was, if the process ended between the two renames of a swap.

    Any number of ranks may do so at the same time.
    """
    if path.exists() or not replaced(path).exists():
        return
    try:
        replaced(path).rename(path)
    except FileNotFoundError:
        pass  # another rank was faster
    except OSError:
        if not path.exists():
            raise
