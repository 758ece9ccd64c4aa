"""Records as files or bytes: safetensors, numbers in its JSON header. Reading runs nothing and trusts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import output_file, whole_file, write_whole
from sparse_rl_lightning.integrations.record.format import ARRAYS, NUMBERS, SampledRecord

FORMAT, VERSION = "eviction-record", 1
OWN = "x_"
"""How names begin that an engine adds for itself: readers pass over them."""


def write_record(record: SampledRecord, path: str | Path) -> None:
    """Write a record, complete or not at all.

    Raises:
        ValueError: If ``path`` is a folder, a pipe or a device, or its folder cannot be written.
        OSError: If it cannot be written, for want of room on the disk.
    """
    write_whole(output_file(path, "path"), record_bytes(record))


def record_bytes(record: SampledRecord) -> bytes:
    """The content of a record's file, to be sent instead of stored."""
    numbers = {name: getattr(record, name) for name in NUMBERS}
    header = {"format": FORMAT, "version": str(VERSION), "numbers": json.dumps(numbers)}
    return save({name: array.contiguous() for name, array in record.arrays.items()}, header)


def read_record(path: str | Path) -> SampledRecord:
    """Read a record that anybody may have written.

    Raises:
        ValueError: If there is none, it is of another format or version, or anything in it is not as it must be.
    """
    try:
        data = whole_file(path)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read as safetensors ({error}).") from error
    return record_from_bytes(data, repr(str(path)))


def record_from_bytes(data: bytes, name: str = "the bytes") -> SampledRecord:
    """Read a record from the content of its file.

    Args:
        data: Content.
        name: What error messages call it.

    Raises:
        ValueError: As :func:`read_record`.
    """
    try:
        arrays = {key: array for key, array in load(data).items() if not key.startswith(OWN)}
        size = int.from_bytes(data[:8], "little")  # of the header, which the line above has read
        header = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        numbers: dict[str, Any] = _numbers(header)
        if set(arrays) != set(ARRAYS):
            raise UserError(f"it must hold the arrays {', '.join(ARRAYS)}, got {', '.join(sorted(arrays)) or 'none'}.")
        return SampledRecord(**(numbers | arrays))
    except UserError as error:
        raise UserError(f"{name} is not a readable eviction record: {error}") from error
    except (SafetensorError, KeyError) as error:  # KeyError: an array of a type that safetensors knows and torch not
        raise UserError(f"{name} cannot be read as safetensors ({error}).") from error


def _numbers(header: dict[str, str]) -> dict[str, Any]:
    if header.get("format") != FORMAT or header.get("version") != str(VERSION):
        actual = f"format={header.get('format')!r}, version={header.get('version')!r}"
        raise UserError(f"its header must say format={FORMAT!r} and version={str(VERSION)!r}, got {actual}.")
    try:
        numbers = json.loads(header.get("numbers", ""))
    except (ValueError, RecursionError) as error:
        raise UserError(f"'numbers' of its header is not JSON ({error}).") from error
    if not isinstance(numbers, dict) or set(numbers) != set(NUMBERS):
        raise UserError(f"'numbers' of its header must be an object of {', '.join(NUMBERS)}.")
    for name, value in numbers.items():
        wanted = float if name == "temperature" else int
        if isinstance(value, bool) or not isinstance(value, (int, wanted)):
            raise UserError(f"{name} must be a number of type {wanted.__name__}, got {value!r}.")
    return numbers
