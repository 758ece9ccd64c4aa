"""A run's folder: one run at a time, an end that tells the truth, and a disk that costs files and not the run."""

from __future__ import annotations

import csv
import errno
import fcntl
import os
import shutil
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import FullDisk, file_size_limit
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from safetensors import safe_open
from test_faults import Poison
from tiny_grpo import every_step, fit, module, weights
from tiny_run import config, run_console, write

from sparse_rl_lightning.callbacks import CompletionsTable, RolloutCheckpoint, RunSummary, StepGuard
from sparse_rl_lightning.callbacks.guards.log_guard import save_metrics
from sparse_rl_lightning.callbacks.guards.run_lock import RunLock, lock, lock_file

# ---------------------------------------------------------------- one run at a time


@contextmanager
def another_process(folder: Path) -> Iterator[int]:
    """A process that holds the lock of a folder until it is killed, as it is in the end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no test goes on in here
        try:
            lock(folder)
            os.write(writer, b"held")
        except BaseException:
            os.write(writer, b"refused")
        while True:
            signal.pause()
    try:
        assert os.read(reader, 10) == b"held"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with another_process(folder) as child:
        with pytest.raises(ValueError, match=rf"{folder} is in use by a run that has not ended \(process {child} on "):
            fit(module(), 1, [every_step(folder)], enable_checkpointing=True)
        assert not folder.exists()
    fit(module(), 1, [every_step(folder)], enable_checkpointing=True)  # killed: nothing is left of its lock
    with another_process(folder):
        pass  # the run that has ended let go of it


def test_a_lock_names_its_holder_alone(tmp_path: Path) -> None:
    path = lock_file(tmp_path / "run")
    path.write_text("process 123456789 on a machine with a long name" * 3)
    descriptor = lock(tmp_path / "run")
    assert descriptor is not None
    assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    os.close(descriptor)


def test_the_folder_that_follows_from_the_run_s_is_locked_too(tmp_path: Path) -> None:
    with another_process(tmp_path / "checkpoints"), pytest.raises(ValueError, match="is in use by a run"):
        fit(module(), 1, [RolloutCheckpoint()], enable_checkpointing=True, default_root_dir=tmp_path)


def test_a_run_that_fails_lets_go(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module(), 1, [every_step(tmp_path / "run"), Fail()], enable_checkpointing=True)
    with another_process(tmp_path / "run"):
        pass


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with pytest.warns(UserWarning, match=r"cannot be locked \(.*No locks available\): nothing keeps a second run out"):
        assert lock(tmp_path / "run") is None


def test_a_lock_is_no_way_to_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".run.lock").symlink_to(tmp_path / "victim")
    with pytest.warns(UserWarning, match="cannot be locked"):
        assert lock(tmp_path / "run") is None
    assert (tmp_path / "victim").read_text() == "mine"


# ---------------------------------------------------------------- the end


@pytest.fixture
def full_disk() -> Iterator[FullDisk]:
    with FullDisk() as disk:
        yield disk


def test_a_run_without_its_last_checkpoint_does_not_end_well(tmp_path: Path, full_disk: FullDisk) -> None:
    ended: list[str] = []

    class AtTheEnd(Callback):
        def on_fit_end(self, *_: Any) -> None:
            ended.append("reported")

    with pytest.warns(UserWarning, match="after optimizer step 3, but its last checkpoint could not be saved"):
        with pytest.raises(SystemExit) as end:
            fit(module(), 3, [full_disk, AtTheEnd(), every_step(tmp_path)], enable_checkpointing=True)
    assert end.value.code == 75
    assert ended == ["reported"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1
    assert not list((tmp_path / ".incomplete").iterdir())
    with another_process(tmp_path):
        pass


def test_a_checkpoint_that_fails_leaves_the_weights_beside_the_last_one(tmp_path: Path, full_disk: FullDisk) -> None:
    """The weights alone would fit."""
    fit(module(), 1, [every_step(tmp_path / "whole")], enable_checkpointing=True)
    sizes = [(tmp_path / "whole" / name).stat().st_size for name in ("last.ckpt", "weights/last.safetensors")]
    full_disk.size = sum(sizes) // 2
    assert sizes[1] < full_disk.size < sizes[0]
    with pytest.raises(SystemExit):
        fit(module(), 2, [full_disk, every_step(tmp_path / "run")], enable_checkpointing=True)
    with safe_open(tmp_path / "run" / "weights" / "last.safetensors", "pt") as file:
        assert file.metadata()["global_step"] == "1"
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"] == 1


# ---------------------------------------------------------------- logs, tables, reports


def test_a_full_disk_costs_tables_logs_and_reports(tmp_path: Path, full_disk: FullDisk) -> None:
    """For two of four steps; what could not be logged then is logged later, and the run is the same."""
    full_disk.size, full_disk.last = 0, 2
    logger = CSVLogger(tmp_path, name="", version="log", flush_logs_every_n_steps=1)
    summary = RunSummary(num_problems=0, progress_seconds=0)

    class AtEveryStep(Callback):  # the pause after a slow write may be longer than the run
        def on_train_batch_start(self, *_: Any) -> None:
            summary._next_progress = 0.0

    own = [CompletionsTable(1, 0), AtEveryStep(), summary, full_disk]
    grpo = module()
    with pytest.warns(UserWarning, match="The log of CSVLogger cannot be written: .*File too large") as told:
        fit(grpo, 4, own, logger=logger, log_every_n_steps=1, default_root_dir=tmp_path)
    said = [str(warning.message) for warning in told if "The run goes on" in str(warning.message)]
    lost = sorted(text.split(" cannot be written")[0] for text in said)
    assert lost == ["CompletionsTable: a table", "RunSummary: the record of the run", "The log of CSVLogger"]
    with (tmp_path / "log" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["grad_norm"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert (tmp_path / "summary.json").exists()
    other = module()
    fit(other, 4)
    assert torch.equal(weights(grpo), weights(other))


def test_folders_that_are_removed_or_replaced_cost_nothing_else(tmp_path: Path) -> None:
    class Remove(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                shutil.rmtree(tmp_path / "run")
            if trainer.global_step == 3:
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").write_text("a file")

    logger = CSVLogger(tmp_path / "run", name="", version="log", flush_logs_every_n_steps=1)
    summary = RunSummary(num_problems=0, progress_seconds=0)
    own = [CompletionsTable(1, 0), summary, Remove(), every_step(tmp_path / "run" / "checkpoints")]
    options: dict[str, Any] = {"default_root_dir": tmp_path / "run", "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="could not be saved"), pytest.raises(SystemExit):
        fit(module(), 4, own, logger=logger, log_every_n_steps=1, **options)
    assert (tmp_path / "run").read_text() == "a file"


def test_a_log_gets_new_columns_whole(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="log")
    writer = logger.experiment
    path = tmp_path / "log" / "metrics.csv"
    for number, metrics in enumerate([{"b": 1.0}, {"b": 2.0}, {"a": 3.0, "b": 4.0}, {"b": 5.0}]):
        writer.log_metrics(metrics, number)
        with file_size_limit(0), pytest.raises(OSError, match="File too large"):
            save_metrics(writer)
        save_metrics(writer)
    assert path.read_text().split() == ["a,b,step", ",1.0,0", ",2.0,1", "3.0,4.0,2", ",5.0,3"]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.csv"]


def test_a_guard_that_stops_a_run_says_so_on_a_full_disk(tmp_path: Path, full_disk: FullDisk) -> None:
    full_disk.size, full_disk.first = 0, 0
    with pytest.raises(ValueError, match=r"could not be written \(.*File too large\)\. Lower the learning rate"):
        fit(module(), 3, [Poison(0), full_disk, StepGuard(1)], default_root_dir=tmp_path)


def test_a_run_writes_into_its_own_folder_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a reward function that changes the working directory, and a link in place of a file of the run."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    own = folder / "runs" / "own" / "log" / "run_config.yaml"
    own.parent.mkdir(parents=True)
    own.symlink_to(elsewhere / "victim")
    (elsewhere / "victim").write_text("mine")
    changes = {"model.init_args.reward_funcs": "test_run_folder.wandering", "trainer.logger.init_args.version": "log"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the log's folder is not empty
        assert run_console(monkeypatch, "fit", "--config", write(config(max_steps=2), changes)) is None
    assert (own.parent / "metrics.csv").is_file()
    assert "TinyPolicy" in own.read_text()
    assert [path.name for path in elsewhere.iterdir()] == ["victim"]
    assert (elsewhere / "victim").read_text() == "mine"


def wandering(completions: list[str], **_: Any) -> list[float | None]:
    os.chdir(os.environ["ELSEWHERE"])
    return [float(len(text)) for text in completions]


def test_a_lock_is_released_once(tmp_path: Path) -> None:
    """The number of a closed descriptor is given to the next file that is opened."""
    guard, descriptor = RunLock(), lock(tmp_path)
    assert descriptor is not None
    guard._locks.append(descriptor)
    guard._release()
    with (tmp_path / "other").open("w") as other:
        guard._release()
        other.write("x")
