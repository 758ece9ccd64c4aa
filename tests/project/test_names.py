"""Names that were given up for the field's (docs/design.md, Names) do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## Names")[1].split("\n## ")[0]
COMMON = {
    "Turn",
    "Forward",
    "Event",
    "Places",
    "after",
    "beside",
    "marks",
    "drawing",
    "replaced",
}  # words of other things
GONE = {name for row in re.findall(r"^\| ([\w., ]+?) \|", TABLE, re.M) for name in row.split(", ")} - {"before"}


def identifiers(path: Path) -> set[str]:
    """The names that a file defines or uses, without its texts and comments."""
    found = {path.stem}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "name", "arg"):
            value = getattr(node, field, None)
            found |= {value} if isinstance(value, str) else set()
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "sparse_rl_lightning").rglob("*.py")), ids=lambda path: path.stem)
def test_no_name_is_one_that_was_given_up(path: Path) -> None:
    gone = {name.rpartition(".")[2] for name in GONE} - COMMON
    assert {"ParkedPrompt", "Sighting", "is_replaced", "follow_step"} <= gone
    assert not identifiers(path) & gone
