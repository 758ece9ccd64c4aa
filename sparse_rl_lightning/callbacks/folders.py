"""Writing files so that an unwritable folder is found at once and a half-written file never."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def writable_folder(folder: str | Path, argument: str) -> Path:
    """Make sure now that files can be written there later, creating the folder.

    Args:
        folder: An existing or a new folder.
        argument: What the user would change, for the message.

    Returns:
        The folder as a path.

    Raises:
        ValueError: If it cannot be created or written.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{argument}={str(path)!r} cannot be written: {error}. Give a folder you may write to."
        ) from error
    return path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it, so that nobody ever sees half of it."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_parquet(path: Path, columns: Mapping[str, list[Any]]) -> None:
    """Write columns under a temporary name first; text that is no valid Unicode gets escapes."""
    import pyarrow
    from pyarrow import parquet

    clean = {name: [_valid(value) for value in values] for name, values in columns.items()}
    temporary = path.with_name(f".{path.name}")
    parquet.write_table(pyarrow.table(clean), temporary)
    temporary.replace(path)


def _valid(value: Any) -> Any:
    """Lone surrogates, which parquet's UTF-8 cannot hold, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
