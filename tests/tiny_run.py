"""A run of the command line that takes a second, and what its users may do to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from sparse_rl_lightning.cli import console
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.records import LayerState


class KeyNorm(Compressor):
    """Evict the keys with the largest norm."""

    def score(self, layer: LayerState) -> Tensor:
        return -layer.keys.norm(dim=-1)


class Careless(Compressor):
    """A user's compressor with a bug."""

    def score(self, layer: LayerState) -> Tensor:
        raise ValueError("a bug of the user's")


def broken_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [1 / len(text) for text in ["", *completions]]


def digits_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [float(sum(int(c) for c in text if c.isdigit())) for text in completions]


CONFIG = """
num_threads: 1
model:
  class_path: SparseGRPO
  init_args:
    policy: {class_path: TinyPolicy, init_args: {hidden_size: 32, num_layers: 2}}
    compressor: {class_path: RKV, init_args: {budget: 12, buffer: 4, num_sinks: 1}}
    reward_funcs: [sparse_rl_lightning.rewards.arithmetic_reward, sparse_rl_lightning.rewards.worked_steps_reward]
    sampling: {num_generations: 2, max_completion_length: 12}
    steps_per_generation: 2
data: {class_path: ArithmeticTasks, init_args: {num_terms: 3, num_train: 16, num_val: 4, prompts_per_rollout: 4}}
trainer:
  accelerator: cpu
  default_root_dir: runs/own
  max_steps: 4
  limit_val_batches: 0
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: CSVLogger, init_args: {save_dir: runs, name: own}}
  callbacks:
  - class_path: SparsityAwareRejection
  - class_path: ModelCheckpoint
    init_args:
      {dirpath: runs/own/checkpoints, every_n_train_steps: 1, save_last: true, enable_version_counter: false}
"""


def config(**trainer: Any) -> dict[str, Any]:
    """A tiny run with two rollouts of two optimizer steps, written below runs/."""
    values: dict[str, Any] = yaml.safe_load(CONFIG)
    values["trainer"] |= trainer
    return values


def write(values: dict[str, Any], changes: dict[str, Any] | None = None) -> str:
    """Write config.yaml with some dotted keys set to other values."""
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place: Any = values
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        place[last] = value
    Path("config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return "config.yaml"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_console(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | None:
    """Run the console script in this process and return its exit status, None if it returns."""
    monkeypatch.setattr(sys, "argv", ["sparse-rl", *args])
    try:
        console()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return None
