"""Readers for tables of prompts: local files as they are now, hub datasets through ``datasets``."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import whole_file

LINE_SUFFIXES = (".jsonl", ".json")
FILE_SUFFIXES = (*LINE_SUFFIXES, ".csv", ".parquet")

Table: TypeAlias = list[tuple[str, dict[str, Any]]]
"""Rows, each with its place for error messages."""


def read_table(path: str, config: str | None = None, split: str = "train") -> Table:
    """Every row of a file or hub dataset.

    A path is a local ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or the name of a hub dataset, which alone
    has configurations and splits.

    Raises:
        ValueError: If there is no such file or dataset, it is of another kind, or a row cannot be read (names it).
    """
    path = os.path.expanduser(path)
    if not is_local(path):
        if Path(path).is_file():  # the hub would be asked for it
            raise UserError(f"{path!r} is a file of another kind than {', '.join(FILE_SUFFIXES)}. Convert it to one.")
        return _read_with_datasets(path, config, split)
    path = data_file(path)
    if path.lower().endswith(LINE_SUFFIXES):
        return read_json_lines(path)
    return _read_csv(path) if path.lower().endswith(".csv") else _read_parquet(path)


def is_local(path: str) -> bool:
    """Whether ``path`` means a file, judged by its suffix; everything else is the name of a hub dataset."""
    return path.lower().endswith(FILE_SUFFIXES)


def text_or_number(value: object, what: str, suffix: str = "") -> str | int | float:
    """A cell as it is, empty text where it is missing, which numbers of parquet files say with NaN.

    Args:
        value: The cell.
        what: What it is, for the message.
        suffix: What the message says behind the value.

    Raises:
        ValueError: If it is neither.
    """
    if value is None or value != value:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{what} must be text or a number, got {ascii(value)[:80]}{suffix}.")
    return value


def data_file(path: str) -> str:
    """The path of a local file of any suffix, where it is.

    Raises:
        ValueError: If there is no such file.
    """
    path = os.path.expanduser(path)
    if not Path(path).is_file():
        raise UserError(f"There is no data file {path!r} (looked in {Path.cwd()}). Check the path.")
    return path


def read_json_lines(path: str) -> Table:
    r"""Every object of a file with one JSON object per line, or with one array of objects; blank lines are skipped.

    Lines end at ``\n`` only: texts may contain U+2028 and other characters that Python counts as line ends.

    Raises:
        ValueError: If a line, or an entry of the array, is not UTF-8 or not a JSON object.
    """
    content = whole_file(path).removeprefix(b"\xef\xbb\xbf")
    if not (encoding := json.detect_encoding(content)).startswith("utf-8"):
        raise UserError(f"{path} is in {encoding.upper()} by its first bytes. Save it in UTF-8.")
    if content.lstrip()[:1] == b"[":
        return [_object(f"{path}, row {number}", row) for number, row in enumerate(_read_array(path, content))]
    rows: Table = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(_decoded(line))
        except (ValueError, RecursionError) as error:
            excerpt = ascii(line[:60].decode("utf-8", "replace"))
            raise UserError(
                f"{where} is not JSON ({error}): {excerpt}. Write each object in a line of its own (jq -c . FILE), or "
                "all as one array."
            ) from error
        rows.append(_object(where, row))
    return rows


def _object(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise UserError(f"{where} holds a JSON {type(row).__name__}; expected an object, with columns by name.")
    return where, row


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _read_array(path: str, content: bytes) -> list[Any]:
    try:
        array: list[Any] = json.loads(_decoded(content))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} begins as a JSON array, and is not JSON ({error}). It must be one array of objects, or have an "
            "object in every line."
        ) from error
    return array


def _read_csv(path: str) -> Table:
    """The rows of a CSV file (RFC 4180) with a header; all cells are text."""
    before = csv.field_size_limit(sys.maxsize)  # a solution may have more than 131,072 characters
    try:
        lines = csv.reader(io.StringIO(whole_file(path).decode("utf-8-sig"), newline=""), strict=True)
        names = next(lines, [])
        if doubles := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{path} has more than one column {doubles[0]!r}. Rename or drop one.")
        rows = []
        for cells in filter(None, lines):
            where = f"{path}, line {lines.line_num}"
            if len(cells) != len(names):
                raise UserError(
                    f"{where} has {len(cells)} cells and the first line {len(names)} names: cells with commas or line "
                    'breaks stand in quotes, "a, b".'
                )
            rows.append((where, dict(zip(names, cells, strict=True))))
        return rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file in UTF-8: {error}.") from error
    finally:
        csv.field_size_limit(before)


def _read_parquet(path: str) -> Table:
    """The rows of a parquet file; ``load_dataset`` takes its name for a pattern and its time for its content."""
    import datasets
    from pyarrow import BufferReader
    from pyarrow.parquet import ParquetFile

    content = whole_file(path)
    try:
        columns = ParquetFile(BufferReader(content)).read()
        names = columns.column_names
        doubles = sorted({name for name in names if names.count(name) > 1})
        rows = [] if doubles else datasets.Dataset(columns, fingerprint=path)
    except Exception as error:  # another file, a damaged one, or a type of no feature: each raises a different class
        raise UserError(f"{path} is no parquet file that can be read: {error}") from error
    if doubles:
        raise UserError(f"{path} has more than one column {doubles[0]!r}. Rename or drop one.")
    return _as_table(path, rows)


def _read_with_datasets(path: str, config: str | None, split: str) -> Table:
    """The rows of a hub dataset, or of a folder like one, which is read as it is now, not from the cache."""
    import datasets

    is_folder = Path(path).is_dir()
    if is_folder and glob.has_magic(str(Path(path).resolve())):
        raise UserError(f"datasets takes the folder {path!r} for a pattern. Rename it, without any of *, ? and [.")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = datasets.load_dataset(path, config, split=split, cache_dir=scratch if is_folder else None)
        except Exception as error:  # no dataset, network, split or configuration: each raises a different class
            raise UserError(
                f"datasets could not load {path!r} (configuration {config!r}, split {split!r}): {error} "
                f"A local file must end in one of {', '.join(FILE_SUFFIXES)}."
            ) from error
        return _as_table(path, rows)


def _as_table(path: str, rows: Any) -> Table:
    """Rows of a dataset; chat messages without the keys that Arrow gave them because other rows have them."""
    items = {name: getattr(feature, "feature", None) for name, feature in rows.features.items()}
    chats = [name for name, item in items.items() if isinstance(item, dict) and "role" in item]
    table = [(f"{path}, row {number}", row) for number, row in enumerate(rows)]
    for _, row in table:
        row |= {name: _without_nulls(row[name], rows.features[name]) for name in chats}
    return table


def _without_nulls(value: Any, feature: Any) -> Any:
    """A value of Arrow without null entries of its structs; those within JSON are as they were written."""
    if value is not None and isinstance(feature, dict):
        return {name: _without_nulls(item, feature[name]) for name, item in value.items() if item is not None}
    if value is not None and hasattr(feature, "feature"):
        return [_without_nulls(item, feature.feature) for item in value]
    return value
