"""The runner of all studies: every run once, resumable, its line enough, and none of other code beside today's."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from finished_runs import write

from benchmarks import REAL, ROOT
from benchmarks.common import code
from benchmarks.common.pages import END, mark
from experiments.arms import PROGRAM as ARMS
from experiments.real.__main__ import PROGRAM as REAL_PROGRAM
from experiments.real.studies import CENTERED as REAL_CENTERED
from experiments.real.studies import EQUIVALENCE
from experiments.runner import execution
from experiments.runner import runs as running
from experiments.runner.command import Program
from experiments.runner.course import Course
from experiments.runner.outcomes import mean
from experiments.runner.records import BINS, Archive, binned, long_steps
from experiments.runner.runs import CODE, NOTES, Run
from experiments.runner.studies import Study, Where, planned
from experiments.runner.tables import Results, equivalence_table
from experiments.stability.__main__ import PROGRAM
from experiments.stability.studies import AGAIN, CENTERED, MAIN, NAIVE, SPARSE_RL
from sparse_rl_lightning.callbacks.guards.step_guard import large_ratio_warning, long_step_advice


def one_run(folder: Path) -> Run:
    return replace(MAIN, arms=(NAIVE,)).runs(10, Where(folder))[0]


def test_interrupted_run_goes_on_and_finished_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = one_run(tmp_path), list[Any]()
    monkeypatch.setattr(running, "run_in", lambda folder, command: begun.append(command))
    assert "--ckpt_path=last" not in run.command()
    run.checkpoint.parent.mkdir(parents=True)
    run.checkpoint.touch()
    (run.folder / CODE).write_text(run.code)
    assert "--ckpt_path=last" in run.command()
    assert not run.execute()
    (run.folder / NOTES).touch()
    assert run.execute()
    assert len(begun) == 1


def test_a_run_of_other_code_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited reward is another run, and so is a compressor; a callback's options are in the command line already."""
    run = one_run(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / NOTES).touch()  # as an earlier version left it
    monkeypatch.setattr(running, "run_in", lambda folder, command: None)
    assert not run.execute()
    assert (run.folder.with_name(f"{run.folder.name}~1") / NOTES).is_file()
    (run.folder / NOTES).touch()
    assert run.execute()
    monkeypatch.setattr(running, "code_of", lambda *configs: "another reward")
    assert not one_run(tmp_path).is_finished


def test_code_is_that_of_rewards_tasks_environments_and_compressors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(code, "_sources", lambda kind: seen.append(kind.__qualname__) or "")
    config = running.read_file(running.CONFIGS / "tools.yaml")
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


def test_a_line_is_read_off_the_runs_files_and_is_enough(tmp_path: Path) -> None:
    run = one_run(tmp_path)
    write(run)
    kept = tmp_path / "kept.jsonl"
    record = Archive(kept).of(run)
    assert (record.k3, record.p05, record.minutes, record.spikes) == (0.5, 0.9, 2.0, 0.25)
    assert (record.end("dense", 3), record.end("34", 3), record.largest_ratio) == (0.5, 0.25, 50.0)
    for name in (NOTES, "summary.json"):
        (run.folder / name).unlink()
    assert Archive(kept).of(run) == record
    assert Archive(kept).of(replace(run, seed=11)) is None


def test_records_of_other_code_never_share_a_table_with_todays(tmp_path: Path) -> None:
    runs = replace(MAIN, arms=(NAIVE, SPARSE_RL)).runs(10, Where(tmp_path))
    kept = tmp_path / "kept.jsonl"
    for run in runs:
        write(run)
        assert Archive(kept).of(run) is not None
        (run.folder / NOTES).unlink()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    for changed, shown in ((0, [False, True]), (1, [True, True])):
        lines[changed]["code"] = "of before"
        kept.write_text("\n".join(map(json.dumps, lines)))
        archive = Archive(kept)
        assert [archive.is_of_other_code(run) for run in runs] == [line["code"] == "of before" for line in lines]
        archive.admit(runs)
        assert [archive.of(run) is not None for run in runs] == shown


def test_lines_that_are_kept_apart_replace_none(tmp_path: Path) -> None:
    study = replace(MAIN, arms=(NAIVE,), seeds=(10,))
    apart, archive = replace(study, apart="again"), Archive(tmp_path / "kept.jsonl", apart=("", "again"))
    for end, own in ((0.25, study), (0.5, apart)):
        (run,) = own.runs(10, Where(tmp_path))
        write(run, end)
        assert archive.of(run).end("dense", 3) == end
    assert [len((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("kept", "kept_again")] == [1, 1]
    results = Results(Where(tmp_path), archive)
    assert [results.of(own, NAIVE)[10].dense for own in (study, apart)] == [0.25, 0.5]


def test_a_line_names_the_weights_that_its_run_began_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds that begin from two policies are not one study: a warm-up ends elsewhere on another processor."""
    monkeypatch.setattr(Run, "execute", write)
    archive, starts = Archive(tmp_path / "kept.jsonl"), list[str]()
    for seed, weights in enumerate((b"one", b"another", b"")):
        (run,) = replace(MAIN, arms=(NAIVE,), seeds=(seed,)).runs(seed, Where(tmp_path / str(seed)))
        policy = Path(run.settings.policy)
        policy.mkdir(parents=True)
        if weights:
            (policy / "model.safetensors").write_bytes(weights)
        running._digest_of.cache_clear()
        execution.execute([run], archive, 1)
        starts.append(archive.of(run).start)
        assert ("begin from other weights" in capsys.readouterr().err) == (seed > 0)
    assert [len(start) for start in starts] == [12, 12, 0]
    assert starts[0] != starts[1]


def test_every_warning_of_a_long_step_is_read(tmp_path: Path) -> None:
    run = one_run(tmp_path)
    assert long_steps(run) is None  # no log, nothing known
    run.folder.mkdir(parents=True)
    steps = [(1.04, 0.0), (5.02, 0.0), (0.0, 0.0), (2e4, 0.5), (1e-5, 0.0)]
    lines = [
        f"UserWarning: The gradient of optimizer step {4 * place} is 1,043 times as long as usual (1e+03). "
        + long_step_advice(*step, can_correct=False, can_bound=True)
        for place, step in enumerate(steps)
    ]
    lines.append(f"UserWarning: {large_ratio_warning(40, 5e4)}")
    (run.folder / "log.txt").write_text("\n".join(["Epoch 0", *lines]), encoding="utf-8")
    assert long_steps(run) == [[0, 1], [1, 5], [2, 0], [3, 2e4], [4, 1e-5]]


def test_curve_has_the_mean_or_the_largest_of_equal_parts() -> None:
    assert binned([1.0, 2.0], max) == [1.0, 2.0]
    values = [float(v) for v in range(10 * BINS)]
    assert binned(values, max) == [10.0 * i + 9 for i in range(BINS)]
    assert binned(values, statistics.fmean) == [10.0 * i + 4.5 for i in range(BINS)]
    assert binned([], max) == []


def test_one_and_two_seeds_have_no_interval() -> None:
    assert mean([0.5]) == "0.50"
    assert mean([0.25, 0.35], 0, percent=True) == "25 / 35 %"
    assert mean([2.0, -1.0], 1, signed=True) == "+2.0 / -1.0"
    assert mean([1.0, 2.0, 3.0]) == "2.00 ± 2.48"  # 4.303 / sqrt(3)


def test_tables_say_what_was_found(tmp_path: Path) -> None:
    """Leads are paired by seed; dense training knows no cache, and was judged under the milder one."""
    for run in planned(AGAIN, Where(tmp_path), [30, 31]):
        write(run, end={"dense": 0.5, "naive": 0.04}.get(run.arm.label, 0.4 + 0.1 * (run.seed > 30)))
    results = Results(Where(tmp_path), Archive(tmp_path / "kept.jsonl"))
    texts = PROGRAM.texts(results, ["again"])
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in texts["again"].splitlines()[2:]]
    shown = {(row[0], row[1]): row[2:] for row in rows}
    assert list(shown)[::5] == [("34 + 4", "dense"), ("30 + 4", "naive")]
    assert shown["30 + 4", "replay"] == [
        "0.40 / 0.50", "0.20 / 0.25", "0.40 / 0.50", "10.0 / 10.0 %", "0 of 2", "+36.0 / +46.0", "+18.0 / +23.0",
        "-10.0 / +0.0", "–", "+0.0 / +0.0", "+0.0 / +0.0",
    ]  # fmt: skip
    assert shown["34 + 4", "naive"][4] == "2 of 2"
    docs = tmp_path / "docs" / "measured"
    docs.mkdir(parents=True)
    above = docs.parent / "results.md"
    above.write_text(f"{mark('experiments.stability', 'overview')}\nold\n{END}\nrest", "utf-8")
    (docs / "stability.md").write_text("before\n", "utf-8")
    PROGRAM.save(texts, docs)
    assert "| dense | 0.50 / 0.50 | – |" in above.read_text("utf-8")
    assert "old" not in above.read_text("utf-8")
    page = (docs / "stability.md").read_text("utf-8")
    assert page.startswith("before\n")
    assert texts["again"] in page


@pytest.mark.parametrize(
    ("program", "studies", "columns"),
    [
        (PROGRAM, CENTERED, (7, 9, 11)),  # ahead of naive, dense and weights, with the full cache
        (REAL_PROGRAM, (REAL_CENTERED,), (3, 5, 7)),
    ],
)  # fmt: skip
def test_new_arms_are_led_and_followed_by_kept_ones(
    program: Program, studies: Sequence[Study], columns: tuple[int, ...], tmp_path: Path
) -> None:
    """The rivals' lines are of other code: their training has not changed since."""
    kept = shutil.copy(ROOT / "benchmarks" / "results" / f"{program.name}.jsonl", tmp_path)
    where = Where(tmp_path, REAL)
    for run in planned(studies, where):
        write(run)
    text = program.texts(Results(where, Archive(Path(kept))), ["centered"])["centered"]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()[2:]]
    assert len(rows) == sum(len(study.arms) for study in studies)
    for row in rows:
        assert all("±" in row[place] for place in columns), row


def test_equivalence_is_of_all_seeds_and_three_rollouts_each(tmp_path: Path) -> None:
    where, dense, ours = Where(tmp_path, REAL), *EQUIVALENCE.arms
    course = EQUIVALENCE.runs(25, where)[1].settings.notebook
    assert course is not None
    assert (course["init_args"]["also_before"], course["init_args"]["compressors"]) == ([10, 11], [])
    leads = dict(zip(EQUIVALENCE.seeds, [0.1] * 6 + [0.0] + [-0.1] * 6, strict=True))
    for seeds, shown in ((EQUIVALENCE.seeds[:-1], "–"), (EQUIVALENCE.seeds, "-4.9 to +4.9")):  # 1.782 x 10 / sqrt(13)
        for run in planned([EQUIVALENCE], where, seeds):
            if not run.folder.exists():
                write(run, end=0.5 + leads[run.seed] * (run.arm == ours))
        results = Results(where, Archive(tmp_path / "kept.jsonl"))
        first, second = equivalence_table(results, EQUIVALENCE).rows
        assert (first[0], second[0]) == (dense.label, ours.label)
        assert second[5] == shown
        assert second[1] == str(len(seeds))
    assert second[4] == "+0.0 ± 6.0"  # 2.179 x 10 / sqrt(13)


def test_a_course_is_judged_at_rollouts_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    monkeypatch.setattr(Course, "_evaluate", lambda course, trainer, module, number: judged.append(number))
    trainer: Any = None
    for course in (Course([], every_n_rollouts=0, also_before=[2, 3]), Course([], every_n_rollouts=3)):
        for number in range(5):
            module: Any = SimpleNamespace(num_rollouts=number)
            course.on_rollout_start(trainer, module, [])
    assert judged == [2, 3, 0, 3]


def test_studies_without_tables_of_their_own_have_a_plain_one(tmp_path: Path) -> None:
    for run in planned(ARMS.studies(["budgets"]), Where(tmp_path)):
        write(run)
    results = Results(Where(tmp_path), Archive(tmp_path / "kept.jsonl"))
    rows = [line.strip("| ").split(" | ") for line in ARMS.texts(results, ["budgets"])["budgets"].splitlines()[2:]]
    assert [row[1:3] for row in rows[:2]] == [["30", "dense"], ["30", "naive"]]
    assert [row[4] for row in rows] == ["0.25"] * 8
