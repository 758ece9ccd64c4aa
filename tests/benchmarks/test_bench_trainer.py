"""The trainer benchmark: every trainer takes as many steps over as many tokens, and a table says what they took."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.trainer.__main__ import HEADER, QUICK, once, table
from benchmarks.trainer.contenders import DENSE, PLAIN, SPARSE, TRL, measure
from benchmarks.trainer.stages import PREPARE, RESCORING, ROLLOUT, Measured, Stages

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")


@needs_proc
def test_own_steps_are_split() -> None:
    (setting,) = QUICK
    for name in (DENSE, SPARSE):
        run = measure(name, setting)
        assert run.tokens == setting.sequences * setting.tokens
        assert min(run.rollout, run.rescoring, run.update, run.rest) > 0
        assert run.rollout + run.rescoring + run.update + run.rest == pytest.approx(run.seconds)
        assert 0.3 < run.reward < 0.7
    assert 0 < measure(PLAIN, setting).update < run.seconds


@needs_proc
def test_a_watched_call_counts_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only between the two steps, and log-probs of the loss are no rescoring."""
    now = iter(range(100))
    monkeypatch.setattr("benchmarks.trainer.stages.time.perf_counter", lambda: float(next(now)))
    stages = Stages(first=1, last=2)
    trainer = SimpleNamespace(score=lambda: 7)
    seen: list[int] = []
    stages.watch(trainer, "score", RESCORING, inside=PREPARE, see=seen.append)
    trainer.prepare = lambda: trainer.score()
    stages.watch(trainer, "prepare", PREPARE)
    trainer.prepare()  # warms up
    stages.step()  # starts at 4
    trainer.prepare()  # from 5 to 8, and inside from 6 to 7
    trainer.score()
    stages.step()  # stops at 9
    run = stages.measured()
    assert seen == [7, 7]
    assert (run.seconds, run.rescoring, run.rollout, run.update, run.rest) == (5.0, 1.0, 0.0, 2.0, 2.0)
    assert stages.spent[ROLLOUT] == 0


def test_ratios_are_paired_by_round() -> None:
    (setting,) = QUICK

    def runs(*seconds: float) -> list[Measured]:
        return [Measured(s, s / 4, 0.0, s / 2, s / 4, 64.0, 0.5, 2**30) for s in seconds]

    found = {TRL: runs(4, 6, 30), DENSE: runs(4, 4, 4), SPARSE: runs(2, 2, 10), PLAIN: runs(1, 1, 5)}
    rows = {row[0]: dict(zip(HEADER, row, strict=True)) for row in table(setting, found).rows}
    assert [rows[name]["times as fast as TRL"] for name in found] == ["1.00", "1.50", "3.00", ""]
    assert [rows[name]["update: share of the plain loop"] for name in found] == ["17 %", "25 %", "50 %", "100 %"]
    assert rows[SPARSE]["s per step"] == "2"
    assert rows[SPARSE]["tokens/s"] == "32"


@pytest.mark.slow
@needs_proc
def test_trl_runs_once(tmp_path: Path) -> None:
    """In a process of its own, and not again once it is finished; one optimizer step per rollout rescores nothing."""
    needs_trl()
    (setting,) = QUICK
    run = once(TRL, setting, 1, tmp_path)
    assert run.tokens == setting.sequences * setting.tokens
    assert run.rescoring == 0
    assert min(run.rollout, run.update, run.rest) > 0
    assert 0.3 < run.reward < 0.7
    (tmp_path / "log.txt").unlink()
    assert once(TRL, setting, 1, tmp_path) == run
    assert not (tmp_path / "log.txt").exists()


def needs_trl() -> None:
    pytest.importorskip("trl", reason='needs TRL: pip install "sparse-rl-lightning[trl]"')
