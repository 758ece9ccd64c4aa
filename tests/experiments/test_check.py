"""Runs that are run again fall into what their arm came to, or are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from finished_runs import write

from experiments import check
from experiments.runner.records import Archive
from experiments.runner.runs import Run
from experiments.runner.studies import Where, planned
from experiments.stability.studies import AGAIN, Arithmetic


def test_the_band_is_that_of_one_run_more() -> None:
    """Of 0.4, 0.5 and 0.6: mean 0.5, deviation 0.1, t 4.303, and the root of 1 + 1/3."""
    assert check.band([0.4, 0.5, 0.6]) == pytest.approx((0.5 - 0.4969, 0.5 + 0.4969), abs=1e-4)
    assert check.band([0.44, 0.44]) == pytest.approx((0.42, 0.46))


@pytest.mark.parametrize("seeds", [(30, 31), (30, 31, 32, 33)])
@pytest.mark.parametrize("shift", [0.0, 0.3, None])
def test_what_ends_elsewhere_or_stops_is_told(
    shift: float | None, seeds: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(replace(study, seeds=seeds) for study in AGAIN)
    monkeypatch.setitem(check.COMPARISONS, "again", ("stability", few))
    archive, said = Archive(tmp_path / "kept.jsonl"), list[str]()
    for run in planned(few, Where(tmp_path / "kept")):
        write(run)
        assert archive.of(run) is not None

    def again(runs: Sequence[Run], fresh: Archive, jobs: int) -> None:
        for run in runs if shift is not None else ():
            write(run, end=0.5 + shift)

    monkeypatch.setattr(check, "execute", again)
    monkeypatch.setattr(Arithmetic, "prepare", lambda study, where: where.folder.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(check, "say", said.append)
    arguments = {"number": 2, "draw": 1, "jobs": 1}
    assert check.check("again", archive, Where(tmp_path / "fresh"), **arguments) == (shift == 0.0)
    if shift is None:
        assert all("stopped" in line for line in said)
    else:
        assert len(said) == 4  # with each cache
        assert all(line.endswith("OUTSIDE" if shift else "inside") for line in said)
    assert not check.check("again", Archive(tmp_path / "none.jsonl"), Where(tmp_path / "none"), **arguments)
    assert "measure first, python -m experiments.stability" in said[-1]


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_a_run_beside_its_arm_is_held_to_what_it_was(
    shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 30 ended far above the others: coming to the same is no fault of today's code, coming nearer is."""
    study = (replace(AGAIN[1], seeds=(30, 31, 32, 33)),)
    runs, archive = planned(study, Where(tmp_path / "kept")), Archive(tmp_path / "kept.jsonl")
    for run in runs:
        write(run, end=0.8 if run.seed == 30 else 0.4)
        archive.of(run)
    run = next(run for run in planned(study, Where(tmp_path / "fresh")) if run.seed == 30)
    write(run, end=0.8 - shift)
    monkeypatch.setattr(check, "say", lambda text: None)
    assert check.judged(run, Archive(tmp_path / "fresh.jsonl").of(run), archive, runs) == (not shift)


def test_the_end_of_a_run_is_no_evaluation_before_training(tmp_path: Path) -> None:
    run = planned(AGAIN, Where(tmp_path), [30])[0]
    write(run)
    record = Archive(tmp_path / "kept.jsonl").of(run)

    def ended(*values: float) -> float:
        rows = [{"rollouts": float(place), "dense": value} for place, value in enumerate(values)]
        return check.end(replace(record, evaluations=rows))

    assert ended(0.1, 0.6) == 0.6  # of the real model, where the policy before training was judged too
    assert ended(0.6) == 0.6
    assert ended(0.1, 0.4, 0.5, 0.6) == pytest.approx(0.5)
