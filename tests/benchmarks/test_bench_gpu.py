"""``make gpu``: what has succeeded is not run again, what failed fails the call, and nothing begins too late."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import learning, needs
from benchmarks.gpu import steps as gpu_steps
from benchmarks.gpu.steps import PIECES, Ledger, Step, steps


def python(name: str, code: str, minutes: float = 1) -> Step:
    return Step(name, (sys.executable, "-c", code), minutes)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, "cpu")


def test_what_has_succeeded_is_not_run_again(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = python("count", f"print('again', file=open({str(tmp_path / 'count')!r}, 'a'))")
    for _ in range(2):
        assert command.run_all([step], ledger, minutes=25)
    assert (tmp_path / "count").read_text() == "again\n"
    monkeypatch.setattr(gpu_steps, "fingerprint", lambda: "other sources")
    assert command.run_all([step], Ledger(tmp_path, "cpu"), minutes=25)
    assert (tmp_path / "count").read_text() == "again\n" * 2


def test_a_failure_fails_the_call_and_is_run_again(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = python("bad", "print('reason | why'); raise SystemExit(3)"), python("good", "print('fine')")
    absent = Step("absent", ("no-such-command",), 1)
    endless = python("endless", "while True: pass", minutes=0.01)
    assert not command.run_all([bad, good, absent, endless], ledger, minutes=25)
    assert "reason | why" in capsys.readouterr().out
    page = ledger.page([bad, good, absent, endless, python("later", "")])
    assert re.search(r"\| bad \| FAILED \(3\) \| [\d.]+ \| [\d-]+ \| reason \\\| why \|", page)
    assert re.search(r"\| good \| well \| .* \| fine \|", page)
    assert re.search(r"\| absent \| FAILED \(127\) \| .* \| no-such-command is not there \|", page)
    assert "| endless | STOPPED after 0.01 minutes |" in page
    assert "| later | not run |  |  |  |" in page
    assert [ledger.is_done(step) for step in (bad, good, absent, endless)] == [False, True, False, False]


def test_nothing_begins_that_could_end_too_late(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    long, short = python("long", "", minutes=9), python("short", "", minutes=1)
    assert not command.run_all([long, short], ledger, minutes=8)
    assert "long: needs up to 9 minutes, 8.0 are left: run this again" in capsys.readouterr().out
    assert ledger.is_done(short)
    assert not ledger.is_done(long)


def test_every_step_fits_into_a_part_of_8_minutes(tmp_path: Path) -> None:
    found = steps(PIECES, "cuda", tmp_path, tmp_path)
    assert len({step.name for step in found}) == len(found)
    assert max(step.minutes for step in found) < 8
    for step in found:
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).is_file()
    parts = ("build", "test", "sanitize", "train")
    assert sum(step.minutes for step in steps(parts, "cuda", tmp_path, tmp_path)) > 25  # limits; it goes on


def test_there_is_no_gpu_here_or_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no nvidia-smi here, so no GPU: --rehearse runs the steps on the CPU"):
        Ledger(tmp_path, "cuda")


def test_missing_packages_are_named() -> None:
    found, missing = needs.needed_by(needs.wanted())
    assert missing == []
    assert {"torch", "jsonargparse", "typeshed-client", "datasets", "dill"} <= set(found)
    found, missing = needs.needed_by(["torch>=99", "no-such-package>=1", "jsonargparse[signatures]"])
    assert missing == ["no-such-package>=1", "torch>=99"]
    assert "typeshed-client" in found  # by the extra alone
    assert "typeshed-client" not in needs.needed_by(["jsonargparse"])[0]


def test_wheels_are_installed_beside_until_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, into = tmp_path / "wheels", tmp_path / "site"
    for name, requires in (("outer_of_test", ["inner_of_test"]), ("inner_of_test", [])):
        source = tmp_path / name
        source.mkdir()
        (source / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "{name}"\nversion = "1"\ndependencies = {requires}\n'
            "[tool.setuptools]\npackages = []\n", encoding="utf-8"
        )  # fmt: skip
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
        subprocess.run([*pip, str(source)], check=True)
    monkeypatch.setattr(needs, "wanted", lambda: ["outer-of-test>=1"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    needs.install(wheels, into)
    assert needs.installed(Requirement("inner-of-test")) is not None
    monkeypatch.setattr(needs, "wanted", lambda: ["outer-of-test>=2"])
    with pytest.raises(SystemExit, match=r"Missing: outer-of-test>=2. Fill .* by make gpu-wheels and bring it here"):
        needs.install(wheels, into)


def test_a_rise_is_judged_by_its_error() -> None:
    assert learning.rise(0.25, 0.25, 256) == 0
    assert learning.rise(0.2, 0.5, 100) == pytest.approx(0.3 / (0.16 / 100 + 0.25 / 100) ** 0.5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_steps_run_in_a_rehearsal(tmp_path: Path) -> None:
    where = ["--save", str(tmp_path / "pages"), "--state", str(tmp_path / "state")]
    run = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--minutes", "60", *where]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "pages" / "gpu-run.md").read_text()
    assert page.startswith("# benchmarks.gpu\n\nA rehearsal on the CPU in toy sizes")
    assert "FAILED" not in page
    assert "not run" not in page
    assert {path.name for path in (tmp_path / "pages").iterdir()} >= {"gpu-run.md", "gpu-profile.md", "gpu-train.md"}
