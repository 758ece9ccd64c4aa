"""What RunSummary keeps of a real run: rows with what training logged, worst completions, warnings, a killed run."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from test_callbacks_fit import fit
from tiny_grpo import every_step
from tiny_run import config

from sparse_rl_lightning.callbacks import AcceptanceMonitor, RunSummary
from sparse_rl_lightning.callbacks.base import RolloutCallback, warn_of_run
from sparse_rl_lightning.callbacks.outputs import summary
from sparse_rl_lightning.callbacks.outputs.run_facts import flattened
from sparse_rl_lightning.callbacks.outputs.worst_completions import WorstCompletions
from sparse_rl_lightning.cli import console
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.report import PROGRESS, SUMMARY, page, read_run
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.rollout.generator import Generator


class Quick(RunSummary):
    """Spares the test the evaluation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_problems=0, progress_seconds=0.0, **options)


class Does(Callback):
    """Something at the start of a batch."""

    def __init__(self, act: Any, batch: int = 2) -> None:
        self.act, self.batch = act, batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.act()


class Warns(RolloutCallback):
    def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
        if scored.index == 1:
            warn_of_run(trainer, "something is wrong")


def test_rows_hold_what_training_logged(tmp_path: Path) -> None:
    """Every rollout has its own numbers, as the trainer's logger got them; the monitor's only where it measured."""
    summary = Quick(folder=tmp_path)
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    monitor = AcceptanceMonitor(every_n_rollouts=2, ceiling_prompts=2)
    fit(tmp_path, [summary, monitor], steps=6, logger=logger)
    with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
        logged = [float(one["time/update"]) for one in csv.DictReader(file) if one["time/update"]]
    history = read_run(tmp_path).history
    assert [one["time/update"] for one in history] == pytest.approx(logged[::2], rel=1e-6)  # a row per micro-batch
    assert len(history) == 3
    assert all({"time/block", "entropy", "skipped_steps", "empty_rollouts"} <= set(one) for one in history)
    assert ["acceptance/p05" in one for one in history] == [True, False, True]


def test_a_run_that_an_error_ends_leaves_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError), pytest.warns(UserWarning, match="something is wrong"):
        fit(tmp_path, [Warns(), Quick(), Does(lambda: {}["no such thing"], batch=5)], steps=20)
    assert not (tmp_path / SUMMARY).exists()
    run = read_run(tmp_path)
    assert len(run.history) == 3
    assert run.state == "stopped by KeyError: 'no such thing'"
    assert run.warnings == [{"rollout": 1.0, "text": "something is wrong"}]
    assert [{"entropy", "skipped_steps", "empty_rollouts"} <= set(one) for one in run.history] == [True] * 3
    assert ["time/update" in one for one in run.history] == [True, True, False]  # half of the last was trained on
    assert run.worst
    assert "StreamingLLM" in run.settings["compressor"]
    html = page(run)
    assert "Not finished: stopped by KeyError" in html
    assert "something is wrong" in html


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("act", "state"),
    [(lambda: os.kill(os.getpid(), signal.SIGTERM), "preempted, to be resumed"), (interrupt, "interrupted")],
    ids=["preempted", "interrupted"],
)
def test_planned_stops_are_no_errors(act: Any, state: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, [Quick(), Does(act)], steps=20)
    assert read_run(tmp_path).state == state


def test_a_final_evaluation_that_fails_costs_no_numbers(tmp_path: Path) -> None:
    class Fails(Quick):
        def _evaluate(self, trainer: Any, module: Any) -> dict[str, float]:
            if trainer.global_step:
                raise RuntimeError("too late")
            return super()._evaluate(trainer, module)

    with pytest.raises(RuntimeError):
        fit(tmp_path, [Fails()], steps=4)
    run = read_run(tmp_path)
    assert (run.state, run.steps, len(run.history)) == ("stopped by RuntimeError: too late", 4, 2)
    assert all("time/update" in one for one in run.history)


def test_evaluation_is_greedy_whatever_validation_draws(tmp_path: Path) -> None:
    sampled, greedy = (RunSummary(num_problems=3, folder=tmp_path / name) for name in ("sampled", "greedy"))
    params = SamplingParams(num_generations=3, max_completion_length=10, temperature=2.0, seed=5)
    torch.manual_seed(0)
    fit(tmp_path, [sampled], steps=2, val_sampling=params)
    torch.manual_seed(0)
    fit(tmp_path, [greedy], steps=2)
    assert sampled.record.before == greedy.record.before != {}
    assert sampled.record.samples == greedy.record.samples != []


def test_a_start_that_nobody_evaluated_is_not_that_of_a_resumed_run(tmp_path: Path) -> None:
    """The policy is trained by then: a run that has learned would look as if it had not."""
    fit(tmp_path, [RunSummary(num_problems=0), every_step(tmp_path)], steps=2, ckpt_path=None)
    resumed = RunSummary(num_problems=3)
    fit(tmp_path, [resumed], steps=4, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.record.before == {}
    assert resumed.record.after != {}


@pytest.mark.parametrize(("precision", "rounded"), [("bf16-mixed", torch.bfloat16), ("32-true", None)])
def test_evaluation_is_in_the_precision_of_the_training(
    precision: Any, rounded: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of it, the cache of a mixed run was of float32: twice the memory, and other answers than validation's."""
    seen, generate = [], Generator.generate

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return generate(*args, **options)

    monkeypatch.setattr(Generator, "generate", watched)
    fit(tmp_path, [RunSummary(num_problems=3)], steps=2, precision=precision)
    assert seen == [rounded] * 5  # two caches before, the rollout, two caches after


def test_a_folder_that_goes_away_costs_the_record_and_not_the_run(tmp_path: Path) -> None:
    """In place of it a file: test_run_folder.py."""
    folder = tmp_path / "gone"
    fit(tmp_path, [Quick(folder=folder), Does(lambda: shutil.rmtree(folder))], steps=6)
    assert (folder / SUMMARY).is_file(), "the folder is made again"


def test_progress_gives_way_to_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "time", SimpleNamespace(monotonic=lambda: 0.0))  # nothing takes any time
    states: list[tuple[str, int]] = []
    look = lambda *_: states.append((read_run(tmp_path).state, len(read_run(tmp_path).history)))  # noqa: E731
    fit(tmp_path, [Quick(), LambdaCallback(on_train_batch_end=look)], steps=4)
    assert states == [("running", 0), ("running", 0), ("running", 1), ("running", 1)]
    assert not (tmp_path / PROGRESS).exists()
    run = read_run(tmp_path)
    assert (run.state, len(run.history), run.steps) == ("finished", 2, 4)


def scored(index: int, rewards: list[float], lowest: list[float], kept: list[bool]) -> ScoredRollout:
    """Four samples of two prompts, three tokens each after a prompt of one; the second token has the ratio given."""
    mask = torch.tensor([[False, True, True, True]] * 4)
    dense = torch.zeros(4, 4)
    dense[:, 2] = torch.tensor(lowest).log()
    rollout = Rollout(
        sequences=torch.arange(16).view(4, 4), prompt_lengths=torch.ones(4, dtype=torch.int64), completion_mask=mask,
        finished=torch.tensor([True, False, True, True]), sampler_logprobs=torch.zeros(4, 4), old_logprobs=dense,
        rewards=torch.tensor(rewards), keep=mask & torch.tensor(kept)[:, None],
    )  # fmt: skip
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b" * 10_000}]
    return ScoredRollout(rollout, rows, [f"{index}.{i}" for i in range(4)], {}, index)


def test_worst_completions_by_hand() -> None:
    worst = WorstCompletions(2)
    worst.see(scored(0, [0.0, 1.0, 1.0, 1.0], [0.5, 1e-6, 0.4, 1.0], [True, False, True, True]), None)
    worst.see(scored(1, [1.0, 1.0, 0.5, math.nan], [0.5, 0.4, 0.3, 2.0], [True, True, True, True]), None)
    worst.see(scored(2, [1.0, 0.0, 1.0, 0.0], [1.0, 1e-5, 1e-7, 1.0], [False, False, True, False]), None)
    kept = {kind: [one["completion"] for one in entries] for kind, entries in worst.kept.items()}
    assert kept == {
        "lowest reward": ["2.1", "0.0"],  # of equals the newest
        "most mismatched": ["2.2", "0.1"],
        "rejected": ["2.1", "0.1"],  # of a rollout the one with the smallest ratio
    }
    listed = {one["completion"]: one for one in worst.listed()}
    assert listed["2.1"]["kinds"] == ["lowest reward", "rejected"]
    assert listed["0.1"]["kinds"] == ["most mismatched", "rejected"]
    one = listed["0.1"]
    assert (one["ratio"], one["token_place"], one["length"]) == (pytest.approx(1e-6), 2, 3)
    assert (one["answer"], one["rejected"], one["finished"], one["rollout"]) == ("7", True, False, 0)
    assert len(listed["2.2"]["prompt"]) < 2100
    json.dumps(worst.listed(), allow_nan=False)


def test_worst_completions_of_rollouts_that_know_little() -> None:
    worst = WorstCompletions(2)
    bare = scored(0, [math.nan] * 4, [1.0] * 4, [True] * 4)
    bare.rollout.old_logprobs = bare.rollout.keep = None
    worst.see(bare, None)
    assert worst.listed() == []
    none = WorstCompletions(0)
    none.see(scored(0, [0.0] * 4, [1e-6] * 4, [False] * 4), None)
    assert none.listed() == []


def test_a_ratio_that_is_no_number_hides_no_other() -> None:
    worst = WorstCompletions(1)
    worst.see(scored(0, [1.0] * 4, [math.nan, 1e-3, 0.5, 1.0], [True, True, True, False]), None)
    kept = {kind: [one["completion"] for one in entries] for kind, entries in worst.kept.items()}
    assert (kept["most mismatched"], kept["rejected"]) == (["0.1"], ["0.3"])


def test_configuration_becomes_flat() -> None:
    given = {
        "model": {"class_path": "a.GRPO", "init_args": {"kv": {"class_path": "b.RKV", "init_args": {"budget": 3}}}},
        "trainer": {"callbacks": [{"class_path": "c.Log"}, {"class_path": "c.Log", "init_args": {"n": None}}], "x": []},
        "betas": [0.9, 0.98], "empty": {},
    }  # fmt: skip
    assert dict(flattened(given)) == {
        "model": "GRPO", "model.kv": "RKV", "model.kv.budget": "3", "trainer.callbacks.Log": "used",
        "trainer.callbacks.Log#2": "used", "trainer.callbacks.Log#2.n": "null", "trainer.x": "[]",
        "betas": "[0.9, 0.98]", "empty": "{}",
    }  # fmt: skip


def test_command_line_runs_keep_their_configuration_and_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, budget in (("a", 12), ("b", 16)):
        values = config()
        values["trainer"] |= {"default_root_dir": name, "max_steps": 2}
        values["trainer"]["callbacks"] = [{"class_path": "RunSummary", "init_args": {"num_problems": 2}}]
        values["model"]["init_args"]["compressor"]["init_args"]["budget"] = budget
        Path(f"{name}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["sparse-rl", "fit", "--config", f"{name}.yaml"])
        console()
    assert read_run("a").config["model.compressor.budget"] == "12"
    assert read_run("a").config["trainer.callbacks.RunSummary.num_problems"] == "2"
    assert "torch" in read_run("a").versions
    monkeypatch.setattr(sys, "argv", ["sparse-rl", "report", "a", "b"])
    console()
    html = Path("comparison.html").read_text(encoding="utf-8")
    assert '<th scope="row">model.compressor.budget</th><td>12</td><td>16</td>' in html
    assert "default_root_dir" not in html
