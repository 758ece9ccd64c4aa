"""Plain data for checkpoints, which are read without unpickling: numbers are converted, objects refused."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError

PLAIN = (str, int, float, bool, complex, bytes, type(None))
CURES = {
    "hyper_parameters": "leave it out: self.save_hyperparameters(ignore=[...]); nothing here reads them",
    "callbacks": "convert it in the callback's state_dict (float(x), x.tolist(), torch.from_numpy(x)), and back in "
    "load_state_dict",
    "lr_schedulers": "give the schedule numbers instead, or a state_dict that leaves it out",
    "optimizer_states": "give the optimizer numbers instead",
}
"""What to change, by the part of the checkpoint."""


def readable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint with numbers of numpy, and of classes made of plain ones, as Python's own.

    Raises:
        ValueError: If something could not be read again without unpickling, by its place.
    """
    return {name: _plain(value, (name,)) for name, value in checkpoint.items()}


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    cls = type(value)
    if cls in PLAIN or isinstance(value, Tensor):
        return value
    if cls in (dict, OrderedDict, Counter):
        converted = cls({_plain(key, path): _plain(item, (*path, str(key))) for key, item in value.items()})
        if cls is OrderedDict:
            vars(converted).update(vars(value))  # versions of modules
        return converted
    if cls in (list, tuple, set):
        return cls(_plain(item, (*path, str(index))) for index, item in enumerate(value))
    if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0 and value.dtype.kind in "biufcSU":
        number = value.item()
        return number if type(number) in PLAIN else float(number)  # a longdouble stays one
    base = next((base_type for base_type in (bool, int, float, str) if isinstance(value, base_type)), None)
    if base is not None:  # an enumeration's member
        return base(value)
    if not _is_read(value):
        shape = f" of the shape {value.shape}" if isinstance(value, np.ndarray) else ""
        cure = CURES.get(path[0], "convert it where it is stored (float(x), x.tolist(), torch.from_numpy(x))")
        raise UserError(
            f"This run cannot be saved so that it could go on: {'/'.join(path)} holds a {cls.__module__}."
            f"{cls.__qualname__}{shape}, and checkpoints are read without unpickling, so they hold tensors, numbers "
            f"and texts, in lists and dictionaries. For {path[0]}: {cure}."
        )
    return value


def _is_read(value: Any) -> bool:
    """Whether torch reads it back: sizes, types and devices, and what a program has declared safe."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # an object's own __reduce__ may raise anything
        return False
    return True
