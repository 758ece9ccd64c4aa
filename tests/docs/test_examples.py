"""The examples run as they stand, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "minimal.py"
DENSE = re.compile(r"^    logits = .*\n    dense = .*\n", re.MULTILINE)
SHORT = "NUM_DIGITS, NUM_STEPS, NUM_GENERATIONS, MAX_COMPLETION_LENGTH = 10, {}, 8, 24"
REPLAYED = "    from sparse_rl_lightning import replay_logprobs\n    dense = replay_logprobs(policy, rollout)[:, 1:]\n"


def printed(path: Path, seed: int = 0) -> list[list[float]]:
    """The reward and the least and largest ratio of each line, in a process of its own."""
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, path, str(seed)], check=True, **options)
    lines = re.findall(r"reward (\S+), 67% of the cache saved, dense / sparse from (\S+) to (\S+)", done.stdout)
    return [[float(number) for number in line] for line in lines]


def test_the_minimal_example_learns_to_count_under_a_compressed_cache() -> None:
    rewards, lowest, highest = zip(*printed(EXAMPLE), strict=True)
    assert len(rewards) == 11
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9
    assert min(lowest) < 0.95
    assert max(highest) > 1.05  # or there was nothing to correct


@pytest.mark.slow  # ten seconds a seed
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_minimal_example_learns_from_any_seed(seed: int) -> None:
    rewards = [line[0] for line in printed(EXAMPLE, seed)]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9


@pytest.mark.slow
def test_replay_in_its_place_needs_no_correction(tmp_path: Path) -> None:
    """As the example's comment says."""
    source, count = DENSE.subn(REPLAYED, EXAMPLE.read_text(encoding="utf-8"))
    assert (count, source.count(SHORT.format(50))) == (1, 1)
    source = source.replace(SHORT.format(50), SHORT.format(16))
    (tmp_path / "replayed.py").write_text(source, encoding="utf-8")
    lines = printed(tmp_path / "replayed.py")
    assert lines[0][0] + 0.2 < lines[-1][0]
    assert {(low, high) for _, low, high in lines} == {(1.0, 1.0)}


def test_the_minimal_example_fits_a_screen_and_needs_no_lightning() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert not any("lightning.pytorch" in line or "import lightning" in line for line in lines)
