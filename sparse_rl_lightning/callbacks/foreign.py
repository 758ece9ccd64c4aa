"""Callbacks of Lightning's that would do nothing here, or the wrong thing, by the reason why."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)

from sparse_rl_lightning.errors import UserError

REASONS: dict[type[Callback], str] = {
    LearningRateFinder: "changes an attribute of the module, which the learning rate is not. Set model.optimizer's lr",
    BatchSizeFinder: "changes an attribute of the module, which batch size is not. Set data.prompts_per_rollout",
    StochasticWeightAveraging: "copies the module before its policy is loaded, and would average nothing. Take "
    "EMAWeightAveraging of lightning.pytorch.callbacks",
    ModelPruning: "looks for weights before the policy is loaded, and would prune none. Prune the policy's folder",
    OnExceptionCheckpoint: "saves within a step, which no run can go on from. RolloutCheckpoint saves between two",
}


def check_foreign(callback: Callback) -> None:
    """Refuse a callback of Lightning's that does not act on a policy that is loaded late and drawn from.

    Raises:
        ValueError: If it is one of :data:`REASONS`, or saves checkpoints on exceptions.
    """
    reason = next((text for cls, text in REASONS.items() if isinstance(callback, cls)), None)
    if getattr(callback, "save_on_exception", False):
        reason = "with save_on_exception saves within a step, which no run can go on from. Leave it out"
    if reason is not None:
        raise UserError(f"trainer.callbacks: {type(callback).__name__} {reason}.")
