"""Names that were given up for the field's (docs/design.md, Names) do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## Names")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| ([\w., ]+?) \| [^|]+ \| ([^|]+) \|", TABLE, re.M)[1:]
COMMON = {"Turn", "Forward", "Event", "Places", "Look", "after", "beside", "marks", "drawing", "admission", "replaced"}
"""Names that other things have: they stay out of the files that gave them up."""
GONE = {name.rpartition(".")[2] for row, _ in ROWS for name in row.split(", ")}
FOLDERS = ("sparse_rl_lightning", "exact_answers", "tests", "benchmarks", "experiments")


def identifiers(path: Path) -> set[str]:
    """The names that a file defines or uses, without its texts and comments."""
    found = {path.stem}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "name", "arg"):
            value = getattr(node, field, None)
            found |= {value} if isinstance(value, str) else set()
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_one_that_was_given_up(folder: str) -> None:
    assert {"ParkedPrompt", "Sighting", "is_replaced", "follow_step", "Expendable"} <= GONE - COMMON
    found = {path: identifiers(path) & (GONE - COMMON) for path in sorted((ROOT / folder).rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(("names", "places"), ROWS, ids=[names for names, _ in ROWS])
def test_files_do_not_have_the_names_that_they_gave_up(names: str, places: str) -> None:
    """Those that are words of other things too."""
    own = {name.rpartition(".")[2] for name in names.split(", ")}
    for place in re.findall(r"`([\w/.]+)`", places):
        path = ROOT / "sparse_rl_lightning" / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        assert files
        assert {file: identifiers(file) & own for file in files if identifiers(file) & own} == {}
