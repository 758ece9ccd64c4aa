"""RolloutCallback: hooks around a rollout, in addition to Lightning's own."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.callbacks.protocol import RolloutModule
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rollout import Progress


class RolloutCallback(Callback):
    """A callback for rollouts. Editing callbacks run before reading ones, otherwise in the trainer's order."""

    edits = False
    """Whether the callback changes ``keep`` or ``weights`` of the rollout."""

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Called before the prompts ``rows`` of a new block are rolled out."""

    def on_rollout_progress(self, trainer: Trainer, module: RolloutModule, progress: Progress) -> None:
        """Called after every decode step of a training rollout."""

    def on_rollout_drawn(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Called when a rollout is drawn and decoded, before it is rescored."""

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Called when a rollout has its dense log-probs, rewards and advantages, before the first loss.

        Edit ``scored.rollout.keep`` and ``scored.rollout.weights`` by multiplying, so that callbacks combine.
        """

    def on_run_warning(self, trainer: Trainer, text: str) -> None:
        """Called when a callback warns about the course of the run."""


def warn_of_run(trainer: Trainer, text: str) -> None:
    """Warn about the course of a run, and notify the callbacks that keep its record."""
    rank_zero_warn(text, stacklevel=6)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutCallback):
            callback.on_run_warning(trainer, text)
