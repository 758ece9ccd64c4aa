"""LastSave: a failure exit status if the last checkpoint of a run could not be written."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS, AgreedExit


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
    """Whether the newest checkpoint could not be saved, which the rank that writes tells all. Collective."""
    failing = getattr(trainer.strategy.checkpoint_io, "is_failing", False)
    return trainer.strategy.reduce_boolean_decision(failing, all=False)
