"""The comparison on conversations in miniature: what an arm changes, one run to its end, and what the page says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import kept
from experiments.arms.runs import CONFIGS
from experiments.turns import __main__ as command
from experiments.turns.arms import ARMS, CORRECTIONS, LONGEST, METRICS, Arm, Run, configured
from experiments.turns.ending import late_mean, numbers
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.environments import Calculator
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.records import Conversation

TOOLS = read_file(CONFIGS / "tools.yaml")
BY_NAME = {arm.name: arm for arm in ARMS}


def run_of(arm: Arm, folder: Path, **options: Any) -> Run:
    return Run(arm, **{"seed": 1, "steps": 8, "policy": folder / "policy", "folder": folder, **options})


def test_arms_differ_where_they_say(tmp_path: Path) -> None:
    configs = {name: run_of(arm, tmp_path).config() for name, arm in BY_NAME.items()}
    plain = TOOLS["model"]["init_args"]["compressor"]
    for name, config in configs.items():
        classes = [callback["class_path"] for callback in config["trainer"]["callbacks"]]
        assert all((c in classes) == name.startswith("Sparse-RL") for c in CORRECTIONS), name
        assert config["model"]["class_path"] == ("ReplayGRPO" if name == "replay" else "SparseGRPO")
        compressor = config["model"]["init_args"]["compressor"]
        measured = config["trainer"]["callbacks"][-1]["init_args"]["compressor"]
        added = {k: v for k, v in measured["init_args"].items() if k not in plain["init_args"]}
        assert {**measured, "init_args": {k: measured["init_args"][k] for k in plain["init_args"]}} == plain
        assert measured == compressor or (name, compressor) == ("dense", {"class_path": "FullKV"})
        expected = {"protect_prompt": True} if "prompt" in name else {}
        assert added == expected | ({"protect_observations": 1} if "newest" in name else {})
    shared = [
        {k: v for k, v in c["model"]["init_args"].items() if k not in ("compressor", "replay_objective", "rollout")}
        for c in configs.values()
    ]
    assert all(one == shared[0] for one in shared)
    rollouts = [config["model"]["init_args"]["rollout"] for config in configs.values()]
    assert [one["turns"].pop("max_observation_length", None) for one in rollouts] == [None] * 5 + [LONGEST]
    assert all(one == TOOLS["model"]["init_args"]["rollout"] for one in rollouts)
    assert max(len(Calculator().step(f"-{'9' * n}-0")[0] or "") for n in range(1, 19)) <= LONGEST
    data = ArithmeticTasks(**{**TOOLS["data"]["init_args"], "num_train": 2000})
    answers = [said for row in data.train_rows() for said in re.findall(r"\?([^?]*;)", row["solution"])]
    assert max(map(len, answers)) == LONGEST
    assert len({run_of(arm, tmp_path).settings for arm in ARMS}) == len(ARMS)
    assert len({run_of(arm, tmp_path).key for arm in ARMS}) == len(ARMS)


def test_settings_do_not_depend_on_where_it_runs(tmp_path: Path) -> None:
    one = run_of(ARMS[1], tmp_path)
    assert one.settings == run_of(ARMS[1], tmp_path / "elsewhere").settings
    assert one.settings != run_of(ARMS[1], tmp_path, steps=10).settings
    assert one.settings != run_of(ARMS[1], tmp_path, seed=2).settings


@pytest.mark.slow
def test_another_budget_is_another_run_with_tables_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = configured()["init_args"]["budget"]
    for arm in (BY_NAME["dense"], ARMS[-1]):
        run, plain = run_of(arm, tmp_path, budget=usual - 6), run_of(arm, tmp_path)
        assert run.key != plain.key
        assert run.settings != plain.settings
        own = run.config()["model"]["init_args"]["compressor"]
        assert arm.name == "dense" or own["init_args"]["budget"] == usual - 6
        ending = run.config()["trainer"]["callbacks"][-1]["init_args"]["compressor"]
        assert ending["init_args"]["budget"] == usual - 6
    path, numbers = tmp_path / "turns.jsonl", dict.fromkeys(("reward", "right", "calls", "turns"), 0.5)
    caches = {"full": numbers, "compressed": numbers}
    kept.write(path, [
        {"key": run.key, "settings": run.settings, "machine": "M", "minutes": 3.0, "before": caches, "after": caches,
         "logged": dict.fromkeys(METRICS, 0.5)}
        for budget in (None, usual - 6) if (run := Run(ARMS[1], 0, 8, tmp_path, tmp_path, budget))
    ])  # fmt: skip
    for budget in (usual, usual - 6):  # that of the configuration is no other
        arguments = ["--finished", "--steps", "8", "--budget", str(budget), "--kept", str(path)]
        monkeypatch.setattr(sys, "argv", ["turns", *arguments, "--save", str(tmp_path)])
        command.main()
    page = (tmp_path / "turns.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- written by (.*) -->", page) == [
        "experiments.turns",
        f"experiments.turns: budget {usual - 6}",
    ]
    assert re.findall(r"with budget (\d+)", page) == [str(usual), str(usual - 6)]


def test_numbers_of_conversations() -> None:
    def said(*turns: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": turn} for turn in turns]

    talks = [Conversation(messages=said("1+2?", "#3"), reward=1.5), Conversation(messages=said("#4?"), reward=0.0)]
    talks.append(Conversation(messages=said("1+2?", "#3#", "9?"), reward=0.5))
    found = numbers([{"answer": "3"}, {"answer": "4"}, {"answer": "9"}], talks)
    assert found == pytest.approx({"reward": 2 / 3, "right": 2 / 3, "calls": 1, "turns": 2})
    assert late_mean([9.0] * 6 + [1.0, float("nan")]) == 1.0
    assert late_mean([float("nan")]) is None


def test_page_says_what_the_lines_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"reward": 1.25, "right": 0.75, "calls": 7.0, "turns": 8.0}
    lines = [
        {
            "key": run.key, "settings": run.settings, "machine": "M", "minutes": 3.0,
            "before": {"full": own | {"right": 0.25}, "compressed": own}, "logged": dict.fromkeys(METRICS, 0.5),
            "after": {"full": own | {"right": 0.5 + 0.25 * run.seed}, "compressed": own},
        }
        for arm in ARMS[:2] for seed in (0, 1) if (run := Run(arm, seed, 8, tmp_path, tmp_path))
    ]  # fmt: skip
    lines[-1]["settings"] = "of another run"
    kept.write(tmp_path / "turns.jsonl", lines)
    arguments = ["--finished", "--kept", str(tmp_path / "turns.jsonl"), "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["turns", *arguments, "--steps", "8", "--seeds", "0", "--arms", "dense"])
    command.main()  # what was asked for is run, and all that is finished is shown
    page = (tmp_path / "turns.md").read_text(encoding="utf-8")
    assert "3 of 18 runs" in page
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "|" in line]
    own = [["before training", "0.25"], ["dense", "0.50 / 0.75 / –"], ["naive", "0.50 / – / –"]]
    assert [row[:2] for row in cells[2:5]] == own
    assert [row[:2] for row in cells[7:]] == [["dense", "50% / 50% / –"], ["naive", "50% / – / –"]]


@pytest.mark.slow
def test_a_run_to_its_end_is_not_run_again(tmp_path: Path) -> None:
    model, tokenizer = TinyPolicy(alphabet="0123456789+-*?;#!", max_position_embeddings=256).load()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "policy")
    run, path = run_of(BY_NAME["Sparse-RL"], tmp_path, steps=2, num_problems=8), tmp_path / "turns.jsonl"
    command.execute([run], path, jobs=1)
    (line,) = kept.read(path)
    assert set(line["logged"]) == set(METRICS)
    assert all(isinstance(value, float) for value in line["logged"].values()), line["logged"]
    assert line["logged"]["kv/evicted/prompt"] > 0
    assert line["before"]["full"]["turns"] >= 1
    (tmp_path / run.key / run.settings / run.code / "ending.json").write_text(json.dumps("not read again"))
    command.execute([run], path, jobs=1)
    assert kept.read(path) == [line]
