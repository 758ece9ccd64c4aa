"""Folders that are found unwritable at once, tables, and writes whose failure is no reason to end a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.files import write_files


class Expendable:
    """Writes what a run can do without: a full disk or a removed folder is told of once, until it is mended.

    Args:
        owner: What writes, for the message.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._is_failing = False

    def __call__(self, write: Callable[[], object]) -> None:
        """Write; the next time is another attempt."""
        try:
            write()
        except OSError as error:
            if not self._is_failing:
                rank_zero_warn(f"{self.owner} cannot be written: {error}. The run goes on.")
            self._is_failing = True
        else:
            self._is_failing = False


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


def write_parquet(path: Path, columns: Mapping[str, list[Any]]) -> None:
    """Write columns, all or none; text that is no valid Unicode gets escapes."""
    import pyarrow
    from pyarrow import parquet

    clean = {name: [_valid(value) for value in values] for name, values in columns.items()}
    content = pyarrow.table(clean)
    write_files({path: lambda new: parquet.write_table(content, new)})


def _valid(value: Any) -> Any:
    """Lone surrogates, which parquet's UTF-8 cannot hold, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
