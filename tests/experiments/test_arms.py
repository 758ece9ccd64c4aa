"""The comparison of arms: every run once, resumable, with the command line a user would type; its pages."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import code
from experiments.arms import __main__ as command
from experiments.arms import curves
from experiments.arms import runs as planning
from sparse_rl_lightning import callbacks

RELATIVES = {"SparsityAwareRejection", "ImportanceReweighting", "RolloutCallback"}  # not corrections by name


def settings(folder: Path, **options: Any) -> Any:
    values = {"policy": "policy", "folder": folder, "budgets": (30, 26), "steps": 240, **options}
    return planning.Settings(**values)


def test_every_run_is_planned_once(tmp_path: Path) -> None:
    runs = planning.planned(settings(tmp_path), [0, 1], 26)
    assert len({run.folder for run in runs}) == len(runs)
    of_seed = [(run.arm.label, run.budget) for run in runs if run.seed == 1]
    assert of_seed[0] == ("dense", None)
    for arm in ("naive", "Sparse-RL (paper)", "replay"):
        assert {budget for label, budget in of_seed if label == arm} == {26, 30}
    assert len(of_seed) == 1 + 2 * 3 + len(planning.CORRECTIONS) - 4


def test_every_correction_by_name_is_compared() -> None:
    named = {c for arm in planning.CORRECTIONS for c in arm.callbacks if isinstance(c, str)}
    presets = importlib.import_module("sparse_rl_lightning.callbacks.corrections.presets")
    by_name = {name for name in callbacks.__all__ if getattr(callbacks, name).__module__ == presets.__name__}
    assert by_name <= named
    assert any("loss.off_policy_delta" in arm.options for arm in planning.CORRECTIONS)


def test_interrupted_run_goes_on_and_finished_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planning.planned(settings(tmp_path), [0], 26)[0]
    assert "--ckpt_path=last" not in run.command()
    run.checkpoint.parent.mkdir(parents=True)
    run.checkpoint.touch()
    (run.folder / planning.CODE).write_text(run.code)
    assert "--ckpt_path=last" in run.command()
    begun: list[Any] = []
    monkeypatch.setattr(planning, "run_in", lambda folder, command: begun.append(command))
    assert not run.execute()
    (run.folder / "course.json").touch()
    assert run.execute()
    assert len(begun) == 1


def test_a_run_of_other_code_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited reward is another run, and so is a compressor; a callback's options are in the command line already."""
    run = planning.planned(settings(tmp_path), [0], 26)[1]
    assert run.code == planning.planned(settings(tmp_path / "elsewhere"), [1], 26)[1].code
    run.folder.mkdir(parents=True)
    (run.folder / "course.json").touch()  # as an earlier version left it
    begun: list[Any] = []
    monkeypatch.setattr(planning, "run_in", lambda folder, command: begun.append(command))
    assert not run.is_finished
    assert not run.execute()
    assert len(begun) == 1
    assert (run.folder.with_name(f"{run.folder.name}~1") / "course.json").is_file()
    (run.folder / "course.json").touch()
    assert run.execute()
    again = planning.planned(settings(tmp_path), [0], 26)[1]
    monkeypatch.setattr(planning, "code_of", lambda *configs: "another reward")
    assert not again.is_finished


def test_code_is_that_of_rewards_tasks_environments_and_compressors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(code, "_sources", lambda kind: seen.append(kind.__qualname__) or "")
    config = planning.read_file(planning.CONFIGS / "tools.yaml")
    code.code_of(config, [{"class_path": "SnapKV"}, "sparse_rl_lightning.rewards.arithmetic_reward", 3, None])
    assert seen == ["ArithmeticTasks", "Calculator", "RKV", "SnapKV", "arithmetic_reward"]


TOLD = '''
def keep(budget):
    """Keep so many."""
    if budget < 1:
        raise UserError(f"budget must be positive, got {budget}.")
    return budget + 1  # the newest
'''


@pytest.mark.parametrize(
    ("edit", "counts"),
    [
        (('"""Keep so many."""', '"""Keep this many and one more."""'), False),
        (("  # the newest", ""), False),
        (("must be positive", "counts tokens"), False),
        (("    return", '    if budget > 9:\n        raise UserError("less")\n    return'), False),
        (("budget < 1", "budget < 2"), False),
        (("UserError", "ValueError"), True),  # which a run may catch, and go on
        (("raise UserError", "budget = 3 or UserError"), True),
        (("budget + 1", "budget + 2"), True),
        (("budget + 1", "budget - 1"), True),
        (("    return budget + 1", "    return budget + 1\n    return 0"), True),
        (("keep(budget)", "keep(budget=0)"), True),
    ],
)
def test_code_is_what_a_run_that_ended_depends_on(edit: tuple[str, str], counts: bool) -> None:
    assert edit[0] in TOLD
    assert (code.said(TOLD.replace(*edit).encode()) != code.said(TOLD.encode())) == counts


def found(run: Any, level: float) -> Any:
    """A finished run in round numbers."""
    budgets = [str(budget) for budget in run.budgets]
    course = {
        "evaluations": [
            {"rollouts": 20 * i, "dense": level * i, **dict.fromkeys(budgets, level * i / 2)} for i in range(5)
        ],
        "splits": [{"rollouts": i, curves.COMPRESSION: 0.1 * i} for i in range(1, 9)],
        "unused": [0.0, 0.5], "clipped": [0.0, 0.02], "seconds": 30.0,
    }  # fmt: skip
    history = [{"rollout": i, "reward": level, "rejection_rate": 0.1} for i in range(30)]
    return curves.Found(run, course, {"history": history, "summary": {"wall_time_seconds": 150.0}})


def test_pages_say_what_was_found(tmp_path: Path) -> None:
    own = settings(tmp_path)
    runs = [run for run in planning.planned(own, [0, 1], 26) if run.arm.label != "TIS"]
    results = [found(run, 0.2 + 0.1 * run.seed) for run in runs]
    blocks = command.blocks(results, own, "note")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in blocks["corrections"].splitlines()]
    by_label = {row[1]: row for row in rows if len(row) > 2}
    # evaluations 0, .2, .4, .6, .8: the last three; k3 .7 and .8 in the last quarter; 150 s less 30 s
    assert by_label["IcePop"] == [
        "26", "IcePop", "0.600 / 0.900", "0.300 / 0.450", "10.0% / 10.0%", "25.0% / 25.0%", "0.75 / 0.75",
        "1.0% / 1.0%", "2.0 / 2.0",
    ]  # fmt: skip
    assert by_label["before training"][2:4] == ["0.000", "0.000"]
    assert "TIS" not in by_label  # was not run
    assert blocks["replay"].count("| dense |") == 2


@pytest.mark.slow  # three processes that import everything
def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(steps: int) -> str:
        args = ["arms.py", "--quick", "--threads", "1", f"--runs={tmp_path}/runs", f"--save={tmp_path}", "--budgets=26"]
        monkeypatch.setattr(sys, "argv", [*args, f"--steps={steps}", "--only", "naive", "replay"])
        command.main()
        return (tmp_path / "arms.md").read_text(encoding="utf-8")

    page = run(4)
    assert "| 26 | naive |" in page
    assert "| 26 | dense |" not in page
    (naive,) = (tmp_path / "runs").glob("naive-*")
    course = json.loads((naive / "course.json").read_text(encoding="utf-8"))
    assert [row["rollouts"] for row in course["evaluations"]] == [0, 1, 2]
    assert len(course["clipped"]) == 4
    assert len(course["unused"]) == 2
    assert 0 <= course["splits"][0]["mismatch_split/rounding/kl_k3"] < 1e-6
    (replay,) = (tmp_path / "runs").glob("replay-*")
    whole = json.loads((replay / "course.json").read_text(encoding="utf-8"))
    assert (replay / "checkpoints" / "last.ckpt").is_file()
    (replay / "course.json").unlink()  # as if it had been killed behind its last step
    assert run(4) == page
    again = json.loads((replay / "course.json").read_text(encoding="utf-8"))
    assert "Restored all states" in (replay / "log.txt").read_text(encoding="utf-8")
    assert {name: again[name] for name in again if name != "seconds"} == {n: whole[n] for n in whole if n != "seconds"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert run(4) == page
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing ran again
