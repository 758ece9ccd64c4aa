"""Files and folders that appear under their name once all of them is on the disk.

Whatever is being written or replaced is in subfolders, because ``ckpt_path=last`` takes the newest entry beside the
checkpoints whose name contains "last".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparse_rl_lightning.files import own_folder, raising_disk_errors, remove, sync


def incomplete(path: Path) -> Path:
    """The path at which ``path`` is written first."""
    return path.parent / ".incomplete" / path.name


def replaced(path: Path) -> Path:
    """The path to which the old ``path`` moves until it is replaced."""
    return path.parent / ".replaced" / path.name


def save_tensors(state: Mapping[str, Any], path: Path) -> None:
    """Write with ``torch.save``; a full disk is an OSError too."""
    with path.open("wb") as file, raising_disk_errors():
        torch.save(state, file)


def save_weights(weights: Mapping[str, Tensor], path: Path, step: int) -> None:
    """Write safetensors: tensors that share memory once, with the number of optimizer steps as metadata."""
    own: dict[str, Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, value in weights.items():
        place = (value.data_ptr(), value.numel())
        if value.numel() and place in seen:
            continue  # a tied output head; transformers leaves it out as well
        seen.add(place)
        own[name] = value.detach().cpu().contiguous()
    with raising_disk_errors():
        save_file(own, path, metadata={"format": "pt", "global_step": str(step)})


def swap_folder(path: Path) -> None:
    """Rename the folder at :func:`incomplete` to its final name; :func:`recover` completes an interrupted swap."""
    new = incomplete(path)
    if path.exists():
        _set_aside(path)
    new.rename(path)
    sync(path.parent)
    remove(replaced(path))


@contextmanager
def instead_of_folder(path: Path) -> Iterator[None]:
    """Let a file take the name of a folder, an earlier run's sharded checkpoint, which goes when the file is there.

    If the file cannot be written, or the process ends before it is, :func:`recover` brings the folder back.
    """
    if not path.is_dir() or path.is_symlink():
        yield
        return
    _set_aside(path)
    try:
        yield
    finally:
        recover(path)
    remove(replaced(path))


def _set_aside(path: Path) -> None:
    """Rename what is there, so that something else can take its name."""
    old = replaced(path)
    remove(old)
    own_folder(old.parent)
    path.rename(old)


def recover(path: Path) -> None:
    """Restore the old ``path`` if the process ended between the two renames of a swap.

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
