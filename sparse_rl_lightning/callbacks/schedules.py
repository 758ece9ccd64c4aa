"""FollowValidation: schedules that follow a metric of validation take their step before its checkpoints are written."""

from __future__ import annotations

import re

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.trainer.states import TrainerFn

from sparse_rl_lightning.distributed.ranks import mean_over_ranks
from sparse_rl_lightning.errors import UserError


def is_of_validation(name: object) -> bool:
    """Whether a metric is one that a validation logs, by its name."""
    return re.match("val(idation)?([/_]|$)", str(name)) is not None


def follows_validation(trainer: Trainer) -> bool:
    """Whether a schedule of the learning rate follows a metric of validation."""
    schedules = (config.scheduler for config in trainer.lr_scheduler_configs)
    return any(isinstance(each, ReduceLROnPlateau) and is_of_validation(each.monitor) for each in schedules)


class FollowValidation(Callback):
    """Step schedules that follow a metric of validation when that has ended.

    Lightning calls checkpoint callbacks behind it, so what they save has the learning rate that comes next. All modules
    add this callback themselves.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Step them in training."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            for config in trainer.lr_scheduler_configs:
                follow_metric(config.scheduler, trainer, validated=True)


def follow_metric(schedule: object, trainer: Trainer, validated: bool) -> None:
    """Step a schedule that follows a metric of what has just been done: a validation, or an optimizer step.

    Lightning would step one of validation after every optimizer step, by each rank's own number, and after the
    checkpoint of the same step is written.

    Raises:
        ValueError: If there is no such metric.
    """
    if not isinstance(schedule, ReduceLROnPlateau) or is_of_validation(schedule.monitor) != validated:
        return
    metrics = trainer.callback_metrics
    if schedule.monitor not in metrics:
        raise UserError(
            f"model.lr_scheduler: there is no metric {schedule.monitor!r} to follow. Known are "
            f"{', '.join(sorted(metrics))}."
        )
    of_rank = {schedule.monitor: metrics[schedule.monitor]}  # if it was logged so
    schedule.step(float(mean_over_ranks(of_rank, trainer.world_size)[schedule.monitor]))
