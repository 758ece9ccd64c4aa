"""Every study: its runs are those of the kept lines, its frozen files stay, and a run of each kind ends."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import string
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import REAL, ROOT
from benchmarks.common import code, kept
from benchmarks.common.pages import END, mark
from examples import stories
from experiments import arms, distill, schedule
from experiments.learned_eviction import Drawn
from experiments.long import __main__ as long_study
from experiments.long import choice
from experiments.long import studies as long_studies
from experiments.long.task import LongSums
from experiments.math import __main__ as math_study
from experiments.math.curves import STAGES, Curve, curves_table
from experiments.real import __main__ as real
from experiments.real import task as real_task
from experiments.real.studies import MAIN, REPLAY, USUAL
from experiments.runner.command import Program
from experiments.runner.course import held_out, learned
from experiments.runner.ends import Ends
from experiments.runner.runs import Run
from experiments.runner.studies import Where, planned
from experiments.runner.tables import Results, ninety
from experiments.stability import __main__ as stability
from experiments.stability import task
from experiments.stability.rejected import described, table
from experiments.turns import __main__ as turns
from experiments.turns.ending import METRICS, late_mean, numbers
from experiments.turns.studies import ARMS, LONGEST
from experiments.turns.studies import USUAL as TALKS
from sparse_rl_lightning import callbacks
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.records import Conversation
from sparse_rl_lightning.rewards import arithmetic_reward, worked_steps_reward
from tests.learned import learned_score

RESULTS = ROOT / "benchmarks" / "results"
STUDIES = (stability, real, math_study, long_study, turns, arms, schedule, distill)
PROGRAMS = [study.PROGRAM for study in STUDIES]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_run_is_planned_once(program: Program, tmp_path: Path) -> None:
    """Seed after seed, and every group is shown beside those that it shares tables with."""
    runs = planned(program.studies(list(program.groups)), Where(tmp_path, REAL))
    assert len({run.folder for run in runs}) == len(runs)
    assert len({(run.settings.apart, run.key) for run in runs}) == len(runs)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    if program.together:
        assert sorted(name for names in program.together for name in names) == sorted(program.groups)


@pytest.mark.parametrize(("program", "count"), [(stability.PROGRAM, 278), (real.PROGRAM, 115)])
def test_settings_are_those_of_the_kept_lines(program: Program, count: int) -> None:
    """A line whose run is told something else would not count any more."""
    where = Where(ROOT / "runs" / program.name, REAL)
    archive = program.archive(RESULTS / f"{program.name}.jsonl")
    lines = {key: line.settings for (apart, key), line in archive.records.items() if not apart}
    runs = [run for run in planned(program.studies(list(program.groups)), where) if run.key in lines]
    assert {run.key: run.settings_hash for run in runs if not run.settings.apart} == lines
    assert len(lines) == count


def test_every_correction_by_name_is_compared() -> None:
    named = {c for arm in arms.CORRECTIONS for c in arm.callbacks if isinstance(c, str)}
    presets = importlib.import_module("sparse_rl_lightning.callbacks.corrections.presets")
    by_name = {name for name in callbacks.__all__ if getattr(callbacks, name).__module__ == presets.__name__}
    assert by_name <= named
    assert any("loss.off_policy_delta" in arm.options for arm in arms.CORRECTIONS)


def test_frozen_sums_are_the_librarys_when_they_began() -> None:
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


def test_every_step_of_a_long_sum_takes_the_next_number() -> None:
    data = LongSums(num_train=3, num_val=2, seed=4)
    for row in data.train_rows() + data.val_rows():
        terms = row["prompt"].strip("=").split("+")
        steps, _, answer = row["solution"].partition("#")
        split = [re.split(r"[+=]", step) for step in steps.split(";")]
        assert len(set(terms)) == len(terms) == 80
        assert [terms[0], *(end for *_, end in split)] == [start for start, *_ in split] + [answer]
        assert [term for _, term, _ in split] == terms[1:]
        assert all(int(start) + int(term) == int(end) for start, term, end in split)
        told = {"completions": [row["solution"]], "answer": [row["answer"]], "solution": [row["solution"]]}
        assert task.right_answer(**told) == task.right_steps(**told) == [1.0]
        assert 980 < len(row["solution"]) < long_studies.LONGEST
    assert data.val_rows() == LongSums(num_val=2, seed=5).val_rows()
    assert data.train_rows() != LongSums(num_train=3, seed=5).train_rows()


def test_frozen_stories_are_those_of_the_example_when_it_began() -> None:
    rows = [kind.Stories(num_train=3, seed=4).train_rows() for kind in (real_task, stories)]
    assert rows[0] == rows[1]
    words, told = [["lemon", "queen"]], ["The old queen of the small island ate a sour lemon."]
    assert real_task.story_reward(told, words) == stories.story_reward(told, words) == [1.0]


def test_code_is_of_the_studys_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of the task or of a correction makes another run of it; an edited example does not."""

    def edited(file: Path) -> str:
        with monkeypatch.context() as patch:
            read = Path.read_bytes
            patch.setattr(Path, "read_bytes", lambda path: read(path) + b"\nNEW = 1\n" * (path == file))
            code._sources.cache_clear()
            changed = code.code_of(["experiments.real.task.story_reward"])
        code._sources.cache_clear()
        return changed

    told = code.code_of(["experiments.real.task.story_reward"])
    assert edited(Path(str(real_task.__file__))) != told
    assert edited(Path(str(code.corrections.__file__))) != told
    assert edited(Path(str(stories.__file__))) == told


def test_drawn_evictions_are_judged_undrawn_with_what_they_learned() -> None:
    score = learned_score(budget=32, buffer=8)
    (judged,) = learned(Drawn(score)).items()
    assert judged[0] == "32"
    assert isinstance(judged[1], Drawn)
    assert judged[1].temperature == 0
    assert judged[1]._parts == [score]
    assert learned(score) == {}


def test_conversations_are_counted() -> None:
    def said(*turns: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": turn} for turn in turns]

    talks = [Conversation(messages=said("1+2?", "#3"), reward=1.5), Conversation(messages=said("#4?"), reward=0.0)]
    talks.append(Conversation(messages=said("1+2?", "#3#", "9?"), reward=0.5))
    found = numbers([{"answer": "3"}, {"answer": "4"}, {"answer": "9"}], talks)
    assert found == pytest.approx({"reward": 2 / 3, "right": 2 / 3, "calls": 1, "turns": 2})
    assert late_mean([9.0] * 6 + [1.0, float("nan")]) == 1.0
    assert late_mean([float("nan")]) is None
    data = ArithmeticTasks(tasks="calculator_restated", num_terms=6, num_train=2000)
    answers = [text for row in data.train_rows() for text in re.findall(r"\?([^?]*;)", row["solution"])]
    assert max(map(len, answers)) == LONGEST


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
    shares = described(scored)
    assert shares["kept"] == {
        "share": 0.5, "tokens": 10.0, "right answers": 1.0, "right steps": 1.0, "a step too many": 0.0,
        "no answer": 0.0,
    }  # fmt: skip
    assert shares["rejected"] == {
        "share": 0.5, "tokens": 12.0, "right answers": 0.0, "right steps": 0.25, "a step too many": 0.0,
        "no answer": 0.5, "rejected at a `;`": 0.5,
    }  # fmt: skip
    rows = table([{"policy": "before training", **shares}]).rows
    assert [row[:3] for row in rows] == [("before training", "kept", "0.5"), ("before training", "rejected", "0.5")]


# ---------------------------------------------------------------- one run of each kind, to its end


def tiny(folder: Path, **policy: Any) -> Path:
    model, tokenizer = TinyPolicy(**{"max_position_embeddings": 256, **policy}).load()
    for item in (model, tokenizer):
        item.save_pretrained(folder)
    return folder


def brief(run: Run, policy: Path, **changes: Any) -> Run:
    """A run with weights that know nothing, as short as it can be."""
    options = {**run.settings.options, "data.init_args.num_val": "8"}
    changes = {"policy": str(policy), "steps": 4, "num_problems": 4, "options": options, **changes}
    return replace(run, settings=replace(run.settings, **changes))


def test_runs_of_all_seeds_answer_the_same_problems() -> None:
    for kind, shape in ((real_task.Stories, {"num_words": 3}), (task.Sums, {"num_terms": 3})):
        asked = held_out(kind(**shape), 4, seed=9)
        assert asked == kind(**shape, num_val=4, seed=9).val_rows()
        assert asked != held_out(kind(**shape), 4, seed=None)


@pytest.mark.slow  # processes that import everything
@pytest.mark.timeout(900)
def test_a_run_is_interrupted_and_comes_to_the_same_end(tmp_path: Path) -> None:
    study = replace(arms.PROGRAM.groups["budgets"][1], arms=(arms.REPLAY,))
    run = brief(study.runs(0, Where(tmp_path))[0], tiny(tmp_path / "policy"), every_n_rollouts=1)
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]
    whole = json.loads((run.folder / "course.json").read_text())
    assert [row["rollouts"] for row in whole["evaluations"]] == [0, 1, 2]
    assert (len(whole["clipped"]), len(whole["unused"])) == (4, 2)
    assert 0 <= whole["splits"][0]["mismatch_split/rounding/kl_k3"] < 1e-6
    (run.folder / "course.json").unlink()  # as if it had been killed behind its last step
    assert run.execute()
    again = json.loads((run.folder / "course.json").read_text())
    assert "Restored all states" in (run.folder / "log.txt").read_text()
    assert {name: again[name] for name in again if name != "seconds"} == {n: whole[n] for n in whole if n != "seconds"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arm", [ARMS[0], ARMS[-1]], ids=lambda arm: arm.label)
def test_conversations_are_held_before_and_after(arm: Any, tmp_path: Path) -> None:
    policy = tiny(tmp_path / "policy", alphabet="0123456789+-*?;#!")
    run = replace(TALKS, arms=(arm,)).runs(1, Where(tmp_path))[0]
    ending = run.settings.notebook
    assert ending is not None
    ending["init_args"]["num_problems"] = 8
    run = brief(run, policy, steps=2)
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]
    line = Ends.of(run)
    assert set(line.logged) == set(METRICS)
    assert line.before["full"]["turns"] >= 1
    assert ("protect_observations" in ending["init_args"]["compressor"]["init_args"]) == (arm == ARMS[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tails_are_measured_with_and_without_the_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra (lora)")
    (study,) = distill.PROGRAM.groups["distill"]
    run = brief(study.runs(0, Where(tmp_path))[1], tiny(tmp_path / "policy"))
    run = brief(run, tmp_path / "policy", notebook={**run.settings.notebook, "init_args": {"num_prompts": 4}})
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]
    line = Ends.of(run)
    assert list(line.after) == [distill.WITHOUT, distill.WITH]
    assert line.after[distill.WITH] != line.after[distill.WITHOUT]  # even a few steps do something
    assert all(0 < tail["5th percentile"] <= 1 for tail in (*line.before.values(), *line.after.values()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_schedule_is_another_budget(tmp_path: Path) -> None:
    (study,) = schedule.PROGRAM.groups["schedule"]
    run = brief(study.runs(0, Where(tmp_path))[1], tiny(tmp_path / "policy"), every_n_rollouts=0)
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_policy_of_long_sums_learns_longer_and_longer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = tuple(long_studies.Stage(terms, 4, 1e-3, 0.0) for terms in (3, 4))
    monkeypatch.setattr(long_studies, "STAGES", stages)
    where = Where(tmp_path)
    long_studies.QUARTER.prepare(where)
    first, second = (load_file(stage.policy(where) / "model.safetensors") for stage in stages)
    assert any((first[name] != second[name]).any() for name in first)
    command = next((tmp_path / "warmup" / "4-terms").rglob("run_config.yaml")).read_text()
    assert str(stages[0].policy(where)) in command
    shutil.rmtree(stages[1].policy(where))  # as if it had been interrupted
    monkeypatch.setattr(sys, "argv", ["choice", f"--runs={tmp_path}"])
    for name, value in {"STAGES": stages, "TERMS": 4, "LONGEST": 9, "LongSums": partial(LongSums, num_val=2)}.items():
        monkeypatch.setattr(choice, name, value)
    choice.main()
    assert "last.ckpt" in (stages[1].policy(where).parent / "log.txt").read_text()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[-5:]] == ["full", *long_studies.METHODS]
    run = long_studies.QUARTER.runs(0, where)[2]
    shorter = {"data.init_args.num_val": "8", "model.init_args.sampling.max_completion_length": "40"}
    run = brief(run, stages[-1].policy(where), options={**run.settings.options, **shorter})
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_naive_training_ends_below_dense_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `python -m experiments.stability --studies short` prints; which other arm collapses depends on rounding."""
    folders = [f"--runs={tmp_path}", f"--kept={tmp_path / 'kept.jsonl'}"]
    monkeypatch.setattr(sys, "argv", ["stability", "--studies", "short", "--seeds=0", "--jobs=1", *folders])
    stability.main(stability.PROGRAM, None)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| sum")]
    ends = {row[2]: float(row[3]) for row in rows}
    assert list(ends) == ["dense", "naive", "replay", "Sparse-RL (paper)"]
    (line,) = (line for line in kept.read(tmp_path / "kept_short.jsonl") if "naive" in line["key"])
    before = line["evaluations"][0]["dense"]
    assert min(before, ends["dense"]) > ends["naive"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("group", "arm", "judged"),
    [("main", 0, [1, 2, 3]), ("main", 1, [1, 2, 3]), ("card", 1, [0, 2, 3])],
    ids=["dense", "weights and centering", "card"],
)
def test_mathematics_is_judged_when_its_protocol_says(group: str, arm: int, judged: list[int], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra (lora)")
    where = Where(tmp_path, tiny(tmp_path / "policy", alphabet=string.printable, max_position_embeddings=512))
    (study,) = math_study.PROGRAM.groups[group]
    study = replace(study, recipe=replace(study.recipe, prompts=2, rollouts=3, every_n_rollouts=2))
    study.prepare(where)
    run = study.runs(study.seeds[0], where)[arm]
    options = {**run.settings.options, "trainer.precision": "32-true"}
    options["model.init_args.sampling.max_completion_length"] = "24"
    run = replace(run, settings=replace(run.settings, options=options))
    run.settings.notebook["init_args"]["num_problems"] = 4
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]
    line = math_study.PROGRAM.archive(tmp_path / "math.jsonl").of(run)
    again = math_study.PROGRAM.archive(tmp_path / "math.jsonl").of(run)
    assert repr(line) == repr(again)  # as it is read again, NaN too
    assert [row["rollouts"] for row in line.evaluations] == judged
    history = json.loads((run.folder / "summary.json").read_text())["history"]
    spent = [sum(row[stage] for stage in STAGES) for row in history]
    assert line.seconds == pytest.approx([sum(spent[:number]) for number in judged], rel=1e-3)
    assert line.peaks == [0.0, 0.0]  # of a GPU


def test_a_curve_has_a_row_for_every_evaluation(tmp_path: Path) -> None:
    study = math_study.PROGRAM.groups["card"][0]
    (run, *_) = study.runs(60, Where(tmp_path, REAL))
    numbers = dict.fromkeys(("p05", "k3", "rounding", "rejected", "clipped", "saved", "largest_ratio", "spikes"), 0.0)
    evaluations = [{"rollouts": 0, "dense": 0.2}, {"rollouts": 4, "dense": 0.5}]
    line = Curve(
        run.key, run.settings_hash, "a card", evaluations, {}, **numbers, minutes=1.0, code=run.code,
        seconds=[0.0, 30.0], peaks=[2.0**31, 2.0**32],
    )  # fmt: skip
    kept.write(tmp_path / "math.jsonl", [asdict(line)])
    results = Results(Where(tmp_path, REAL), math_study.PROGRAM.archive(tmp_path / "math.jsonl"))
    assert curves_table(results).rows == [
        ("dense", "60", "0", "0.00", "0.200", "2.00", "4.00"), ("dense", "60", "4", "0.50", "0.500", "2.00", "4.00"),
    ]  # fmt: skip


def test_the_interval_of_equivalence_is_that_by_hand() -> None:
    leads = [0.02, -0.05, 0.01, 0.03, -0.01, 0.0, -0.04, 0.06]
    assert ninety(leads, 8) == "-2.2 to +2.7"  # 0.25 ± 1.8946 * 3.6154 / √8
    assert ninety(leads[1:], 8) == "–"


@pytest.mark.real
@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason="needs the model of make real-model")
def test_the_real_model_runs(tmp_path: Path) -> None:
    """One rollout of replay."""
    study = replace(MAIN[1], recipe=replace(USUAL, rollouts=1), seeds=(20,), arms=(REPLAY,))
    (run,) = study.runs(20, Where(tmp_path, REAL))
    run = replace(run, settings=replace(run.settings, num_problems=4))
    assert run.execute(), (run.folder / "log.txt").read_text()[-2000:]
    (evaluation,) = json.loads((run.folder / "course.json").read_text())["evaluations"]
    assert set(evaluation) == {"rollouts", "dense", "32"}


# ---------------------------------------------------------------- pages of what is finished

FINISHED = {
    "arms.md": "6a3895017d977679",
    "gradients.md": "dac3cddb25da049d",
    "real.md": "d842e71bb6557c9f",
    "sparrow.md": "d301de2492028085",
    "stability.md": "2ae94f968fd593f6",
    "turns.md": "9ea1a111a17e00bb",
}


@pytest.mark.parametrize("page", FINISHED)
def test_tables_of_finished_studies_stay_as_they_were_measured(page: str) -> None:
    """Their lines are kept, but no program writes these tables any more: nobody may mend a number."""
    written = {mark(f"experiments.{program.name}", name) for program in PROGRAMS for name in program.pages}
    written |= {mark("experiments.gradients", name) for name in ("centering_gradients", "real_centering_gradients")}
    text = (ROOT / "docs" / "measured" / page).read_text("utf-8")
    blocks = re.findall(rf"(<!-- written by .*?-->)(.*?{END})", text, re.DOTALL)
    finished = "\n".join(begin + rest for begin, rest in blocks if begin not in written)
    assert hashlib.sha256(finished.encode()).hexdigest()[:16] == FINISHED[page]
