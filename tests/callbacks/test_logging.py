"""What loggers get: the split of time, and the table of completions in the form each of them knows."""

from __future__ import annotations

import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_grpo import Recorder, fit, likes_a, module

from sparse_rl_lightning.callbacks import CompletionsTable, RolloutCallback, StepTimes
from sparse_rl_lightning.rollout import Progress


class Clock(RolloutCallback):
    """Time goes on where this says so, and nowhere else."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.rollout = 1000.0, 0.0
        patch.setattr(time, "perf_counter", lambda: self.now)

    def on_rollout_start(self, trainer: Any, module: Any, rows: Any) -> None:
        self.rollout = 0.0

    def on_rollout_progress(self, trainer: Any, module: Any, progress: Progress) -> None:
        self.now += 0.125
        self.rollout += 0.125

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.now += 2.0

    def reward(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        self.now += 3.0
        return likes_a(prompts, completions, **columns)


def test_time_is_split_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizer steps of 2 s each per rollout, rewards of 3 s, and steps of sampling that take an eighth each."""
    clock = Clock(monkeypatch)
    trainer = fit(module(clock.reward, num_iterations=2), 4, [clock])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["time/update"] == 4
    assert metrics["time/rewards"] == 3
    assert metrics["time/rollout"] == clock.rollout > 0
    stages = sum(metrics[f"time/{stage}"] for stage in ("rollout", "rescoring", "rewards", "update"))
    assert stages == metrics["time/block"]
    assert "memory/update_peak_bytes" not in metrics, "there is no GPU to ask"


def test_own_step_times_replace_the_default() -> None:
    own = StepTimes()
    trainer = fit(module(), 1, [own])
    assert [callback for callback in trainer.callbacks if isinstance(callback, StepTimes)] == [own]


def run(logger: Logger) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Four steps, the completions of the first and third rollout, and what was logged at every step."""
    recorder, seen = Recorder(), Seen()
    table = CompletionsTable(every_n_rollouts=2, console=False, parquet=False)
    fit(module(), 4, [table, recorder], logger=[logger, seen], log_every_n_steps=1)
    texts = [(index, text) for index in (0, 2) for text in recorder.scored[index].completions]
    return [{"step": index, "completion": text} for index, text in texts], seen.steps


class Seen(DummyLogger):
    """What every logger is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.append(dict(metrics))


def test_tensorboard_has_completions_and_metrics(tmp_path: Path) -> None:
    """Read back from the files of events."""
    pytest.importorskip("tensorboard", reason="tensorboard is no dependency of users")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, version=0)
    rows, logged = run(logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "scalars": 0}).Reload()
    texts = events.Tensors("completions/text_summary")
    lines = [line for text in texts for line in text.tensor_proto.string_val[0].decode().splitlines()[2:]]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [text.step for text in texts] == [0, 2]
    assert [{"step": int(row[0]), "completion": row[2]} for row in cells] == rows
    for name in logged[0].keys() - {"epoch"}:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([step[name] for step in logged], nan_ok=True)


class LikeWandb(DummyLogger):
    """Takes text as WandbLogger does."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[str], list[list[Any]], int]] = []

    def log_text(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        self.tables.append((key, columns, data, step))


def test_what_takes_text_as_wandb_does_has_completions() -> None:
    logger = LikeWandb()
    rows, _ = run(logger)
    found = [dict(zip(columns, row, strict=True)) for _, columns, data, _ in logger.tables for row in data]
    assert [{"step": row["step"], "completion": row["completion"]} for row in found] == rows
    assert [(key, step) for key, _, _, step in logger.tables] == [("completions", 0), ("completions", 2)]
    assert signature(LikeWandb.log_text).parameters.keys() <= signature(WandbLogger.log_text).parameters.keys()
