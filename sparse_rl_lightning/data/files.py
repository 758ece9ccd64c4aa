"""Readers for tables of prompts: local JSON lines by hand, parquet and hub datasets through ``datasets``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparse_rl_lightning.errors import UserError

LINE_SUFFIXES = (".jsonl", ".json")
FILE_SUFFIXES = (*LINE_SUFFIXES, ".parquet")


def read_table(path: str, config: str | None = None, split: str = "train") -> list[tuple[str, dict[str, Any]]]:
    """Every row of a file or hub dataset, each with its place for error messages.

    A path is a local ``.jsonl``, ``.json`` (one object per line) or ``.parquet`` file, or the name of a hub dataset,
    which alone has configurations and splits.

    Raises:
        ValueError: If there is no such file or dataset, or a line is not a JSON object (names file and line).
    """
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    if not is_local(path):
        return _read_with_datasets(path, config, split)
    if not Path(path).is_file():
        raise UserError(f"There is no data file {path!r} (looked in {Path.cwd()}). Check the path.")
    if path.endswith(LINE_SUFFIXES):
        return read_json_lines(path)
    return _read_parquet(path)


def is_local(path: str) -> bool:
    """Whether ``path`` means a file, judged by its suffix; everything else is the name of a hub dataset."""
    return path.endswith(FILE_SUFFIXES)


def read_json_lines(path: str) -> list[tuple[str, dict[str, Any]]]:
    r"""Every object of a file with one JSON object per line; blank lines are skipped.

    Lines end at ``\n`` only: texts may contain U+2028 and other characters that Python counts as line ends.

    Raises:
        ValueError: If a line is not UTF-8 or not a JSON object.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            excerpt = ascii(line[:60].decode("utf-8", "replace"))
            raise UserError(f"{where} is not JSON ({error}): {excerpt}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} holds a JSON {type(row).__name__}; expected one object per line.")
        rows.append((where, row))
    return rows


def _read_parquet(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a parquet file; ``datasets`` handles neither empty tables nor duplicate names, so they come first."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata, read_schema

        names, num_rows = read_schema(path).names, read_metadata(path).num_rows
    except (ImportError, ArrowException):  # datasets raises the error
        return _read_with_datasets("parquet", None, "train", data_files=path)
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path} has more than one column {doubles[0]!r}. Rename or drop one.")
    return _read_with_datasets("parquet", None, "train", data_files=path) if num_rows else []


def _read_with_datasets(
    path: str, config: str | None, split: str, data_files: str | None = None
) -> list[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Parquet files and hub datasets need the package datasets: pip install datasets") from error
    name = data_files or path
    try:
        table = datasets.load_dataset(path, config, split=split, data_files=data_files)
    except Exception as error:  # no dataset, no network, no such split or configuration: each raises a different class
        raise UserError(
            f"datasets could not load {name!r} (configuration {config!r}, split {split!r}): {error} "
            f"A local file must end in one of {', '.join(FILE_SUFFIXES)}."
        ) from error
    return [(f"{name}, row {number}", row) for number, row in enumerate(table)]
