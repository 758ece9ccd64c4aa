"""The learner benchmark: a quick run prints what it promises, and chunks take less memory than all logits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "learner.py"


@pytest.mark.slow  # four processes that import torch
def test_a_quick_run_saves_a_table_in_which_chunks_need_the_least(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is read from /proc")
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu", "--threads", "1", "--save", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    page = (tmp_path / "learner-cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (?:≈ )?([\d.]+) \|", page, re.MULTILINE)
    peaks = {way: float(peak) for way, _, peak in rows}
    assert list(peaks) == ["plain", "checkpointed", "chunked"]
    assert peaks["plain"] > 3 * 4 * 1024 * 5000 / 2**30  # at least three copies of all logits
    assert peaks["chunked"] < peaks["checkpointed"] < peaks["plain"]
