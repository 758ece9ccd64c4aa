"""The benchmark of running state runs in toy sizes, with free slots where it says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.rollout import __main__ as command


def test_steps_with_free_slots_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--quick", "--threads", "1", "--device", "cpu", "--parts", "state", "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["rollout.py", *arguments])
    command.main()
    (page,) = tmp_path.glob("*.md")
    lines = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    header, _, *cells = rows
    assert header == ["slots in use", "SnapKV ms", "H2O ms", "H2O to SnapKV"]
    assert [row[0] for row in cells] == ["4", "3"]
    for _, snap, h2o, ratio in cells:
        assert min(float(snap), float(h2o), float(ratio)) > 0
