"""Checks of the arguments of ops: shapes and types by ``schemas.SHAPES``, and numbers that index memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.pools import COMPUTING, EVENT_TYPES, FLOAT8, accumulation_dtype
from sparse_rl_lightning.ops.schemas import ON_ALL_LAYERS, SCHEMAS, SHAPES

PARAMETERS = {
    name: [argument.split("=")[0].split()[-1] for argument in schema.strip("()-> \n").split(",")]
    for name, schema in SCHEMAS.items()
}
"""Names of the arguments of each op, in order."""

_WORDS = {"L": "layers", "S": "slots", "B": "rows", "H": "KV heads", "Hq": "query heads", "D": "head_dim", "R": "rows"}
_STORED = ("key_pool", "summaries", "logits", "hidden", "gate_and_up")
_SETTLE = (*_STORED, "offsets", "slots", "sources")  # determine the sizes, in this order


def check_arguments(op: str, args: tuple[Any, ...]) -> None:
    """Refuse tensors of the wrong shape, type, device or layout among the arguments of an op, in its schema's order."""
    tensors = {name: arg for name, arg in zip(PARAMETERS[op], args, strict=False) if isinstance(arg, Tensor)}
    first = [name for name in _SETTLE if name in tensors]
    like = first[0]
    types = _types(tensors)
    sizes: dict[str, int] = {}
    for name in [*first, *(name for name in tensors if name not in first)]:
        tensor, (*letters, word) = tensors[name], SHAPES[name].split()
        _check_shape(name, tensor, letters if op in ON_ALL_LAYERS else [x for x in letters if x != "L"], sizes)
        if "Hq" in letters and sizes["Hq"] % max(sizes["H"], 1):
            raise UserError(f"{name} has {sizes['Hq']} heads, expected a multiple of the {sizes['H']} KV heads.")
        dtype = tensor.dtype if word == "event" else types.get(word) or getattr(torch, word)
        if word == "event" and dtype not in EVENT_TYPES:
            raise UserError(f"{name} is {dtype}, expected torch.uint8, torch.int16 or torch.int32.")
        if tensor.dtype != dtype:
            raise UserError(f"{name} is {tensor.dtype}, expected {dtype}.")
        if tensor.device != tensors[like].device:
            raise UserError(f"{name} is on {tensor.device}, {like} is on {tensors[like].device}.")
        if not tensor.is_contiguous():
            raise UserError(f"{name} is not contiguous, pass {name}.contiguous().")


def _types(tensors: dict[str, Tensor]) -> dict[str, torch.dtype]:
    """The types that the words of ``SHAPES`` stand for."""
    query = next((tensors[name] for name in ("query", "query_ring") if name in tensors), None)
    stored = next((tensors[name].dtype for name in _STORED if name in tensors), torch.float32)
    if "normed" in tensors:  # the products that read it may be of another type
        return {"pool": stored, "query": tensors["normed"].dtype, "sum": accumulation_dtype(stored)}
    if stored != FLOAT8 or query is None:
        # scores without a query are in the type of those with one
        scores = tensors.get("redundancy", tensors.get("entry_scores"))
        wide = accumulation_dtype(stored if scores is None or stored != FLOAT8 else scores.dtype)
        return {"pool": stored, "query": stored, "sum": wide}
    if query.dtype not in COMPUTING:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in COMPUTING)
        raise UserError(f"with float8 pools queries, new keys and values must be one of {names}, got {query.dtype}.")
    return {"pool": stored, "query": query.dtype, "sum": accumulation_dtype(query.dtype)}


def _check_shape(name: str, tensor: Tensor, letters: list[str], sizes: dict[str, int]) -> None:
    """Compare a shape with letters of known size, and add the sizes of the others."""
    expected = [int(letter) if letter.isdigit() else sizes.get(letter) for letter in letters]
    fits = len(tensor.shape) == len(letters) and all(
        want is None or want == size for want, size in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        pairs = zip(expected, letters, strict=True)
        wanted = ", ".join(_WORDS.get(letter, "any") if size is None else str(size) for size, letter in pairs)
        raise UserError(f"{name} has shape {tuple(tensor.shape)}, expected ({wanted}).")
    sizes.update(zip(letters, tensor.shape, strict=True))


def check_slots(slots: Tensor, per_slot: Tensor) -> None:
    """For the references: refuse slots (B,) that do not exist in ``per_slot``, as the compiled kernels do.

    ``per_slot`` is a tensor (S, H) or (L, S, H).
    """
    count = per_slot.shape[-2]
    wrong = slots[(slots < -1) | (slots >= count)]
    if len(wrong):
        raise RuntimeError(f"slots contains {int(wrong[0])}, expected 0 to {count - 1} or -1 for a row to skip.")


def check_runs(slots: Tensor, offsets: Tensor, lengths: Tensor, limits: Tensor | int, pool_rows: int) -> None:
    """For the references: refuse heads that hold too many entries or lie outside the pool, as compiled kernels do.

    Slots (B), int64, are -1 for a row to skip. Offsets, lengths and their limits are (S, H) or (L, S, H), or all limits
    one number.
    """
    check_slots(slots, offsets)
    used = slots[slots >= 0]
    counts, start = lengths[..., used, :], offsets[..., used, :]
    most = torch.as_tensor(limits, device=counts.device).expand_as(lengths)[..., used, :]
    wrong = counts[(counts < 0) | (counts > most)]
    if len(wrong):
        raise RuntimeError(f"a head holds {int(wrong[0])} entries, allowed are 0 to {int(most.max())}.")
    outside = (start < 0) | (start > pool_rows - counts)
    if bool(outside.any()):
        raise RuntimeError(
            f"a head of {int(counts[outside][0])} entries starts at row {int(start[outside][0])}, outside the pool of "
            f"{pool_rows} rows."
        )


def check_numbers(name: str, numbers: Tensor, limit: int | None = None) -> None:
    """For the references: refuse numbers that are negative, or not below the limit."""
    wrong = numbers[(numbers < 0) if limit is None else (numbers < 0) | (numbers >= limit)]
    if len(wrong):
        allowed = "0 or more" if limit is None else f"0 to {limit - 1}"
        raise RuntimeError(f"{name} is {int(wrong[0])}, expected {allowed}: a number that is negative or too large.")
