"""Records as files: arrays in safetensors, the numbers in its JSON header. Reading runs nothing and trusts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.integrations.record.format import ARRAYS, NUMBERS, SampledRecord

FORMAT, VERSION = "eviction-record", 1
OWN = "x_"
"""How names begin that an engine adds for itself: readers pass over them."""


def write_record(record: SampledRecord, path: str | Path) -> None:
    """Write a record, complete or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    numbers = {name: getattr(record, name) for name in NUMBERS}
    header = {"format": FORMAT, "version": str(VERSION), "numbers": json.dumps(numbers)}
    write_whole(Path(path), save({name: array.contiguous() for name, array in record.arrays.items()}, header))


def read_record(path: str | Path) -> SampledRecord:
    """Read a record that anybody may have written.

    Raises:
        ValueError: If there is none, it is of another format or version, or anything in it is not as it must be.
    """
    try:
        with safe_open(path, "pt") as file:
            header, names = file.metadata() or {}, [name for name in file.keys() if not name.startswith(OWN)]
            numbers = _numbers(header)
            if set(names) != set(ARRAYS):
                raise UserError(
                    f"it must hold the arrays {', '.join(ARRAYS)}, got {', '.join(sorted(names)) or 'none'}."
                )
            return SampledRecord(**numbers, **{name: file.get_tensor(name) for name in ARRAYS})
    except UserError as error:
        raise UserError(f"{str(path)!r} is no eviction record that can be read: {error}") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(path)!r} cannot be read as safetensors ({error}).") from error


def _numbers(header: dict[str, str]) -> dict[str, Any]:
    if header.get("format") != FORMAT or header.get("version") != str(VERSION):
        given = f"format={header.get('format')!r}, version={header.get('version')!r}"
        raise UserError(f"its header must say format={FORMAT!r} and version={str(VERSION)!r}, got {given}.")
    try:
        numbers = json.loads(header.get("numbers", ""))
    except (ValueError, RecursionError) as error:
        raise UserError(f"'numbers' of its header is no JSON ({error}).") from error
    if not isinstance(numbers, dict) or set(numbers) != set(NUMBERS):
        raise UserError(f"'numbers' of its header must be an object of {', '.join(NUMBERS)}.")
    for name, value in numbers.items():
        wanted = float if name == "temperature" else int
        if isinstance(value, bool) or not isinstance(value, (int, wanted)):
            raise UserError(f"{name} must be a number of type {wanted.__name__}, got {value!r}.")
    return numbers
