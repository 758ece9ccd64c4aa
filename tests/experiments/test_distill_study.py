"""The DistillSparse benchmark: a quick run from the command line to the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra (lora)")
    command = [sys.executable, "-m", "experiments.distill", "--quick", "--threads=1", f"--save={tmp_path}"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    rows = [line.split(" | ") for line in (tmp_path / "sparrow.md").read_text().splitlines() if "KL" in line]
    assert [row[1] for row in rows] == 2 * ["before", "after, without the adapter", "after, with the adapter"]
    assert all(0 < float(row[2]) <= 1 for row in rows)
    assert rows[2][2:] != rows[1][2:]  # even a few steps do something


@pytest.mark.slow
def test_a_missing_policy_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.distill", f"--policy={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"no policy in {tmp_path}" in done.stderr
