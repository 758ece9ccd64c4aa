"""The study of a real model: every run is planned once, depends on frozen files, and has its place in the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import REAL
from benchmarks.common import code
from benchmarks.common.pages import END, mark
from examples import stories
from experiments.arms import curves
from experiments.arms.course import learned
from experiments.arms.runs import CODE, Run
from experiments.gradients.measure import FULL
from experiments.gradients.page import COMPARED
from experiments.learned_eviction import Drawn
from experiments.real import __main__ as command
from experiments.real import gradients, studies, task
from experiments.real.pictures import pictures
from experiments.real.results import Results, blocks
from experiments.real.teacher import network_of
from experiments.stability.execution import execute
from experiments.stability.records import Archive
from experiments.stability.studies import Recipe
from sparse_rl_lightning import compressors
from tests.learned import learned_score


def test_every_run_is_planned_once() -> None:
    runs = studies.planned(studies.MAIN, Path("runs"), REAL)
    assert len({run.folder for run in runs}) == len(runs) == 55
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    dense = next(run for run in runs if run.arm == studies.DENSE)
    assert (dense.budget, dense.budgets) == (None, (72, 32))  # judged under both
    assert {run.budget for run in runs if run.arm == studies.REPLAY} == {72, 32}
    few = studies.planned(studies.MAIN, Path("runs"), REAL, seeds=[21])
    assert {run.seed for run in few} == {21}
    assert not {run.seed for run in runs} & {run.seed for run in studies.planned(studies.RATES, Path("runs"), REAL)}


def test_task_and_reward_are_those_of_the_example_when_it_began() -> None:
    assert task.Stories(num_train=3, seed=4).train_rows() == stories.Stories(num_train=3, seed=4).train_rows()
    words = [["lemon", "queen"]]
    told = ["The old queen of the small island ate a sour lemon."]
    assert task.story_reward(told, words) == stories.story_reward(told, words) == [1.0]


def test_its_code_is_of_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of the task or of a correction makes another run of it; an edited example does not."""
    (run, *_) = studies.planned(studies.MAIN[:1], tmp_path, REAL)
    before = run.code

    def edited(file: Path) -> str:
        own = file.read_bytes()
        with monkeypatch.context() as patch:
            read = Path.read_bytes
            patch.setattr(Path, "read_bytes", lambda path: read(path) + b"\nNEW = 1\n" * (path == file))
            assert file.read_bytes() != own
            code._sources.cache_clear()
            found = code.code_of(["experiments.real.task.story_reward"])
        code._sources.cache_clear()
        return found

    told = code.code_of(["experiments.real.task.story_reward"])
    assert edited(Path(str(task.__file__))) != told
    assert edited(Path(str(code.corrections.__file__))) != told
    assert edited(Path(str(stories.__file__))) == told
    assert replace(run, seed=21).code == before


def write(run: Run, end: float) -> None:
    """The files of a finished run."""
    evaluation = {"rollouts": 12, "dense": end, **{str(budget): end / 2 for budget in run.budgets}}
    start = {"rollouts": 0, "dense": 0.1, **{str(budget): 0.05 for budget in run.budgets}}
    before = [start] if run.settings.every_n_rollouts else []
    course = {
        "evaluations": [*before, evaluation],
        "splits": [{"rollouts": 0, curves.COMPRESSION: 0.5, curves.ROUNDING: 1e-12}],
        "unused": [0.0], "clipped": [0.0], "ratios": [2.0, 2.0],
        "grad_norms": [0.5, 12.0 * (end < 0.3)], "seconds": 60.0,
    }  # fmt: skip
    history = [
        {"rollout": i, "reward": 0.1 * i, "rejection_rate": 0.1, "completions/mean_length": 90.0} for i in (0, 1)
    ]
    run.folder.mkdir(parents=True)
    (run.folder / CODE).write_text(run.code)
    (run.folder / "course.json").write_text(json.dumps(course))
    summary = {"history": history, "summary": {"wall_time_seconds": 360.0, "kv_saving_final": 0.5}}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    (run.folder / "version_0").mkdir()
    (run.folder / "version_0" / "metrics.csv").write_text("step,acceptance/p05\n0,0.7\n1,0.8\n")


def test_tables_say_what_was_found(tmp_path: Path) -> None:
    main = studies.MAIN
    for run in studies.planned(main, tmp_path / "runs", REAL):
        ends = {"naive": 0.2, "dense": 0.6 + 0.01 * (run.seed == 20)}
        write(run, ends.get(run.arm.label, 0.58))
        run.checkpoint.parent.mkdir()
    archive = Archive(tmp_path / "real.jsonl")
    found = blocks(Results(archive, tmp_path / "runs", REAL, "cpu"), {"main": main, "rates": studies.RATES})
    assert list(found) == ["main", "overview", "readme", "signs"], "what is not finished has no table"
    rows, short, signs = (
        [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in found[name].splitlines()[2:]]
        for name in ("main", "overview", "signs")
    )
    assert len(rows) == 2 + 12
    half, quarter = found["overview"].split("With a quarter of the KV memory:")
    assert half.startswith("With a half of the KV memory:")
    assert half.count("\n| ") == quarter.count("\n| ") == 1 + 7, "the header, before training, and six arms"
    naive = next(row for row in rows if row[:2] == ["a half", "naive"])
    assert naive[2:6] == ["0.20 ± 0.00", "0.10 ± 0.00", "+0.0 ± 0.0", "+0.0 ± 0.0"]
    assert naive[6] == "-40.2 ± 0.6"  # behind dense training, whose seed 20 ends higher
    assert next(row for row in rows if row[1] == "Sparse-RL, RandomEviction")[4] == "+38.0 ± 0.0"
    leads = ["+0.0 ± 0.0", "-40.2 ± 0.6", "-20.1 ± 0.3"]
    assert ["naive", "0.20 ± 0.00", "0.10 ± 0.00", *leads, "0 of 5", "10.0 ± 0.0 %"] in short
    assert ["a quarter", "a gradient longer than 10", "5 of 5", "0 of 20"] in signs
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    pictures(Results(archive, tmp_path / "runs", REAL, "cpu"), main, tmp_path / "docs" / "measured")
    assert {file.name for file in tmp_path.rglob("*.png")} == {"real.png", "real-ends.png"}
    for name, block in (("docs/results.md", "overview"), ("README.md", "readme")):
        (tmp_path / name).write_text(f"{mark('experiments.real', block)}\n{END}\n")
    command.save(found, tmp_path / "docs" / "measured")
    assert found["overview"] in (tmp_path / "docs" / "results.md").read_text()
    assert found["readme"] in (tmp_path / "README.md").read_text()
    front = [line.strip("| ").split(" | ") for line in found["readme"].splitlines()[2:]]
    assert [row[0] for row in front] == ["naive", "reweighting only", "Sparse-RL", "replay"]
    assert front[0][1:] == ["-40.2 ± 0.6", "-40.2 ± 0.6", "-20.1 ± 0.3"]
    page = (tmp_path / "docs" / "measured" / "real.md").read_text()
    assert all(found[name] in page for name in ("main", "signs"))
    assert {row[0] for row in rows if row[1] == "dense"} == {"a half", "a quarter"}
    assert len((tmp_path / "real.jsonl").read_text().splitlines()) == 55
    run, *others = studies.planned(main, tmp_path / "runs", REAL)
    few = Archive(tmp_path / "few.jsonl")
    few.records = {
        key: one for key, one in archive.records.items() if key.endswith("dense-budget-72-32-steps-12-seed-20")
    }
    for other in others:
        (other.folder / "course.json").unlink()  # an early end
    found = blocks(Results(few, tmp_path / "runs", REAL, "cpu"), {"main": main})
    assert [line.split(" | ")[1] for line in found["main"].splitlines()[2:]] == ["before training"] * 2 + ["dense"] * 2
    command.tidy(run, archive)
    assert not run.checkpoint.parent.exists()


def test_a_cell_that_was_run_again_stands_beside_what_it_came_to_first(tmp_path: Path) -> None:
    """Other seeds' runs stay; those of the cell take the place of the first in the lead alone, whose lines are kept."""
    for run in studies.planned(studies.MAIN[1:2], tmp_path / "runs", REAL):
        write(run, 0.2 if run.arm.label == "naive" else 0.5)
    archive, again = Archive(tmp_path / "real.jsonl"), Archive(tmp_path / "real_again.jsonl")
    results = Results(archive, tmp_path / "runs", REAL, "cpu", again)
    assert blocks(results, {"cell": (studies.CELL,)}) == {}, "nothing was run again"
    for run in studies.planned((studies.CELL,), tmp_path / "runs" / "again", REAL):
        write(run, 0.4 if run.arm.label == "naive" else 0.5)
        assert again.of(run) is not None
    rows = [line.strip("| ").split(" | ") for line in blocks(results, {"cell": (studies.CELL,)})["cell"].splitlines()]
    shown = {(row[0], row[1]): row[2:] for row in rows[2:]}
    assert list(shown)[:2] == [("naive", "first"), ("naive", "again")]
    assert len(shown) == 8
    drawn = "0.000, 90.0 tokens"
    assert shown["Sparse-RL", "first"] == [drawn, "0.500", "0.250", "+30.0 ± 0.0"]
    assert shown["Sparse-RL", "again"] == [drawn, "0.500", "0.250", "+26.0 ± 11.1"]  # one lead of five is 10
    assert shown["naive", "first"][1] == "0.200" != shown["naive", "again"][1]


def test_a_line_names_the_weights_that_its_run_began_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds that begin from two policies are not one study: a warm-up ends elsewhere on another processor."""
    monkeypatch.setattr(Run, "execute", lambda run: write(run, 0.5))
    archive = Archive(tmp_path / "real.jsonl")
    starts = []
    for place, weights in enumerate((b"one", b"another", b"")):
        policy = tmp_path / str(place)
        policy.mkdir()
        if weights:
            (policy / "model.safetensors").write_bytes(weights)
        runs = studies.CELL.runs(20 + place, tmp_path / "runs", policy)[:1]
        execute(runs, archive, 1)
        record = archive.of(runs[0])
        assert record is not None
        starts.append(record.start)
        told = capsys.readouterr().err
        assert ("begin from other weights" in told) == (place > 0)
        assert all(start in told for start in starts[:place])
    assert [len(start) for start in starts] == [12, 12, 0]
    assert starts[0] != starts[1]


def test_learned_eviction_is_told_beside_the_best_rule(tmp_path: Path) -> None:
    learning = studies.LEARNING_TO_EVICT
    quarter = replace(studies.MAIN[1], arms=(studies.REPLAY,))
    for run in studies.planned([quarter, *learning], tmp_path / "runs", REAL):
        ends = {"SnapKV": 0.4, "H2O": 0.6, "LearnedScore": 0.8 + 0.1 * (run.arm == studies.LEARNED)}
        write(run, ends[run.settings.method["class_path"]])
    results = Results(Archive(tmp_path / "real.jsonl"), tmp_path / "runs", REAL, "cpu")
    found = blocks(results, {"learned": learning})["learned"]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in found.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        "H2O, by age, replay", "LearnedScore, replay", "LearnedScore, replay + drawn eviction",
        "LearnedScore, replay + learned eviction", "SnapKV, replay",
    ]  # fmt: skip
    # what the cache keeps of the full one is a half; ahead of H2O, of imitation, of SnapKV; with the full cache
    assert [[float(cell.split()[0]) for cell in row[1:6]] for row in rows] == [
        [0.30, 0, -10, 10, 0.6], [0.40, 10, 0, 20, 0.8], [0.40, 10, 0, 20, 0.8], [0.45, 15, 5, 25, 0.9],
        [0.20, -10, -20, 0, 0.4],
    ]  # fmt: skip
    assert rows[0][6] == "0.800 ± 0.000"
    fixed, drawn, own = learning[1].runs(20, tmp_path, REAL)
    assert all(str(network_of(tmp_path, REAL)) in " ".join(run.command()) for run in (fixed, drawn, own))
    assert any("eviction_weight=0.0" in word for word in drawn.command())
    assert not any("eviction_weight" in word for word in own.command())


def test_drawn_evictions_are_judged_undrawn_with_what_they_learned() -> None:
    given = learned_score(budget=32, buffer=8)
    (judged,) = learned(Drawn(given)).items()
    assert judged[0] == "32"
    assert isinstance(judged[1], Drawn)
    assert judged[1].temperature == 0
    assert judged[1]._parts == [given]
    assert learned(given) == {}


def test_gradients_have_a_column_per_policy_and_budget() -> None:
    lines = [
        {"weights": weights, "method": "SnapKV", "budget": budget, "variant": variant,
         "cosine": {"value": 0.1 * place, "width": 0.01}, "length": {"value": 1.0 + wide, "width": 0.02 + wide},
         "noise": {"value": 0.3 if variant == FULL else 0.2}, "rejected": 0.002 * budget, "k3": 1 / budget}
        for weights, wide in (("before training", 0.0), ("after dense training", 2.0))
        for budget in (72, 32) for place, variant in enumerate((FULL, *COMPARED))
    ]  # fmt: skip
    header, _, *rows = gradients.table(lines).untitled.splitlines()
    places = [f"{weights}, {slot}" for weights in gradients.WEIGHTS for slot in ("a half", "a quarter")]
    assert header == f"|  | {' | '.join(places)} |"
    for place, (variant, row) in enumerate(zip(COMPARED, rows, strict=False), start=1):
        cells = [f"{0.1 * place:.2f} ± 0.01 · 1.00 ± 0.02"] * 2 + [f"{0.1 * place:.2f} ± 0.01 · –"] * 2
        assert row == f"| {variant} | {' | '.join(cells)} |"
    assert rows[-2] == f"| sequences rejected · k3 | {' | '.join(['14.4% · 0.014', '6.4% · 0.031'] * 2)} |"
    assert rows[-1] == f"| two halves: full cache · naive | {' | '.join(['0.30 · 0.20'] * 4)} |"
    assert {one.name for one in gradients.StorySamples.variants} == set(COMPARED)


def test_a_recipe_is_what_the_command_line_says(tmp_path: Path) -> None:
    (study,) = (replace(studies.RATES[0], recipe=Recipe(4, 4, 1e-3, rollouts=12, warm_up=0)),)
    (run,) = study.runs(0, tmp_path, REAL, "gpu")
    told = run.command()
    for option in (
        "trainer.max_steps=48", "model.init_args.steps_per_generation=4", "trainer.accelerator=gpu",
        "model.init_args.rollout.cuda_graphs=require", "model.init_args.optimizer.init_args.lr=0.001",
    ):  # fmt: skip
        assert f"--{option}" in told


@pytest.mark.parametrize("name", studies.METHODS)
def test_graphs_are_required_where_they_can_be(name: str, tmp_path: Path) -> None:
    own = studies.METHODS[name]
    kind = learned_score if name == "LearnedScore" else getattr(compressors, own["class_path"])
    (run,) = replace(studies.MAIN[1], method=name, arms=(studies.REPLAY,)).runs(20, tmp_path, REAL, "gpu")
    requires = "--model.init_args.rollout.cuda_graphs=require" in run.command()
    assert requires == (not kind(budget=studies.QUARTER, **own["init_args"]).state_fields)


@pytest.mark.real
@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason="needs the model of make real-model")
def test_arms_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rollout of replay and of chance, whose command lines differ most."""
    monkeypatch.setattr(studies, "PROBLEMS", 4)
    short = replace(studies.USUAL, rollouts=1)
    quarter, chance = (replace(study, recipe=short, seeds=(20,)) for study in studies.MAIN[1::2])
    runs = [
        run
        for run in studies.planned([quarter, chance], tmp_path, REAL)
        if run.arm in (studies.REPLAY, studies.SPARSE_RL)
    ]
    for run in (runs[1], next(run for run in runs if run.settings.method["class_path"] == "RandomEviction")):
        assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]
        (evaluation,) = json.loads((run.folder / "course.json").read_text())["evaluations"]
        assert set(evaluation) == {"rollouts", "dense", "32"}
        assert 0 <= evaluation["dense"] <= 1
