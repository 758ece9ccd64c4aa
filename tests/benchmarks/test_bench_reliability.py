"""The reliability benchmark: forty faults, two dozen of them kills at random moments, and going on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ROOT
from benchmarks.reliability import __main__ as command
from benchmarks.reliability import forks, trials


def run(folder: Path, faults: int) -> str:
    call = f"{sys.executable} -m benchmarks.reliability --faults={faults} --work={folder} --save={folder}".split()
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost(tmp_path: Path) -> None:
    printed = run(tmp_path, 40)
    assert "LOST" not in printed
    assert "| all |  | 40 | 40 | 0 | " in (tmp_path / "reliability-cpu.md").read_text()
    hit = dict(
        line.strip("| ").split(" | ") for line in printed.split("Where signals hit")[1].splitlines() if " | " in line
    )
    assert sum(int(hit[name]) > 0 for name in ("rollout", "scoring", "micro-batch", "optimizer step", "saving")) >= 4


@pytest.mark.slow
def test_finished_trials_are_kept(tmp_path: Path) -> None:
    """Nothing is left to run, so that a loss that was made up is what the table says."""
    facts = {"seed": 0, "seconds": 30.0, "where": "saving", "why": "", "missed": 2}
    trials = [facts | {"number": n, "fault": "SIGKILL", "survived": n > 0} for n in range(3)]
    (tmp_path / "trials-0.jsonl").write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    printed = run(tmp_path, 3)
    assert "| all |  | 3 | 2 | 1 | 6 |" in printed
    assert "| saving | 3 |" in printed
    assert "all trials took 2 minutes" in printed


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    torch.save({"global_step": step}, folder / "checkpoints" / "last.ckpt")


def test_a_checkpoint_that_was_there_must_be_there(tmp_path: Path) -> None:
    """Gone, or of an earlier step: lost, and not begun again."""
    assert trials.resume(tmp_path, "rollout", 0) == trials.FIT
    with pytest.raises(trials.Lost, match="is not there"):
        trials.resume(tmp_path, "rollout", 1)
    checkpoint(tmp_path, 3)
    assert trials.resume(tmp_path, "rollout", 0) == trials.resume(tmp_path, "rollout", 3) == trials.RESUME
    with pytest.raises(trials.Lost, match=r"step 4 was saved, .* is of step 3"):
        trials.resume(tmp_path, "rollout", 4)


@pytest.mark.parametrize(("marks", "step"), [
    ("", 0),
    ("s1", 0),
    ("s1 s1", 0),  # may still have been at it
    ("s1 s1 m1", 1),
    ("s1 s1 m1 s2", 1),
    ("s1 s1 m1 s2 s2", 1),
    ("s1 s1 m1 s2 s2 r2", 2),
    ("r7 s8 s8 e8", 8),  # of a run that goes on
])  # fmt: skip
def test_what_must_be_on_the_disk(marks: str, step: int) -> None:
    events = [forks.Event("saving" if mark[0] == "s" else mark[0], 0.0, int(mark[1])) for mark in marks.split()]
    start = forks.Event("start", 0.0, 0)
    assert trials.saved(SimpleNamespace(events=[start, *events])) == step


def test_a_run_without_its_fault_is_no_trial(tmp_path: Path) -> None:
    """Two runs end before it; the third is the trial, and is not taken for survived when it is lost."""
    draws: list[float] = []

    def trial(folder: Path, dice: Any, setting: Any) -> str:
        draws.append(dice.random())
        if len(draws) < 3:
            raise trials.NotHit
        raise trials.Lost("rollout", "made up")

    facts = command.one_trial(7, trials.Fault("a fault", "", trial, 1), 0, tmp_path, None)
    assert (facts["survived"], facts["where"], facts["why"], facts["missed"]) == (False, "rollout", "made up", 2)
    assert len(set(draws)) == 3
    assert (tmp_path / "lost-7").is_dir()
