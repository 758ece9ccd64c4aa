"""What loggers get: the split of time, and the table of completions in the form each of them knows."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_grpo import Recorder, fit, likes_a, module

from sparse_rl_lightning.callbacks import CompletionsTable, StepTimes


class SlowUpdate(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        time.sleep(0.2)


def slow_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    time.sleep(0.3)
    return likes_a(prompts, completions, **columns)


def test_time_is_split_where_it_goes() -> None:
    """Two optimiser steps of 0.2 s each per rollout, and rewards of 0.3 s."""
    trainer = fit(module(slow_reward, num_iterations=2), 4, [SlowUpdate()])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["time/update"] >= 0.4
    assert metrics["time/rewards"] >= 0.3
    stages = sum(metrics[f"time/{stage}"] for stage in ("rollout", "rescoring", "rewards", "update"))
    assert stages == pytest.approx(metrics["time/block"], rel=0.2)
    assert "memory/update_peak_bytes" not in metrics, "there is no GPU to ask"


def test_own_step_times_replace_the_default() -> None:
    own = StepTimes()
    trainer = fit(module(), 1, [own])
    assert [callback for callback in trainer.callbacks if isinstance(callback, StepTimes)] == [own]


class LikeWandb(DummyLogger):
    """Takes tables as WandbLogger does."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[str], list[list[Any]], int]] = []

    def log_text(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        self.tables.append((key, columns, data, step))


class LikeTensorBoard(Logger):
    """Has a writer that takes text, as TensorBoardLogger has."""

    name = version = "board"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    class Writer:
        def __init__(self) -> None:
            self.texts: list[tuple[str, str, int]] = []

        def add_text(self, tag: str, text: str, step: int) -> None:
            self.texts.append((tag, text, step))

    def __init__(self) -> None:
        self.writer = self.Writer()

    @property
    def experiment(self) -> Any:
        return self.writer


def test_every_logger_gets_the_completions(tmp_path: Path) -> None:
    wandb, board, sheet, recorder = LikeWandb(), LikeTensorBoard(), CSVLogger(tmp_path, version=0), Recorder()
    table = CompletionsTable(every_n_rollouts=2, console=False, parquet=False)
    fit(module(), 4, [table, recorder], logger=[wandb, board, sheet])
    want = [recorder.scored[index].completions for index in (0, 2)]
    assert [[row[columns.index("completion")] for row in rows] for _, columns, rows, _ in wandb.tables] == want
    assert [(key, step) for key, _, _, step in wandb.tables] == [("completions", 0), ("completions", 2)]
    assert [text.count("\n") for _, text, _ in board.writer.texts] == [17, 17], "a head, a line, 16 completions"
    with (Path(sheet.log_dir) / "completions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["completion"] for row in rows] == [text for texts in want for text in texts]
    assert {row["step"] for row in rows} == {"0", "2"}
