"""StepTimes: time and memory of a run's stages."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, rollout_module
from sparse_rl_lightning.records import Rows, ScoredRollout


class StepTimes(RolloutCallback):
    """Log once per rollout the time and memory of its training, next to the stages of the rollout itself.

    Modules that roll out add this callback themselves.

    ========================== ======== ===============================================================
    key                        unit     meaning
    ========================== ======== ===============================================================
    time/update                seconds  all forward and backward passes and optimizer steps on a rollout
    time/block                 seconds  everything from one rollout to the next
    time/trained_per_second    tokens/s completion tokens over time/block, on this rank
    memory/rollout_peak_bytes  bytes    maximum GPU memory while rolling out
    memory/update_peak_bytes   bytes    maximum GPU memory while rescoring and training
    ========================== ======== ===============================================================
    """

    def __init__(self) -> None:
        self._block_start = self._batch_start = 0.0
        self._update = 0.0
        self._tokens = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the clock of a micro-batch."""
        self._batch_start = time.perf_counter()

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Start the clock of a rollout."""
        self._block_start, self._update, self._tokens = time.perf_counter(), 0.0, 0
        _reset_peak(module.device)

    def on_rollout_drawn(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """End the rollout: the rest of this micro-batch is scoring, training, and what callbacks do."""
        self._tokens = int(scored.rollout.completion_mask.sum())
        if module.device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(module.device))
            module.log("memory/rollout_peak_bytes", peak, batch_size=len(scored.completions))
        _reset_peak(module.device)
        self._batch_start = time.perf_counter()

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Leave out what has a key of its own."""
        self._update -= sum(seconds for stage, seconds in scored.seconds.items() if stage != "rollout")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log after the last micro-batch of a rollout."""
        now = time.perf_counter()
        self._update += now - self._batch_start
        if not rollout_module(pl_module, self).starts_rollout or not self._tokens:
            return
        block = now - self._block_start
        metrics = {"time/update": self._update, "time/block": block, "time/trained_per_second": self._tokens / block}
        if pl_module.device.type == "cuda":
            metrics["memory/update_peak_bytes"] = float(torch.cuda.max_memory_allocated(pl_module.device))
        pl_module.log_dict(metrics, batch_size=1)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
