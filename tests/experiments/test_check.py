"""Runs that are run again fall into what their arm came to, or are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_stability import write

from experiments import check
from experiments.arms.runs import Run
from experiments.stability import studies
from experiments.stability.records import Archive


def test_the_band_is_that_of_one_run_more() -> None:
    """Of 0.4, 0.5 and 0.6: mean 0.5, deviation 0.1, t 4.303, and the root of 1 + 1/3."""
    assert check.band([0.4, 0.5, 0.6]) == pytest.approx((0.5 - 0.4969, 0.5 + 0.4969), abs=1e-4)
    assert check.band([0.44, 0.44]) == pytest.approx((0.42, 0.46))


@pytest.mark.parametrize("seeds", [(30, 31), (30, 31, 32, 33)])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_what_ends_elsewhere_is_told(
    shift: float, seeds: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(replace(study, seeds=seeds) for study in studies.AGAIN)
    monkeypatch.setattr(studies, "AGAIN", few)
    archive = Archive(tmp_path / "kept.jsonl")
    for run in studies.planned(few, tmp_path / "kept"):
        write(run)
        assert archive.of(run) is not None

    def again(runs: Sequence[Run], fresh: Archive, jobs: int) -> None:
        for run in runs:
            write(run, end=archive.of(run).end("dense", 3) + shift)  # type: ignore[union-attr]

    said: list[str] = []
    monkeypatch.setattr(check, "execute", again)
    monkeypatch.setattr(check, "warm_up", lambda folder, tasks: folder.mkdir(parents=True))
    monkeypatch.setattr(check, "say", lambda text: said.append(text))
    assert check.check("again", archive, tmp_path / "fresh", number=2, draw=1, jobs=1) == (not shift)
    assert len(said) == 4  # with each cache
    assert all(line.endswith("OUTSIDE" if shift else "inside") for line in said)
    other = Archive(tmp_path / "none.jsonl")
    assert not check.check("again", other, tmp_path / "none", number=2, draw=1, jobs=1)
    assert "measure first, python -m experiments.stability --studies again" in said[-1]


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_a_run_beside_its_arm_is_held_to_what_it_was(
    shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 30 ended far above the others: coming to the same is no fault of today's code, coming nearer is."""
    study = (replace(studies.AGAIN[1], seeds=(30, 31, 32, 33)),)
    runs = studies.planned(study, tmp_path / "kept")
    archive = Archive(tmp_path / "kept.jsonl")
    for run in runs:
        write(run, end=0.8 if run.seed == 30 else 0.4)
        archive.of(run)
    run = next(run for run in studies.planned(study, tmp_path / "fresh") if run.seed == 30)
    write(run, end=0.8 - shift)
    again = Archive(tmp_path / "fresh.jsonl").of(run)
    monkeypatch.setattr(check, "say", lambda text: None)
    assert again is not None
    assert check.judged(run, again, archive, runs) == (not shift)


def test_a_run_that_stops_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "AGAIN", (replace(studies.AGAIN[1], seeds=(30,)),))
    archive = Archive(tmp_path / "kept.jsonl")
    for run in studies.planned(studies.AGAIN, tmp_path / "kept"):
        write(run)
        archive.of(run)
    monkeypatch.setattr(check, "execute", lambda *_: None)
    monkeypatch.setattr(check, "warm_up", lambda *_: None)
    said: list[Any] = []
    monkeypatch.setattr(check, "say", said.append)
    (tmp_path / "fresh").mkdir()
    assert not check.check("again", archive, tmp_path / "fresh", number=1, draw=0, jobs=1)
    assert "stopped" in said[0]


def test_the_end_of_a_run_is_no_evaluation_before_training(tmp_path: Path) -> None:
    run = studies.planned(studies.AGAIN, tmp_path, [30])[0]
    write(run)
    record = Archive(tmp_path / "kept.jsonl").of(run)
    assert record is not None

    def ended(*values: float) -> float:
        rows = [{"rollouts": float(place), "dense": value} for place, value in enumerate(values)]
        return check.end(replace(record, evaluations=rows))

    assert ended(0.1, 0.6) == 0.6  # of the real model, where the policy before training was judged too
    assert ended(0.6) == 0.6
    assert ended(0.1, 0.4, 0.5, 0.6) == pytest.approx(0.5)
