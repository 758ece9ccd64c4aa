"""What loggers get: the split of time, and the table of completions in the form each of them knows."""

from __future__ import annotations

import csv
import json
import struct
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_grpo import Recorder, fit, likes_a, module

from sparse_rl_lightning.callbacks import CompletionsTable, RolloutCallback, StepTimes
from sparse_rl_lightning.callbacks.outputs.completions import log_table
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
    rows = [
        {"step": index, "completion": text}
        for index in (0, 2)
        for text in recorder.scored[index].completions
    ]  # fmt: skip
    return rows, seen.steps


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
        assert [event.value for event in events.Scalars(name)] == pytest.approx(
            [step[name] for step in logged], nan_ok=True
        )


class LikeWandb(DummyLogger):
    """Takes text as WandbLogger does; the test below has the real one, where W&B is installed."""

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


def test_wandb_has_completions_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back from the files of a run without network."""
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, project="test")
    rows, logged = run(logger)
    logger.experiment.finish()
    (place,) = tmp_path.glob("wandb/offline-run-*")
    tables = [json.loads(path.read_text()) for path in sorted((place / "files" / "media" / "table").iterdir())]
    found = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
    assert [{"step": row["step"], "completion": row["completion"]} for row in found] == rows
    until, history = time.monotonic() + 240, []
    while len(history) < 4 and time.monotonic() < until:  # W&B's own process may write on after finish()
        history = [row for row in wandb_history(next(place.glob("*.wandb"))) if "reward" in row]
        time.sleep(0.2)
    assert len(history) == len(logged) == 4
    for own, want in zip(history, logged, strict=True):
        assert {name: own[name] for name in want} == pytest.approx(want, nan_ok=True)


def wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a run's file: a header of 7 bytes, then a log as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = path.read_bytes(), 32768
    place, parts = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:  # the rest of a block that no record's head fits into
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)  # behind a checksum
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def test_csv_has_completions(tmp_path: Path) -> None:
    sheet = CSVLogger(tmp_path, version=0)
    rows, _ = run(sheet)
    with (Path(sheet.log_dir) / "completions.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [{"step": int(row["step"]), "completion": row["completion"]} for row in found] == rows


def columns(step: int, **own: Any) -> dict[str, list[Any]]:
    """A table of one completion."""
    return {"step": [step], "prompt": ["1+1="], "completion": ["2"]} | {name: [value] for name, value in own.items()}


def test_a_csv_has_the_columns_of_all_runs(tmp_path: Path) -> None:
    """Of one version of the logger: rows without an answer, then with one, then with another reward function."""
    sheet = CSVLogger(tmp_path, name="", version="log")
    log_table(sheet, columns(0, right=1.0, reward=1.0), 0)
    log_table(sheet, columns(1, answer="2", right=0.5, reward=0.5), 1)
    before = (tmp_path / "log" / "completions.csv").read_text()
    log_table(sheet, columns(2, answer="2", right=0.25, reward=0.25), 2)
    assert (tmp_path / "log" / "completions.csv").read_text() == f"{before}2,1+1=,2,2,0.25,0.25\n"
    log_table(sheet, columns(3, answer="2", **{"=short": -1.0}, reward=-1.0), 3)
    with (tmp_path / "log" / "completions.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "prompt", "completion", "answer", "right", "reward", "'=short"]
    assert rows == [
        ["0", "1+1=", "2", "", "1.0", "1.0", ""],
        ["1", "1+1=", "2", "2", "0.5", "0.5", ""],
        ["2", "1+1=", "2", "2", "0.25", "0.25", ""],
        ["3", "1+1=", "2", "2", "", "-1.0", "-1.0"],
    ]
