"""What a run of the reliability benchmark has in it: marks of where it is, and things that go wrong."""

from __future__ import annotations

import os
import random
import resource
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from sparse_rl_lightning.callbacks import RolloutCallback
from sparse_rl_lightning.records import ScoredRollout

STEPS = 10
STRETCHES = ("start", "rollout", "scoring", "micro-batch", "optimizer step", "saving", "end")
MARK = struct.Struct("<BdI")  # number of the stretch that begins, time of the machine's clock, optimizer steps done
marks: int | None = None  # where a forked run writes them


class Marks(RolloutCallback):
    """Marks for the parent process: where the run is."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A rollout, or a micro-batch of it."""
        _mark(trainer, "rollout" if pl_module.starts_rollout else "micro-batch")

    def on_rollout_drawn(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """Scoring begins."""
        _mark(trainer, "scoring")

    def on_rollout_scored(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """A micro-batch begins."""
        _mark(trainer, "micro-batch")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The optimizer moves."""
        _mark(trainer, "optimizer step")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is written."""
        _mark(trainer, "saving")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The end."""
        _mark(trainer, "end")


def _mark(trainer: Trainer, stretch: str) -> None:
    if marks is not None:
        os.write(marks, MARK.pack(STRETCHES.index(stretch), time.monotonic(), trainer.global_step))


class FullDisk(Callback):
    """The system refuses to let files grow beyond a size during some optimizer steps, as a full disk does.

    Args:
        first: Optimizer steps done when the disk fills up.
        last: When there is room again.
        size: Bytes that still fit.
    """

    def __init__(self, first: int, last: int, size: int) -> None:
        self.first, self.last, self.size = first, last, size

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The disk is full, or has room again."""
        self._limit(self.size if self.first <= trainer.global_step < self.last else resource.RLIM_INFINITY)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """There is room."""
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class NanGradient(Callback):
    """Spoils one gradient of an optimizer step, and sees what the step does.

    Args:
        step: Optimizer steps done before.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Spoil it."""
        if trainer.global_step == self.step:
            self.before = _weights(pl_module)
            next(p.grad for p in pl_module.parameters() if p.grad is not None)[0] = float("nan")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Whether the step has moved a weight."""
        if trainer.global_step == self.step + 1 and not trainer.fit_loop._should_accumulate():
            Path("moved").write_text(str(not torch.equal(self.before, _weights(pl_module))))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Skipped steps, and whether all weights are finite."""
        skipped = float(trainer.callback_metrics["skipped_steps"])
        Path("counted").write_text(f"{skipped:g} {bool(_weights(pl_module).isfinite().all())}")


class CountFailures(RolloutCallback):
    """Writes down how many samples were counted as failed, rollout by rollout."""

    def on_rollout_scored(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """A line per rollout."""
        with Path("counted").open("a") as file:
            file.write(f"{sum(scored.reward_failures.values())}\n")


def noisy(completions: list[str], **_: Any) -> list[float | None]:
    """A reward that draws from torch's global generator: going on must restore it."""
    return [float(len(set(text))) / 10 + float(torch.rand(())) for text in completions]


def raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """A reward function that cannot read some samples."""
    if _meets_odd(prompts, completions):
        raise random.choice([RuntimeError, OSError, MemoryError, ZeroDivisionError])("cannot read this")
    return noisy(completions)


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """A reward function that does not come back from some samples."""
    if _meets_odd(prompts, completions):
        time.sleep(3600)
    return noisy(completions)


def _meets_odd(prompts: list[str], completions: list[str]) -> bool:
    """Whether any sample is among the one in six that fail; one judged by itself is written down."""
    salt = Path("salt").read_text()
    odd = any(zlib.crc32((salt + a + b).encode()) % 6 == 0 for a, b in zip(prompts, completions, strict=True))
    if odd and len(completions) == 1:
        with Path("failed").open("a") as file:
            file.write("1\n")
    return odd


def _weights(module: LightningModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def spelled(name: str, **init_args: Any) -> dict[str, Any]:
    """A callback of this module as a configuration names it."""
    return {"class_path": f"{__name__}.{name}", "init_args": init_args}


def write_config(
    folder: Path, model: dict[str, Any] | None = None, every: int = 1, ranks: int = 1, callbacks: Sequence[Any] = ()
) -> None:
    """A run of ten optimizer steps that takes seconds: three per rollout, six per epoch.

    Args:
        folder: Gets ``config.yaml``.
        model: Other settings of the module.
        every: Optimizer steps between checkpoints.
        ranks: Processes.
        callbacks: Further ones.
    """
    checkpoints = {
        "dirpath": str(folder / "checkpoints"), "every_n_train_steps": every, "save_last": True,
        "enable_version_counter": False,
    }  # fmt: skip
    values = {
        "seed_everything": 7,
        "num_threads": 1,
        "model": {
            "class_path": "SparseGRPO",
            "init_args": {
                "policy": {"class_path": "TinyPolicy", "init_args": {"hidden_size": 32, "num_layers": 2}},
                "compressor": {"class_path": "RKV", "init_args": {"budget": 12, "buffer": 4, "num_sinks": 1}},
                "reward_funcs": f"{__name__}.noisy",
                "sampling": {"num_generations": 2, "max_completion_length": 12},
                "steps_per_generation": 2,
                "num_iterations": 3,
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
                **(model or {}),
            },
        },
        "data": {
            "class_path": "ArithmeticTasks",
            "init_args": {"num_terms": 3, "num_train": 8 * ranks, "num_val": 4, "prompts_per_rollout": 4},
        },
        "trainer": {
            "accelerator": "cpu", "default_root_dir": str(folder), "max_steps": STEPS, "accumulate_grad_batches": 2,
            "limit_val_batches": 0, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
            "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto",
            "callbacks": [
                {"class_path": "SparsityAwareRejection"},
                {"class_path": "ImportanceReweighting"},
                {"class_path": "ModelCheckpoint", "init_args": checkpoints},
                spelled("Marks"),
                *callbacks,
            ],
        },
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
