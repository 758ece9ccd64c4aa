"""Fingerprints: whether something is the same as when a result was written, judged by its bytes.

What an object prints may omit what counts (a file's statistics, a private tensor), and sums of weights ignore their
order. So numbers are hashed as they are in memory, with name, shape and type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WHOLE = 2**16
"""Size above which weights are sampled: at least this many numbers and at least one of every row."""


def fingerprint(**settings: Any) -> str:
    """A hash of settings: plain values, tensors, models, and objects by all their attributes, private ones too."""
    return hashlib.sha256(json.dumps(_plain(settings, ()), sort_keys=True).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """A hash of parameters and buffers: any training step changes it, and so does another order of rows."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {_bytes_of(tensor, _step(tensor))}".encode())
    return digest.hexdigest()


def _step(tensor: Tensor) -> int:
    """The distance between sampled numbers: less than a row, so that every row and changing columns are sampled."""
    rows_met = tensor.shape[-1] - 1 if tensor.dim() else 1
    return max(1, min(tensor.numel() // WHOLE, rows_met))


def _bytes_of(tensor: Tensor, step: int = 1) -> str:
    own = tensor.detach().reshape(-1)[::step].contiguous().cpu()
    content = hashlib.sha256(own.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {content}"


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    """The value in a form that JSON can write; ``above`` are the ids of the objects that contain it."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, DTensor):
        return "sharded"  # every rank has another part
    if isinstance(value, Tensor):
        return _bytes_of(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # object arrays' bytes would be addresses
        return f"{value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if id(value) in above:
        return "itself"
    above = (*above, id(value))
    if isinstance(value, np.ndarray):
        return [str(value.dtype), _plain(value.tolist(), above)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, above) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(item, above), sort_keys=True) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, range)):
        return [_plain(item, above) for item in value]
    return {"class": _name(type(value)), **_inside(value, above)}


def _inside(value: Any, above: tuple[int, ...]) -> dict[str, Any]:
    """The contents that distinguish an object from others of its class."""
    if isinstance(value, nn.Module):
        numbers = {name: _numbers(module) for name, module in value.named_modules()}
        return {"weights": weights_digest(value), "numbers": {name: own for name, own in numbers.items() if own}}
    if hasattr(value, "__qualname__"):  # functions, methods and classes
        code = getattr(value, "__code__", None)
        constants = [one for one in code.co_consts if isinstance(one, (str, int, float))] if code else []
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        held += [getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)]
        held += [value.__self__] if isinstance(value, MethodType) else []
        return {
            "name": _name(value), "code": code.co_code.hex() if code else "", "constants": constants,
            "held": _plain(held, above),
        }  # fmt: skip
    if isinstance(value, partial):
        return {"call": _plain([value.func, value.args, value.keywords], above)}
    if hasattr(value, "__dict__"):
        return {"attributes": _plain(vars(value), above)}
    shown = repr(value)
    return {} if shown.startswith("<") else {"shown": shown}  # an address means nothing


def _numbers(module: nn.Module) -> dict[str, int | float]:
    """Numeric settings that a module keeps as attributes, without flags such as ``training``."""
    kinds = (int, float)
    return {name: value for name, value in vars(module).items() if type(value) in kinds and not name.startswith("_")}


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
