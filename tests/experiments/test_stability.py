"""The papers' claims in miniature: every run is planned once, and the page says what the runs came to."""

from __future__ import annotations

import json
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.arms import curves
from experiments.arms.runs import CODE, DENSE, DRAWN, NAIVE
from experiments.stability import __main__ as command
from experiments.stability import execution, outcomes, signs, studies, task
from experiments.stability.outcomes import fall
from experiments.stability.records import BINS, Archive, Record, binned, key_of, long_steps
from experiments.stability.rejected import described, rejected_table
from experiments.stability.results import Results, overview, tables
from sparse_rl_lightning.callbacks.guards.step_guard import Cause, RatioWatch
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.rewards import arithmetic_reward, worked_steps_reward

COURSE_SECONDS = 30.0


def test_every_run_is_planned_once(tmp_path: Path) -> None:
    runs = studies.planned([studies.MAIN, *studies.QUIET], tmp_path)
    seeds = len(studies.MAIN.seeds)
    assert len({run.folder for run in runs}) == len(runs) == 8 * seeds + sum(len(one.seeds) for one in studies.QUIET)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert len({key_of(run) for run in runs}) == len(runs)
    own = [run for run in runs if run.seed in studies.MAIN.seeds]
    assert {run.settings.options["data.init_args.seed"] for run in own} == {str(1 + s) for s in studies.MAIN.seeds}
    assert {run.settings.problems_seed for run in runs} == {studies.PROBLEMS_SEED}  # other prompts, the same problems


def test_recipe_is_what_the_command_line_says(tmp_path: Path) -> None:
    recipe = studies.Recipe(prompts=24, steps=2, rate=1e-4, rollouts=30, warm_up=5)
    (run,) = studies.Study("sum", "SnapKV", 34, (DENSE,), recipe, (7,)).runs(7, tmp_path)
    command_line = run.command()
    for option in (
        "trainer.max_steps=60", "data.init_args.prompts_per_rollout=24", "model.init_args.steps_per_generation=2",
        "model.init_args.optimizer.init_args.lr=0.0001", "model.init_args.lr_scheduler.init_args.total_iters=10",
        "model.init_args.lr_scheduler.init_args.end_factor=1.0", "data.init_args.seed=8",
        "model.init_args.sampling.seed=7",
    ):  # fmt: skip
        assert f"--{option}" in command_line
    assert run.settings.folder.name == "sum-snapkv-24-x-8-2-steps-1e-4"


def test_learned_eviction_draws_from_the_method_that_all_have(tmp_path: Path) -> None:
    for times, study in zip((2, 3), studies.COUNTDOWN.values(), strict=True):
        runs = {run.arm.label: run for run in study.runs(10, tmp_path)}
        told = [word.partition("=")[2] for word in runs[studies.LEARNED.label].command() if ".compressor=" in word]
        drawn = json.loads(told[0])
        assert (drawn["class_path"], drawn["init_args"]["temperature"]) == (DRAWN, 0.3)
        naive = [word.partition("=")[2] for word in runs[studies.NAIVE.label].command() if ".compressor=" in word]
        assert drawn["init_args"]["compressor"] == json.loads(naive[0])
        assert study.budget + 4 == round(44 / times)
        assert all("--data.init_args.tasks=countdown" in run.command() for run in runs.values())


def test_frozen_sums_are_the_librarys_when_they_began(tmp_path: Path) -> None:
    """The same questions, paid alike: what is compared with earlier runs differs in seeds alone."""
    ours, theirs = (kind(num_train=50, num_val=8, seed=3) for kind in (task.Sums, ArithmeticTasks))
    assert ours.train_rows() == theirs.train_rows()
    assert ours.val_rows() == theirs.val_rows()
    (row,) = ours.train_rows()[:1]
    right, steps = row["solution"], row["solution"].partition("#")[0]
    texts = [right, steps, f"{steps};{right}", "1+2=3#" + row["answer"], "", f"{steps}#{row['answer']};1", "#"]
    told = {"completions": texts, **{name: [row[name]] * len(texts) for name in ("answer", "solution", "task")}}
    for own, usual in ((task.right_answer, arithmetic_reward), (task.right_steps, worked_steps_reward)):
        assert own(**told) == usual(prompts=texts, completion_ids=texts, **told)
    run = studies.AGAIN[1].runs(30, tmp_path)[0]
    words = run.command()
    places = [
        next(i for i, w in enumerate(words) if w.startswith(f"--data.{name}")) for name in ("class_path", "init_args")
    ]
    assert places[0] < places[1], "a class takes what is said of it behind it"
    assert "experiments.stability.task.right_steps" in next(w for w in words if "reward_funcs" in w)
    assert {r.seed for study in studies.AGAIN for s in study.seeds for r in study.runs(s, tmp_path)} == {*range(30, 36)}
    assert len(studies.planned(studies.AGAIN, tmp_path)) == 54


def write(run: Any, end: float | None = None, ratio: float = 50.0, rejected: float = 0.1) -> None:
    """The files of a finished run in round numbers: naive falls, all others rise, the more the larger the seed."""
    if end is None:
        end = 0.04 if run.arm.label == "naive" else 0.4 + 0.1 * (run.seed > 10)
    ends = [0.2, 0.3, end, end, end]
    evaluations = [
        {"rollouts": 10 * i, "dense": value, **{str(budget): value / 2 for budget in run.budgets}}
        for i, value in enumerate(ends)
    ]
    splits = [
        {"rollouts": i, curves.COMPRESSION: k3, curves.ROUNDING: 1e-12} for i, k3 in enumerate([9.0] * 9 + [0.5] * 3)
    ]
    course = {
        "evaluations": evaluations, "splits": splits, "unused": [0.0], "clipped": [0.0, 0.02],
        "ratios": [1.0] * 79 + [ratio], "grad_norms": [0.5] * 60 + [2.0] * 20, "seconds": COURSE_SECONDS,
    }  # fmt: skip
    run.folder.mkdir(parents=True)
    for version in (2, 10):  # the run was interrupted: its logger has two files, and the second repeats some steps
        place = run.folder / "runs" / "any" / f"version_{version}"
        place.mkdir(parents=True)
        steps = range(12) if version == 2 else range(8, 16)
        lines = "".join(f"{step},{version * 0.09 if step % 2 else ''}\n" for step in steps)
        (place / "metrics.csv").write_text(f"step,acceptance/p05\n{lines}", encoding="utf-8")
    history = [
        {"rollout": i, "reward": 1.0, "rejection_rate": rejected, "completions/mean_length": 30.0 + i}
        for i in range(40)
    ]
    told = Cause(ratio, share=0.09).told(can_correct=True, can_bound=True) if ratio > 100 else ""
    warning = f"The gradient of optimizer step 42 is 1,043 times as long as usual (20.9). {told}\n" if told else ""
    (run.folder / "log.txt").write_text(2 * warning, encoding="utf-8")  # again, when it went on
    summary = {"wall_time_seconds": 150.0, "kv_saving_final": 0.25}
    (run.folder / CODE).write_text(run.code, encoding="utf-8")
    (run.folder / "course.json").write_text(json.dumps(course), encoding="utf-8")
    (run.folder / "summary.json").write_text(json.dumps({"history": history, "summary": summary}), encoding="utf-8")


def cells(text: str) -> dict[str, list[str]]:
    """Rows of a table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_page_says_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(studies.MAIN, seeds=(10, 11, 12))
    for module in ("results", "pictures"):
        monkeypatch.setattr(f"experiments.stability.{module}.MAIN", small)
    runs = small.runs(10, tmp_path) + small.runs(11, tmp_path) + small.runs(12, tmp_path)
    for run in runs:
        if run.arm.label != "rejection only":
            write(run)
    kept = tmp_path / "kept.jsonl"
    results = Results(Archive(kept), tmp_path)
    docs = tmp_path / "docs" / "measured"
    docs.mkdir(parents=True)
    (docs / "stability.md").write_text("before\n", encoding="utf-8")
    above = tmp_path / "docs" / "results.md"
    above.write_text("<!-- written by experiments.stability: overview -->\nold\n<!-- until here -->\nrest", "utf-8")
    command.save(results, docs, command.note(results, runs))
    assert above.read_text("utf-8").endswith("rest")
    assert "| dense |" in above.read_text("utf-8")
    assert "old" not in above.read_text("utf-8")
    page = (docs / "stability.md").read_text(encoding="utf-8")
    assert page.startswith("before\n")
    blocks = tables(results)
    assert all(text in page for text in blocks.values())
    assert "21 of 24 planned runs" in page
    assert "at most 1e-12" in page

    main = cells(blocks["main"])
    # 0.4, 0.5 and 0.5 at the end; half of it compressed; t of three seeds is 4.303
    width = 4.303 * statistics.stdev([0.4, 0.5, 0.5]) / 3**0.5
    assert main["replay"] == [
        f"0.47 ± {width:.2f}", f"0.23 ± {width / 2:.2f}", "0.40 / 0.50 / 0.50", "10.0 ± 0.0 %", "0 of 3", "100%"
    ]  # fmt: skip
    assert main["naive"][0] == "0.04 ± 0.00"
    assert main["naive"][-2:] == ["3 of 3", "9%"]
    course = cells(blocks["course"])
    assert course["replay"] == ["25 ± 0 %", "0.5", "0.90 ± 0.00", "50", "25.0 ± 0.0 %", "2.0"]
    assert course["dense"][1:3] == ["0", "1.00 ± 0.00"]  # it evicts nothing
    assert main["before training"][:2] == ["0.20", "0.10"]
    assert "rejection only" not in main  # was not run

    ahead = cells(blocks["leads"])
    assert ahead["Sparse-RL"][1].startswith("+42.7")  # over naive: 40, 50 and 50, less 4
    assert ahead["Sparse-RL"][0] == ahead["Sparse-RL"][2] == "+0.0 ± 0.0"
    assert ahead["naive"][3].startswith("-21.3")  # over dense, compressed: 2 less 20, 25 and 25
    assert ahead["naive"][3] == ahead["naive"][4]
    for name in ("results", "results-courses", "results-tight"):
        assert (docs / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    # the line is enough: the run's own files may be gone, and it is not run again
    for run in runs:
        for name in ("course.json", "summary.json") if run.is_finished else ():
            (run.folder / name).unlink()
    again = Results(Archive(kept), tmp_path)
    assert tables(again) == blocks
    assert [again.archive.of(run) is None for run in runs] == [run.arm.label == "rejection only" for run in runs]


def test_a_record_of_other_code_is_shown_and_measured_anew(tmp_path: Path) -> None:
    (run,) = replace(studies.MAIN, arms=(NAIVE,)).runs(10, tmp_path)
    write(run)
    kept = tmp_path / "kept.jsonl"
    assert Archive(kept).of(run) is not None
    for name in ("course.json", "summary.json"):
        (run.folder / name).unlink()
    assert not Archive(kept).is_of_other_code(run)
    line = json.loads(kept.read_text())
    del line["code"]
    for noted in ({"code": "of before"}, {}):
        kept.write_text(json.dumps(line | noted))
        assert Archive(kept).is_of_other_code(run)
        assert Archive(kept).of(run) is None
        shown = Results(Archive(kept), tmp_path)
        shown.archive.admit([run])
        assert shown.archive.of(run) is not None
        assert "1 of them ran with a configuration or code that has changed since" in command.note(shown, [run])


def test_runs_of_other_code_are_never_in_a_table_with_those_of_todays(tmp_path: Path) -> None:
    own, other = replace(studies.MAIN, arms=(NAIVE, studies.SPARSE_RL)).runs(10, tmp_path)
    kept = tmp_path / "kept.jsonl"
    for run in (own, other):
        write(run)
        assert Archive(kept).of(run) is not None
        (run.folder / "course.json").unlink()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    lines[0]["code"] = "of before"
    kept.write_text("\n".join(map(json.dumps, lines)))
    archive = Archive(kept)
    archive.admit([own, other])
    assert [archive.of(run) is None for run in (own, other)] == [line["code"] == "of before" for line in lines]
    lines[1]["code"] = "of before"
    kept.write_text("\n".join(map(json.dumps, lines)))
    archive = Archive(kept)
    archive.admit([own, other])
    assert None not in map(archive.of, (own, other))


def test_every_study_is_shown_beside_those_that_it_shares_tables_with() -> None:
    """One that is missing there would show no run of other code."""
    assert sorted(name for names in command.BESIDE_EACH_OTHER for name in names) == sorted(studies.GROUPS)


def finished(path: Path) -> Results:
    return Results(Archive(path / "kept.jsonl"), path)


def test_spiral_is_asked_in_seeds_that_did_not_give_rise_to_it(tmp_path: Path) -> None:
    assert not set(studies.SPIRAL.seeds) & set(studies.MAIN.seeds)
    for seed in (16, 17):
        rejection, _, unlearned = studies.SPIRAL.runs(seed, tmp_path)
        write(rejection, end=0.04)
        write(unlearned, end=0.5 if seed == 16 else 0.4)
    table = cells(tables(finished(tmp_path))["spiral"])
    assert table["rejection only"][-2:] == ["2 of 2", "+0.0 / +0.0"]
    assert table["rejection, the rejected replayed"][-2:] == ["0 of 2", "+46.0 / +36.0"]
    assert set(table["rejection, baseline of the kept"]) == {"–"}


def test_tight_cache_is_compared_with_dense_rollouts_of_the_main_comparison(tmp_path: Path) -> None:
    for run in studies.planned([studies.MAIN, studies.TIGHT], tmp_path, [10]):
        if run.arm == DENSE:
            write(run, end=0.5)
        elif run.budget == studies.TIGHT.budget:
            write(run, end=0.2 if run.arm == NAIVE else 0.45)
    results = finished(tmp_path)
    blocks = tables(results)
    tight, ahead = cells(blocks["tight"]), cells(blocks["tight leads"])
    assert tight["before training"][:2] == ["0.20", "0.10"]
    assert (tight["naive"][0], tight["naive"][-1], tight["replay"][-1]) == ("0.20", "40%", "90%")
    assert ahead["replay"] == ["-5.0", "+25.0", "+0.0", "+0.0"]  # dense was judged under another compressed cache
    assert "naive" not in cells(blocks["main"])


def test_frozen_comparison_has_one_dense_run_a_seed_for_both_caches(tmp_path: Path) -> None:
    milder = studies.AGAIN[0]
    for run in studies.planned(studies.AGAIN, tmp_path, [30]):
        write(run, end=0.5 if run.arm == DENSE else 0.45 if run.budget == milder.budget else 0.2)
    results = finished(tmp_path)
    rows = [line.strip("| ").split(" | ") for line in tables(results)["again"].splitlines()[2:]]
    assert [row[:3] for row in rows[::5]] == [["34 + 4", "dense", "0.50"], ["30 + 4", "naive", "0.20"]]
    assert rows[-1][:2] == ["30 + 4", "replay"]
    # behind dense, which was judged under the other compressed cache, and level with Sparse-RL
    assert rows[-1][-4:] == ["-30.0", "–", "+0.0", "+0.0"]
    shown = cells(overview(results).untitled)
    assert shown["dense"] == ["0.50", "–", "10.0 %", "0 of 1"]
    assert shown["naive"] == ["0.20", "0.10", "10.0 %", "0 of 1"]
    assert list(shown)[2:] == [arm.label for arm in studies.FIVE]


def test_remedies_stand_beside_the_runs_that_they_are_to_help(tmp_path: Path) -> None:
    """The largest share of any ten rollouts tells whether rejection has risen."""
    again, remedies = studies.AGAIN[1], studies.REMEDIES
    assert set(remedies.seeds) <= set(again.seeds)
    for seed in remedies.seeds:
        for run in (*again.runs(seed, tmp_path), *remedies.runs(seed, tmp_path)):
            if run.arm.label in ("Sparse-RL", "Sparse-RL, threshold 1e-5"):
                write(run, end=0.5 if "threshold" in run.arm.label else 0.4)
    blocks = tables(finished(tmp_path))
    table = cells(blocks["remedies"])
    assert list(table)[2:4] == ["Sparse-RL", "reweighting only"]
    assert table["Sparse-RL, threshold 1e-5"][-1] == "+10.0 ± 0.0"
    assert table["Sparse-RL"][-2] == "10 ± 0 %"
    assert set(table["Sparse-RL, baseline of the kept"]) == {"–"}
    rows = [line.strip("| ").split(" | ") for line in blocks["rejecting"].splitlines()[2:]]
    tighter = {tuple(row[1:3]): row[3:] for row in rows if row[0] == "30 + 4"}
    assert tighter["Sparse-RL", "reward"][0] == "1.00 ± 0.00"
    assert tighter["reweighting only", "length"][0] == "–"
    assert tighter["Sparse-RL", "rejected, seed 30"][0] == "10%"


def test_steps_and_rates_are_asked_under_the_tighter_cache(tmp_path: Path) -> None:
    """Dense rollouts and the usual recipe are shared with the studies that have them; delta is for many steps."""
    runs = studies.planned(studies.GROUPS["steps"], tmp_path, [10])
    more = studies.planned(studies.GROUPS["steps"], tmp_path, [11])
    shared = {run.folder for run in studies.planned([studies.MAIN, studies.TIGHT], tmp_path, [10])}
    assert len(runs) == 20
    assert len([run for run in runs if run.folder in shared]) == 3  # dense, naive and Sparse-RL
    assert {run.budget for run in runs if run.arm != DENSE} == {studies.TIGHT.budget}
    for run in (*runs, *more):
        few, slow = "8-1-steps" in run.settings.folder.name, run.settings.folder.name.endswith("2e-4")
        if not slow or few or "8-4-steps" in run.settings.folder.name:  # two steps were run at one rate alone
            naive = (0.3 + 0.1 * slow if few else 0.04) + 0.02 * (run.seed > 10)
            write(run, end=naive if run.arm == NAIVE else 0.4 if run.arm == DENSE and not few else 0.5)
    blocks = tables(finished(tmp_path))
    table, fewer = cells(blocks["steps and rates"]), cells(blocks["fewer steps"])
    assert set(table["2 × 2e-4"]) == {"–"}
    assert table["1 × 3e-4"][:6] == ["0.50 / 0.50", "0.30 / 0.32", "–", "0.50 / 0.50", "+20.0 / +18.0", "+10.0 / +9.0"]
    assert table["4 × 3e-4"][:2] == ["0.40 / 0.40", "0.04 / 0.06"]
    assert table["4 × 3e-4"][-2:] == ["50", "50"]
    assert table["1 × 2e-4"][6] == "0.40 / 0.42"  # after 240 updates, of which it made no more
    # 0.36 more at 2e-4 than with four steps, 0.26 at 3e-4, in both seeds alike; dense training gains 0.1
    assert fewer["dense"] == ["+10.0 / +10.0", "–", "+0.0 / +0.0", "–"]
    assert fewer["naive"] == ["+31.0 / +31.0", "–", "+21.0 / +21.0", "–"]


def test_chance_is_compared_with_the_same_prompt(tmp_path: Path) -> None:
    for study, end in zip(studies.CONTROL, (0.5, 0.4, 0.2, 0.35), strict=True):  # chance open, protected; SnapKV
        for run in study.runs(10, tmp_path):
            if run.arm == NAIVE:
                write(run, end=end)
    table = cells(tables(finished(tmp_path))["chance"])
    assert table["prompt open"] == ["+30.0", "+15.0", "–", "–"]  # naive with the full and the compressed cache
    assert table["prompt protected"] == ["+5.0", "+2.5", "–", "–"]


def test_learned_eviction_is_compared_under_the_cache_it_trained_with(tmp_path: Path) -> None:
    ends = {NAIVE.label: 0.2, studies.REPLAY.label: 0.3, studies.DRAWN.label: 0.4, studies.LEARNED.label: 0.5}
    for run in studies.COUNTDOWN["half"].runs(10, tmp_path):
        if run.arm != DENSE:
            write(run, end=ends[run.arm.label])
    table = cells(tables(finished(tmp_path))["countdown"])
    assert table["before training"] == ["0.10", "0.20", "–", "–", "–", "–"]
    assert table["naive"] == ["0.10", "0.20", "–", "+0.0", "-5.0", "-10.0"]
    assert table["replay + learned eviction"] == ["0.25", "0.50", "–", "+15.0", "+10.0", "+5.0"]
    assert set(table["dense"]) == {"–"}


def test_signs_are_counted_where_runs_end_behind_and_where_they_do_not(tmp_path: Path) -> None:
    """Naive runs end behind, and have their one large ratio in the last part; where they fall, it is too late."""
    for seed in (10, 11, 12):
        for run in studies.planned([studies.MAIN, *studies.CONTROL], tmp_path, [seed]):
            if run.arm == DENSE:
                write(run, end=0.5)
            elif run.arm == NAIVE and run.settings.method == studies.METHODS["SnapKV"]:
                write(run, end=0.04 if seed < 12 else 0.44, ratio=1000.0, rejected=0.0)
            elif run.arm in (studies.REPLAY, studies.REWEIGHTING):
                write(run, end=0.46, ratio=200.0 if (run.arm, seed) == (studies.REPLAY, 10) else 1.0)
    results = finished(tmp_path)
    runs = signs.judged(results, [studies.MAIN])
    assert sum(run.is_behind for run in runs) == 3
    (ratio,) = (sign for sign in signs.SIGNS if "ratio" in sign.name)
    naive = next(run for run in runs if run.is_behind)
    assert fall(naive.record.evaluations, signs.FALLEN) == (10, 20)
    assert not naive.is_seen_before(ratio)
    early = replace(naive.record, curves={"rollout": [4.5, 14.5], "largest_ratio": [1.0, 101.0]})
    assert replace(naive, record=early).is_seen_before(ratio)
    found = {row[1]: list(row[2:]) for row in signs.signs_table(results).rows if row[0] == "main comparison"}
    assert found[ratio.name] == ["3 of 4", "0 of 5", "0 of 3"]
    assert found["StepGuard told of a long step"] == [
        "3 of 4",
        "0 of 5",
        "2 of 3",
    ]  # at rollout 10.5; one does not fall
    assert {tuple(map(tuple, run.record.long_steps or ())) for run in runs} == {
        ((10.5, 1000.0),),
        ((10.5, 200.0),),
        (),
    }
    old = replace(naive.record, long_steps=None)  # a line that was kept before they were read
    assert not signs.SIGNS[0].applies(old)
    assert found["a gradient longer than 10"] == ["0 of 0", "3 of 9", "0 of 0"]
    assert found["more than 5 % rejected, three times the least"] == ["0 of 0", "0 of 6", "0 of 0"]
    # the control shares its open SnapKV runs with the main comparison, and has no other yet
    assert {row[0] for row in signs.signs_table(results).rows} == {"main comparison"}


def test_signs_are_judged_beside_dense_training_by_the_same_recipe(tmp_path: Path) -> None:
    for run in studies.planned([studies.MAIN, *studies.GROUPS["steps"]], tmp_path, [10]):
        if run.arm == DENSE:
            write(run, end=0.5 if run.settings.folder.name.endswith("4-steps-2e-4") else 0.3)
        elif run.arm == NAIVE and run.settings.folder.name.endswith("1-steps-3e-4"):
            write(run, end=0.28)
    (run,) = signs.judged(finished(tmp_path), studies.GROUPS["steps"])
    assert (run.dense, run.is_behind) == (pytest.approx(0.3), False)


def test_every_warning_of_a_long_step_is_read(tmp_path: Path) -> None:
    (run,) = replace(studies.MAIN, arms=(NAIVE,), seeds=(10,)).runs(10, tmp_path)
    assert long_steps(run) is None  # no log, nothing known
    run.folder.mkdir(parents=True)
    causes = [Cause(1.04), Cause(5.02), Cause(), Cause(2e4, 0.5), Cause(1e-5)]
    lines = [
        f"UserWarning: The gradient of optimizer step {4 * place} is 1,043 times as long as usual (1e+03). "
        + cause.told(can_correct=False, can_bound=True)
        for place, cause in enumerate(causes)
    ]
    lines.append(f"UserWarning: The largest staleness ratio of optimizer step 40 {RatioWatch().see(Cause(5e4))}")
    (run.folder / "log.txt").write_text("\n".join(["Epoch 0", *lines]), encoding="utf-8")
    assert long_steps(run) == [[0, 1], [1, 5], [2, 0], [3, 2e4], [4, 1e-5]]


def test_bounds_of_signs() -> None:
    curves = {"rollout": [5.0, 15.0, 25.0, 35.0], "rejection_rate": [0.04, 0.02, 0.05, 0.07]}
    record = SimpleNamespace(curves=curves)
    assert signs.risen(record) == 35.0  # three times 0.02, and above 5 %
    assert signs.risen(SimpleNamespace(curves=curves | {"rejection_rate": [0.1] * 4})) is None  # as high as before
    assert signs.above("rejection_rate", 0.04)(record) == 25.0
    assert signs.above("rejection_rate", 0.07)(record) is None


def test_accuracy_after_some_rollouts_is_of_the_last_evaluations_until_then(tmp_path: Path) -> None:
    (run,) = replace(studies.MAIN, arms=(NAIVE,), seeds=(10,)).runs(10, tmp_path)
    write(run)
    record = finished(tmp_path).archive.of(run)
    assert record is not None
    rows = [{"rollouts": 20.0 * place, "dense": place / 10} for place in range(6)]
    outcome = outcomes.Outcome(replace(record, evaluations=rows), 30)
    assert outcome.dense_after(60) == pytest.approx(0.2)  # of 20, 40 and 60, not before training
    assert outcome.dense_after(80) == pytest.approx(0.3)


def test_fall_is_from_the_best_so_far() -> None:
    def rows(*accuracies: float) -> list[dict[str, float]]:
        return [{"rollouts": 20 * place, "dense": value} for place, value in enumerate(accuracies)]

    assert outcomes.fall(rows(0.3, 0.4, 0.5, 0.31, 0.29, 0.1), 0.6) == (60, 80)  # 0.29 is less than 0.6 of 0.5
    assert outcomes.fall(rows(0.3, 0.1), 0.6) == (0, 20)
    assert outcomes.fall(rows(0.3, 0.4, 0.25, 0.5), 0.6) is None


def test_curve_has_the_mean_or_the_largest_of_equal_parts() -> None:
    assert binned([1.0, 2.0], max) == [1.0, 2.0]
    values = [float(v) for v in range(10 * BINS)]
    assert binned(values, max) == [10.0 * i + 9 for i in range(BINS)]
    assert binned(values, statistics.fmean) == [10.0 * i + 4.5 for i in range(BINS)]
    assert binned([], max) == []


def test_one_and_two_seeds_have_no_interval() -> None:
    mean = outcomes.mean
    assert mean([0.5]) == "0.50"
    assert mean([0.25, 0.35], 0, percent=True) == "25 / 35 %"
    assert mean([2.0, -1.0], 1, signed=True) == "+2.0 / -1.0"
    assert mean([1.0, 2.0, 3.0]) == "2.00 ± 2.48"  # 4.303 / sqrt(3)


def test_nothing_is_begun_after_an_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second run has begun before the first one's end is heard of; it goes on until the others are called off."""
    begun: list[int] = []
    called_off = Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            called_off.set()
            super().shutdown(wait)

    class Interrupted:
        is_finished = False

        def execute(self) -> None:
            begun.append(len(begun))
            if len(begun) > 1:
                called_off.wait()
            raise KeyboardInterrupt

    class Empty:
        def of(self, run: Any) -> Record | None:
            return None

        def is_of_other_code(self, run: Any) -> bool:
            return False

        def other_starts(self, runs: Any) -> set[str]:
            return set()

    monkeypatch.setattr(execution, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        execution.execute([Interrupted() for _ in range(50)], Empty(), jobs=1)
    assert len(begun) <= 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_naive_training_ends_below_dense_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `python -m experiments.stability --short` prints; which other arm collapses depends on the rounding too."""
    args = ["stability.py", "--short", "--seeds=0", "--jobs=1", f"--runs={tmp_path}"]
    monkeypatch.setattr(sys, "argv", args)
    command.main()
    lines = capsys.readouterr().out.splitlines()
    found = {line.partition(",")[0]: [float(number) for number in re.findall(r"0\.\d+", line)] for line in lines}
    assert list(found) == ["dense", "naive", "replay", "Sparse-RL (paper)"]
    assert all(line.endswith(("collapsed", "not collapsed")) for line in lines)
    (before, dense), (same, naive) = found["dense"], found["naive"]
    assert before == same
    assert dense > before / 2 > naive


def test_rejected_sequences_are_described_beside_kept_ones() -> None:
    """Two of four have a near-impossible token: one at a further step, one at a digit."""
    texts = ["1+2=3;3+4=7#7", "1+2=3;3+4=7;7+1=8", "9+2=1#1", "1+2=3#3"]
    mask = torch.tensor([[place < len(text) for place in range(17)] for text in texts])
    sparse, dense = torch.zeros(4, 17), torch.zeros(4, 17)
    dense[1, 11] = dense[2, 4] = -20.0
    dense[3, 5] = -9.0  # above 1e-4
    rollout = SimpleNamespace(completion_mask=mask, old_logprobs=dense, sparse_logprobs=sparse)
    rewards = {"right_answer": torch.tensor([1.0, 0.0, 0.0, 1.0]), "right_steps": torch.tensor([1.0, 0.5, 0.0, 1.0])}
    scored: Any = SimpleNamespace(rollout=rollout, completions=texts, reward_table=rewards)
    found = described(scored)
    assert found["kept"] == {
        "share": 0.5, "tokens": 10.0, "right answers": 1.0, "right steps": 1.0, "a step too many": 0.0,
        "no answer": 0.0,
    }  # fmt: skip
    assert found["rejected"] == {
        "share": 0.5, "tokens": 12.0, "right answers": 0.0, "right steps": 0.25, "a step too many": 0.0,
        "no answer": 0.5, "rejected at a `;`": 0.5,
    }  # fmt: skip
    line = {"policy": "before training", **found}
    rows = cells(rejected_table([line, {**line, "policy": "seed 30"}, {**line, "policy": "seed 31"}]).untitled)
    assert rows["after training, 2 seeds"][-1] == "50 / 50 %"
