"""The op benchmark's rows of retrieval run in toy sizes and compare what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.ops import __main__ as command


def test_retrieval_in_toy_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--parts", "retrieval", "--quick"]
    monkeypatch.setattr(sys, "argv", ["ops.py", *arguments, "--save", str(tmp_path)])
    command.main()
    lines = (tmp_path / "retrieval-cpu.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if "of 96 tokens" in line or "of 128 tokens" in line]
    assert [row[0].lstrip("| ") for row in rows[:2]] == [
        "Centroid, 64 of 96 tokens, float32",
        "Quest, 64 of 96 tokens, float32",
    ]
    assert len(rows) == 8
    assert all("decode attention over all" in row[2] and float(row[1]) > 0 for row in rows)
