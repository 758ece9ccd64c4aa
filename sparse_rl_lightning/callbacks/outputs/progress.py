"""RolloutProgress: one progress bar for all training, which also moves during rollouts."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.metrics import rejection_rate
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rollout import Progress
from sparse_rl_lightning.text import say


class RolloutProgress(TQDMProgressBar, RolloutCallback):
    """Replaces Lightning's bar: optimizer steps done, reward, completion length, rejection, KV tokens saved.

    While a rollout runs, the bar shows the finished sequences and the tokens sampled per second. ``loss`` is left
    out: in GRPO it is near zero by construction. If the output is a file or a pipe, a plain line is printed every
    ``line_seconds`` instead of a bar.

    Args:
        refresh_seconds: Minimum time between two updates of the bar.
        line_seconds: Minimum time between two lines if there is no terminal.

    Raises:
        ValueError: If a time is negative.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_seconds: float = 0.2, line_seconds: float = 10.0) -> None:
        super().__init__(refresh_rate=1)
        check_number("refresh_seconds", refresh_seconds, least=0)
        check_number("line_seconds", line_seconds, least=0)
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self._numbers: dict[str, str] = {}  # numbers of the last rollout
        self._rollout_start = self._last_shown = -math.inf

    @property
    def is_enabled(self) -> bool:
        """Whether bars are drawn: not in a file, a pipe or on ranks other than zero."""
        return super().is_enabled and (sys.stdout.isatty() or hasattr(sys, "ps1"))  # IPython sets ps1

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Start the clock for tokens per second."""
        self._rollout_start = time.monotonic()

    def on_rollout_progress(self, trainer: Trainer, module: RolloutModule, progress: Progress) -> None:
        """Show the progress of the rollout."""
        speed = progress.tokens / max(time.monotonic() - self._rollout_start, 1e-9)
        finished = str(progress.finished).rjust(len(str(progress.total)))
        self._show(trainer, f"Rollout {finished}/{progress.total}, {speed:,.0f} tokens/s")

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Store the rollout's numbers for the next updates."""
        rollout = scored.rollout
        if rollout.rewards is not None:
            self._numbers["reward"] = f"{rollout.rewards.nanmean():.3f}"
        self._numbers["length"] = f"{rollout.completion_lengths.float().mean():.1f}"
        if rollout.keep is not None:
            self._numbers["rejected"] = f"{100 * rejection_rate(rollout.keep, rollout.completion_mask):.1f}%"
        if rollout.kv is not None:
            self._numbers["KV saved"] = f"{100 * rollout.kv.saving_final:.0f}%"
        self._show(trainer, "Update")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Show the optimizer steps done."""
        self._show(trainer, "Update")

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The rollout's numbers first, then other values logged for the bar; no loss, no version number."""
        logged = super().get_metrics(trainer, pl_module)
        rest = {k: v for k, v in logged.items() if k != "v_num" and not (self._numbers and k.startswith("loss"))}
        return {**self._numbers, **rest}

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Create one bar for the whole run, including a resumed one."""
        self.train_progress_bar = self.init_train_tqdm()
        self.train_progress_bar.reset(_total_steps(trainer))
        self.train_progress_bar.initial = self.train_progress_bar.n = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Keep one bar across epochs."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep one bar across epochs."""

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the last numbers at once."""
        self._last_shown = -math.inf
        self._show(trainer, "Trained")
        self.train_progress_bar.close()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar, or plainly without one."""
        say(sep.join(map(str, args)))

    def _show(self, trainer: Trainer, doing: str) -> None:
        """Move the bar or print a line, unless the last update was a moment ago."""
        wait, now = self.refresh_seconds if self.is_enabled else self.line_seconds, time.monotonic()
        if now - self._last_shown < wait:
            return
        self._last_shown = now
        numbers = self.get_metrics(trainer, trainer.lightning_module)
        shown = ", ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self.is_enabled:
            bar = self.train_progress_bar
            bar.n = trainer.global_step
            bar.set_description(doing, refresh=False)
            bar.set_postfix_str(shown, refresh=True)
        elif super().is_enabled:
            total = _total_steps(trainer) or "?"
            say(f"step {trainer.global_step}/{total}: {doing.lower()}{f'; {shown}' if shown else ''}")


def _total_steps(trainer: Trainer) -> int | None:
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) else None


def _short(value: Any) -> str:
    return Tqdm.format_num(value) if isinstance(value, (int, float)) else str(value)
