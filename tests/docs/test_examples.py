"""The examples run as they stand, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_minimal_example_learns_to_count_under_a_compressed_cache() -> None:
    done = subprocess.run(
        [sys.executable, "examples/minimal.py"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rewards = [float(number) for number in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.7
    assert done.stdout.count("50% of the cache kept") == len(rewards)


def test_the_minimal_example_fits_a_screen_and_needs_no_lightning() -> None:
    lines = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert not any("lightning.pytorch" in line or "import lightning" in line for line in lines)
