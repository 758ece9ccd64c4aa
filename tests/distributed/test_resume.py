"""DESIGN property 7: a run killed at any moment and resumed gives bitwise the weights of the run that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml
from lightning.pytorch import Callback, Trainer

from sparse_rl_lightning.cli import main

STEPS = 10
PARTIAL: dict[str, object] = {"rollout": {"num_slots": 3, "partial_rollout_steps": 2, "end_tokens": ["5", "="]}}


def config(
    folder: Path,
    model: dict[str, object] | None = None,
    learner: str = "SparseGRPO",
    every: int = 1,
    callback: dict[str, Any] | None = None,
    **trainer: object,
) -> Path:
    """A tiny run: 3 optimizer steps per rollout, 6 per epoch and validation, random numbers drawn in all of them."""
    trainer = {"default_root_dir": str(folder), "max_steps": STEPS, "logger": False, **trainer}
    values = tiny_run.config(accumulate_grad_batches=2, num_sanity_val_steps=0, limit_val_batches=1.0, **trainer)
    checkpoints = {"dirpath": str(folder / "checkpoints"), "every_n_train_steps": every, "save_top_k": -1}
    values["trainer"]["callbacks"][-1]["init_args"] |= checkpoints
    values["trainer"]["callbacks"] += [{"class_path": "ImportanceReweighting"}, *([callback] if callback else [])]
    values["data"]["init_args"] |= {"num_train": 8, "num_val": 2}
    values["model"]["class_path"] = learner
    values["model"]["init_args"] |= {
        "reward_funcs": "tests.distributed.test_resume.noisy_reward",
        "num_iterations": 3,
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
        **(model or {}),
    }
    values["seed_everything"] = 7
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def noisy_reward(completions: list[str], **_: object) -> list[float | None]:
    """A reward that draws from torch's global generator: resuming must restore it."""
    return [float(len(set(text))) / 10 + float(torch.rand(())) for text in completions]


class SignalItself(Callback):
    """Sends this process a signal when a micro-batch begins, as a scheduler does that wants the machine back."""

    def __init__(self, number: int, batch: int) -> None:
        self.number, self.batch = number, batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        if batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == STEPS
    return checkpoint["state_dict"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    main(["fit", "--config", str(config(folder))])
    return final_weights(folder)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, f"{len(different)} of {len(want)} weights differ, first {different[0]}"


@pytest.mark.parametrize("stop", [1, 3, 6, 8])  # inside a block (1, 8), at its end (3), at that of an epoch (6)
def test_resume_is_bitwise(stop: int, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    path = config(tmp_path)
    main(["fit", "--config", str(path), "--trainer.max_steps", str(stop)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "This checkpoint falls between two optimizer steps")
        main(["fit", "--config", str(path), "--ckpt_path", "last"])
    assert_equal(final_weights(tmp_path), uninterrupted)


@pytest.mark.parametrize("stop", [1, 3])  # inside a block, and at its end
def test_two_resumes_of_partial_rollouts_are_bitwise_equal(stop: int, tmp_path: Path) -> None:
    path, ends = config(tmp_path, PARTIAL), []
    main(["fit", "--config", str(path), "--trainer.max_steps", str(stop)])
    checkpoint = (tmp_path / "checkpoints" / "last.ckpt").rename(tmp_path / "first.ckpt")
    assert torch.load(checkpoint, weights_only=True)["sparse_rl"]["partial"]["rows"], "nothing was unfinished"
    for _ in range(2):
        main(["fit", "--config", str(path), "--ckpt_path", str(checkpoint)])
        ends.append(final_weights(tmp_path))
    assert_equal(*ends)


def test_resume_is_bitwise_with_replay(tmp_path: Path) -> None:
    """The checkpoint holds the record of evictions that the second half of the block is replayed under."""
    results = []
    for name, stops in (("whole", [STEPS]), ("resumed", [1, STEPS])):
        path = config(tmp_path / name, {"replay_objective": "mixed", "alpha": 0.25}, "ReplayGRPO")
        for index, stop in enumerate(stops):
            resume = ["--ckpt_path", "last"] if index else []
            main(["fit", "--config", str(path), "--trainer.max_steps", str(stop), *resume])
        results.append(final_weights(tmp_path / name))
    assert_equal(*results)


@pytest.mark.parametrize("batches", [4, 12])  # validation in the middle of an epoch, and at its end
def test_resume_from_a_checkpoint_that_a_validation_chose(batches: int, tmp_path: Path) -> None:
    """It is written before the validation is over, which drew random numbers of its own."""
    best = {"dirpath": str(tmp_path / "best"), "filename": "{step}", "monitor": "val/reward_sparse", "save_top_k": -1}
    saves = {"class_path": "ModelCheckpoint", "init_args": best}
    path = config(tmp_path, callback=saves, val_check_interval=batches)
    main(["fit", "--config", str(path)])
    whole = final_weights(tmp_path)
    chosen = tmp_path / "best" / f"step={batches // 2}.ckpt"
    main(["fit", "--config", str(path), "--ckpt_path", str(chosen)])
    assert_equal(final_weights(tmp_path), whole)


KILLED_WHILE_SAVING = """
import os, resource, signal, sys

opened = []

def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".incomplete/last.ckpt") and arguments[2] & os.O_CREAT:
        opened.append(arguments)  # a file is made anew for every save
        if len(opened) == 3:  # two have been saved; the system kills who writes more than this
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

sys.addaudithook(watch)
from sparse_rl_lightning.cli import console
console()
"""


@contextmanager
def process_of(folder: Path, *program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real process of a run; what is left of it is resumed in another."""
    arguments = ["fit", "--config", str(config(folder))]
    paths = os.pathsep.join(["", *(str(Path(__file__).parents[n]) for n in (1, 2))])
    environment = {**os.environ, "PYTHONPATH": paths}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *program, *arguments], env=environment, **quiet) as process:
        yield process
    command = [sys.executable, "-m", "sparse_rl_lightning", *arguments, "--ckpt_path", "last"]
    subprocess.run(command, env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("kill", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_run_loses_nothing(kill: int, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    """At a moment drawn anew in every run of the tests; the message of a failure has it."""
    step, delay = random.SystemRandom().randint(1, 8), random.SystemRandom().uniform(0, 0.1)
    folder = tmp_path / "checkpoints"
    with process_of(tmp_path, "-m", "sparse_rl_lightning") as process:
        while not (list(folder.glob(f"*step={step}.ckpt")) and (folder / "last.ckpt").exists()):
            assert process.poll() in (None, 0), "the run failed"
            time.sleep(0.0005)
        time.sleep(delay)
        process.kill()
    assert_equal(final_weights(tmp_path), uninterrupted)


def test_run_killed_while_saving_loses_nothing(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    with process_of(tmp_path, "-c", KILLED_WHILE_SAVING) as process:
        assert process.wait() == -signal.SIGXFSZ
        folder = tmp_path / "checkpoints"
        assert (folder / ".incomplete" / "last.ckpt").stat().st_size <= 10_000 < (folder / "last.ckpt").stat().st_size
    assert_equal(final_weights(tmp_path), uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted_run_saves_and_ends_well(
    number: signal.Signals, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    """Checkpoints are rare here, so that the one to go on from is the signal's own."""
    told = {
        "class_path": "tests.distributed.test_resume.SignalItself",
        "init_args": {"number": int(number), "batch": 8},
    }
    path = config(tmp_path, every=STEPS, callback=told)
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(path)])
    assert end.value.code == 0
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 5, "the window of micro-batch 8 is the fifth"
    main(["fit", "--config", str(path), "--ckpt_path", "last"])
    assert_equal(final_weights(tmp_path), uninterrupted)
