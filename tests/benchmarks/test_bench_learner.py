"""The learner benchmark: a quick run prints what it promises, and chunks take less memory than all logits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT, learner

pytestmark = [
    pytest.mark.slow,  # seven processes that import torch
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc"),
]


def test_chunks_need_the_least_memory() -> None:
    """In bytes, at sizes where the ways are tens of megabytes apart and a process's own ups and downs are not."""
    sizes = learner.Sizes(vocabulary=20_000, tokens=1024, width=256, chunk=64, threads=1)
    logits, head = 4 * sizes.vocabulary * sizes.tokens, 4 * sizes.vocabulary * sizes.width
    # the least of three: what the allocator keeps of a process's freed memory differs from run to run
    peaks = {way: min(learner.measure(way, sizes).peak for _ in range(3)) for way in learner.WAYS}
    assert peaks["plain"] > 2 * logits
    # a chunk's gradient of the head stands beside the sum of them: what the other way adds up in place
    assert peaks["checkpointed"] > peaks["chunked"] + head / 2
    assert peaks["plain"] > peaks["checkpointed"] + head / 2


def test_a_quick_run_saves_a_table(tmp_path: Path) -> None:
    arguments = ["--quick", "--device=cpu", "--threads=1", f"--save={tmp_path}"]
    command = [sys.executable, "-m", "benchmarks.learner", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    page = (tmp_path / "learner-cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (?:≈ )?([\d.]+) \| (?:≈ )?([\d.]+) \|$", page, re.MULTILINE)
    assert [row[:2] for row in rows] == [("plain", "1024"), ("checkpointed", "64"), ("chunked", "64")]
