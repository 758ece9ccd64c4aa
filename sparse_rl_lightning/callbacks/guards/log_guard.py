"""LogGuard: a log that cannot be written costs lines, not the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.callbacks.best_effort import BestEffortWrite
from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS, AgreedExit
from sparse_rl_lightning.files import append_rows

WRITING = ("log_metrics", "log_hyperparams", "save", "finalize")
"""The methods of Lightning's loggers that write to a disk."""


class LogGuard(Callback):
    """Continue when a logger meets a full disk or a removed folder, with one warning at the first failure.

    Lines that ``CSVLogger`` could not write are written as soon as possible. All modules add this callback themselves.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Guard every logger, once."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if "save" in vars(logger):
                continue  # from an earlier fit
            if isinstance(logger, CSVLogger) and "://" not in str(logger.log_dir):
                logger.experiment.save = partial(save_metrics, logger.experiment)
            for name in WRITING:
                setattr(logger, name, _guarded(getattr(logger, name), f"The log of {type(logger).__name__}"))


def _guarded(write: Callable[..., None], owner: str) -> Callable[..., None]:
    best_effort_write = BestEffortWrite(owner)

    @wraps(write)
    def guarded(*args: Any, **kwargs: Any) -> None:
        best_effort_write(lambda: write(*args, **kwargs))

    return guarded


def save_metrics(writer: Any) -> None:
    """Append new lines to ``metrics.csv``; with a new column the file is rewritten, completely or not at all.

    The writer's own method empties the file first and loses it on a full disk.
    """
    if writer.metrics:
        append_rows(Path(writer.metrics_file_path), writer.metrics, sorted)
    writer.metrics = []


class LastSave(Callback):
    """End ``fit`` with status 75 if the newest checkpoint could not be saved (a full disk), after export and report.

    All modules add this callback themselves.
    """

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check with the rank that writes."""
        if save_failed(trainer):
            rank_zero_warn(
                f"The run ends after optimizer step {trainer.global_step}, but its last checkpoint could not be saved: "
                "the warning above says why. --ckpt_path=last then goes on with the checkpoint before it, if any."
            )
            raise AgreedExit(STATUS)


def save_failed(trainer: Trainer) -> bool:
    """Whether the newest checkpoint could not be saved, as the rank that writes knows. Collective."""
    failing = getattr(trainer.strategy.checkpoint_io, "is_failing", False)
    return trainer.strategy.reduce_boolean_decision(failing, all=False)
