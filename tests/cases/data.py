"""Cases of data files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cases.case import Case, json_lines

ROW = {"prompt": "1+1=", "answer": "2"}


def columns(**more: Any) -> str:
    """Four rows with further columns."""
    return json_lines(*[ROW | more] * 4)


def twice_answered(folder: Path) -> None:
    """A parquet file with two columns of one name."""
    import pyarrow
    from pyarrow.parquet import write_table

    names = ["prompt", "answer", "answer"]
    write_table(pyarrow.Table.from_arrays([pyarrow.array(["1"])] * 3, names=names), folder / "p.parquet")


CASES = [
    Case("an empty file", "JsonlPrompts: the training data has no rows.", 1, rows=""),
    Case("900 nested brackets in a column", "column 'x' is nested more than 50 levels deep. Drop it, or store it", 1,
         rows=f'{{"prompt": "1+1=", "answer": "2", "x": {"[" * 900}{"]" * 900}}}\n'),
    Case("a column with an escape sequence in its name", r"Its columns are: '\x1b[31mevil', 'prompt'", 1,
         rows=json_lines({"\x1b[31mevil": "1", "prompt": "1"})),
    Case("a parquet file with the same column twice", "p.parquet has more than one column 'answer'. Rename or drop", 1,
         file="p.parquet", data={}, prepare=twice_answered),
    Case("an empty parquet file", "p.parquet is no parquet file that can be read: ", 1, file="p.parquet", rows=""),
    Case("a folder", "There is no data file 'p.jsonl'", 1, data={},
         prepare=lambda folder: (folder / "p.jsonl").mkdir()),
    Case("a pipe", "There is no data file 'p.jsonl'", 1, data={},
         prepare=lambda folder: os.mkfifo(folder / "p.jsonl")),
    Case("a name with escape sequences", r"There is no data file '\x1b[31mx\x1b]0;o\x07.jsonl'", 1,
         data={"path": "\x1b[31mx\x1b]0;o\x07.jsonl"}),
]  # fmt: skip
