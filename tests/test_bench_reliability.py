"""The reliability benchmark: forty faults, two dozen of them kills at random moments, and going on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "reliability.py"


def run(folder: Path, faults: int) -> str:
    command = [sys.executable, str(SCRIPT), f"--faults={faults}", f"--work={folder}", f"--save={folder}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost(tmp_path: Path) -> None:
    printed = run(tmp_path, 40)
    assert "LOST" not in printed
    assert "| all |  | 40 | 40 | 0 |" in (tmp_path / "reliability-cpu.md").read_text()
    hit = dict(
        line.strip("| ").split(" | ") for line in printed.split("Where signals hit")[1].splitlines() if "|" in line
    )
    assert sum(int(hit[name]) > 0 for name in ("rollout", "scoring", "micro-batch", "optimiser step", "saving")) >= 4


def test_finished_trials_are_kept(tmp_path: Path) -> None:
    """Nothing is left to run, so that a loss that was made up is what the table says."""
    facts = {"seed": 0, "seconds": 30.0, "where": "saving", "why": ""}
    trials = [facts | {"number": n, "fault": "SIGKILL", "survived": n > 0} for n in range(3)]
    (tmp_path / "trials-0.jsonl").write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    printed = run(tmp_path, 3)
    assert "| all |  | 3 | 2 | 1 |" in printed
    assert "| saving | 3 |" in printed
    assert "all trials took 2 minutes" in printed
