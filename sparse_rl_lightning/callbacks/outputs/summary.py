"""RunSummary: the results of a run as a table, a picture and a page."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DistributedSampler

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, rollout_module
from sparse_rl_lightning.callbacks.best_effort import BestEffortWrite
from sparse_rl_lightning.callbacks.outputs import run_facts
from sparse_rl_lightning.callbacks.outputs.device import on_training_device
from sparse_rl_lightning.callbacks.outputs.worst_completions import WorstCompletions, kept_texts
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.evaluation.evaluate import Scores, draw_by_place, evaluate
from sparse_rl_lightning.evaluation.time_left import TimeLeft
from sparse_rl_lightning.files import writable_folder, write_whole
from sparse_rl_lightning.metrics import rollout_metrics
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.report import PROGRESS, SUMMARY, RunRecord, page, picture, summary_text
from sparse_rl_lightning.report.charts import write_picture
from sparse_rl_lightning.report.record import REPLAYED
from sparse_rl_lightning.text import nearby, say

ROW_KEYS = (
    "time/", "memory/", "guard/", "clip_ratio/", "staleness_ratio/", "top10_token_share", "entropy", "kl",
    "empty_rollouts", "skipped_steps", "grad_norm",
)  # fmt: skip
"""Prefixes of values that are logged after a rollout was scored and belong to its row."""
BLOCK_KEYS = ("time/", "memory/")
"""Prefixes of values that are logged at the end of all training on a rollout."""

RESUMED = ("history", "before", "num_problems", "measure", "validation", "warnings")
"""Fields of the record that a resumed run continues."""


class RunSummary(RolloutCallback):
    """Evaluate greedily before and after training, store the numbers of every rollout, and report at the end.

    Held-out problems are the data module's validation rows, completed with the full and with the compressed cache and
    scored by the first of the module's reward functions, in the precision of the training.
    At the end of ``fit`` a table and a few completions are printed, and ``summary.json`` (everything as numbers),
    ``report.html`` (one self-contained page, whose charts need matplotlib) and ``report.png`` are written. Until then
    ``progress.json`` has the record so far, for ``sparse-rl report`` on a run that is still going or was killed.
    With several ranks the means over all are stored; completions, and the values of ``AcceptanceMonitor`` and
    ``MismatchSplit``, are rank zero's. A resumed run keeps the numbers and the evaluation of its first part. Where the
    learner replays what was sampled, mismatch is the part of compression, if ``MismatchSplit`` measures it, and what is
    left is shown as rounding. Evaluation draws no random numbers, so a run is the same with and without this callback.
    A trial run (``fast_dev_run``) writes nothing.

    Args:
        num_problems: Number of held-out problems to evaluate on, 0 for none.
        num_samples: Number of completions to show, and number of the worst ones of each kind.
        folder: Folder of the files, default ``trainer.default_root_dir``.
        batch_size: Number of problems to complete at the same time.
        title: Title of picture and page, default the module and its compressor.
        progress_seconds: Minimum time between two writes of ``progress.json``, and two lines of an evaluation.

    Raises:
        ValueError: If a number is out of range; at the start of ``fit``, if the folder cannot be written (later on, a
            file that cannot be written is a warning).
    """

    def __init__(
        self,
        num_problems: int = 256,
        num_samples: int = 4,
        folder: str | Path | None = None,
        batch_size: int = 64,
        title: str | None = None,
        progress_seconds: float = 30.0,
    ) -> None:
        for name, value, least in (
            ("num_problems", num_problems, 0), ("num_samples", num_samples, 0), ("batch_size", batch_size, 1),
            ("progress_seconds", progress_seconds, 0),
        ):  # fmt: skip
            check_number(name, value, least=least, owner="RunSummary")
        self.num_problems = num_problems
        self.num_samples = num_samples
        self.folder = folder
        self.batch_size = batch_size
        self.title = title
        self.progress_seconds = progress_seconds
        self.record = RunRecord()
        self.worst = WorstCompletions(num_samples)
        self._next_progress = 0.0
        self._start: float | None = None  # start of training, as if it had not been resumed
        self._rollout = 0  # index of the newest rollout
        self._trained: Literal["not", "partly", "wholly"] = "not"  # on the newest rollout, since the start of fit
        self._is_open = False  # whether the record may still get an end
        self._try = BestEffortWrite("RunSummary: the record of the run")

    # ---------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the folder can be written, and begin a new record."""
        if stage != "fit":
            return
        rollout_module(pl_module, self)
        if trainer.is_global_zero:
            writable_folder(self._folder(trainer), "RunSummary: folder")
        if trainer.global_step == 0:
            self.record, self.worst = RunRecord(), WorstCompletions(self.num_samples)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate before the first step; an earlier part of the run has done it, or the start is not known."""
        if trainer.global_step == 0:
            self.record.before = self._evaluate(trainer, rollout_module(pl_module, self))
        self._describe(trainer, rollout_module(pl_module, self))
        self._start = time.monotonic() - self.record.seconds
        self._trained, self._is_open = "not", True
        self._write_progress(trainer)

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Complete the previous rollout's row with values logged while training on it."""
        self._complete_row(trainer)
        if time.monotonic() >= self._next_progress:
            self._write_progress(trainer)

    def on_rollout_drawn(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Store the rollout's index, for warnings of callbacks that see it scored before this one."""
        self._rollout = scored.index

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Store the rollout's numbers."""
        self._trained = "not"
        replays = module.learner.replays
        metrics = {name: float(value) for name, value in rollout_metrics(scored).items()}
        metrics |= {REPLAYED: 1.0} if replays else {}
        self.record.history.append({"rollout": float(scored.index), "step": float(trainer.global_step), **metrics})
        self.worst.see(scored, module.generator.tokenizer, replays)

    def on_run_warning(self, trainer: Trainer, text: str) -> None:
        """Store the warning with its rollout; one of the start, which a resumed run gives again, is stored once."""
        if self._is_open or all(warning["text"] != text for warning in self.record.warnings):
            self.record.warnings.append({"rollout": self._rollout, "text": text})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Mark logged values as the newest rollout's; callbacks after this one have yet to log."""
        self._trained = "wholly" if rollout_module(pl_module, self).starts_rollout else "partly"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store its accuracies, except those of the sanity check."""
        logged = {cache: trainer.callback_metrics.get(f"val/pass@1_{cache}") for cache in ("dense", "sparse")}
        accuracies = {cache: float(value) for cache, value in logged.items() if value is not None}
        if accuracies and not trainer.sanity_checking:
            done = self._rollout + 1 if self.record.history else 0
            self.record.validation.append({"rollout": float(done), **accuracies})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, and write the record, because the final evaluation may fail."""
        self._complete_row(trainer)
        self.record.seconds = self._seconds()
        self._start = None
        self._write_progress(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the record so far, and why the run ended."""
        if self._is_open:
            self._complete_row(trainer)
            self._write_progress(trainer, run_facts.how_it_ended(exception))
            self._is_open = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate again, print and write."""
        module, record = rollout_module(pl_module, self), self.record
        with on_training_device(trainer):
            record.after = self._evaluate(trainer, module)
            self._describe(trainer, module)
        self._stamp(trainer, "finished")
        if trainer.is_global_zero:
            say(f"\n{summary_text(record)}\n")
            if not getattr(trainer, "fast_dev_run", False):
                self._try(lambda: self._write(self._folder(trainer)))
        self._is_open = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Complete the state with values that a resumed run could not see: every callback has logged by now."""
        self._complete_row(trainer)
        if self.state_key in checkpoint.get("callbacks", {}):
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The record as plain numbers and text."""
        fields = {name: deepcopy(getattr(self.record, name)) for name in RESUMED}
        return fields | {
            "seconds": self._seconds(),
            "worst": {reason: list(kept) for reason, kept in self.worst.kept.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the record of the run that is resumed."""
        state = dict(state_dict)
        self.worst.kept = state.pop("worst", {})
        self.record = RunRecord(**state)
        if self.record.history:
            self._rollout = int(self.record.history[-1]["rollout"])

    # ---------------------------------------------------------------- details

    def _describe(self, trainer: Trainer, module: RolloutModule) -> None:
        record = self.record
        record.settings, record.config = run_facts.describe(module), run_facts.configuration(trainer)
        record.versions, record.title = run_facts.versions(module), self.title or run_facts.default_title(module)

    def _stamp(self, trainer: Trainer, state: str) -> None:
        record = self.record
        record.steps, record.worst, record.state = trainer.global_step, self.worst.listed(), state
        record.seconds, record.written = self._seconds(), datetime.now(UTC).isoformat(timespec="seconds")

    def _complete_row(self, trainer: Trainer) -> None:
        """Add the values logged for the newest rollout, leaving out those of the previous one."""
        if not self.record.history:
            return
        row, reduced = self.record.history[-1], trainer.world_size > 1
        for name, value in trainer.callback_metrics.items() if self._trained != "not" else ():
            is_known = name.startswith(ROW_KEYS) or (reduced and name in row)
            if is_known and (self._trained == "wholly" or not name.startswith(BLOCK_KEYS)):
                row[name] = float(value)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it where no type says so
            measured = callback.measured if isinstance(callback, RolloutCallback) else None
            if measured is not None and measured[0] == row["rollout"]:  # not an earlier one
                row.update(measured[1])

    def _write_progress(self, trainer: Trainer, state: str = "running") -> None:
        """Write the record so far, with pauses long enough that writing takes at most a hundredth of the time."""
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        start = time.monotonic()
        self._stamp(trainer, state)
        numbers = json.dumps(self.record.as_json(), ensure_ascii=True) + "\n"
        self._try(lambda: write_whole(self._folder(trainer) / PROGRESS, numbers))
        self._next_progress = time.monotonic() + max(self.progress_seconds, 100 * (time.monotonic() - start))

    def _evaluate(self, trainer: Trainer, module: RolloutModule) -> dict[str, float]:
        """The mean reward of one greedy completion per row, by cache; the same on every rank."""
        with torch.random.fork_rng(devices=[]):  # a loader draws a seed
            rows = held_out_rows(trainer, self.num_problems)
        if self.num_problems and not rows:
            rank_zero_warn("RunSummary: there are no validation rows, so nothing is evaluated before and after.")
        if rows and trainer.is_global_zero:
            say(f"Evaluating on {len(rows)} held-out problems ...")
        with trainer.precision_plugin.val_step_context():  # Lightning enters it for steps, not for callbacks
            by_cache = self._greedy_scores(module, rows, trainer.is_global_zero) if rows else {}
        means = {cache: scores.mean for cache, scores in by_cache.items() if scores.mean is not None}
        record = self.record
        record.num_problems = len(rows)
        record.samples = _samples(*list(by_cache.items())[-1], self.num_samples) if by_cache else []
        was_accuracy = not record.before or record.measure == "accuracy"
        is_accuracy = bool(means) and was_accuracy and all(scores.is_binary for scores in by_cache.values())
        record.measure = "accuracy" if is_accuracy else "reward"
        return means

    def _greedy_scores(self, module: RolloutModule, rows: Rows, shows_progress: bool) -> dict[str, Scores]:
        greedy = replace(module.val_sampling, num_generations=1, temperature=0.0)
        names = {"dense": "full cache", "sparse": "compressed cache"}
        caches = names if module.generator.is_sparse else {"dense": names["dense"]}
        left, by_cache = TimeLeft(len(caches) * len(rows), self.progress_seconds), {}
        for cache, name in caches.items():
            module.generator.release()  # each cache has the memory for itself, and training's pool gets its own size
            report = partial(left.report, name, limit=1) if shows_progress else None
            draw = draw_by_place(module.generator.generate, params=greedy, dense=cache == "dense", progress=report)
            by_cache[cache] = evaluate(left.counted(draw), rows, module.rewards, self.batch_size)
            module.rewards.settle()
        module.generator.release()
        return by_cache

    def _write(self, folder: Path) -> None:
        numbers = json.dumps(self.record.as_json(), indent=1, ensure_ascii=True)
        written = [folder / SUMMARY, folder / "report.html"]
        write_whole(written[0], numbers + "\n")
        (folder / PROGRESS).unlink(missing_ok=True)
        write_whole(written[1], page(self.record))
        written += write_picture(folder / "report.png", lambda: picture(self.record))
        say("Written: " + ", ".join(map(nearby, written)))

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or trainer.default_root_dir).expanduser()

    def _seconds(self) -> float:
        return self.record.seconds if self._start is None else time.monotonic() - self._start


def held_out_rows(trainer: Trainer, count: int) -> Rows:
    """The first ``count`` validation rows of the data module, or of the loader that ``fit`` was given."""
    data = getattr(trainer, "datamodule", None)
    loader: Any = trainer.val_dataloaders if data is None else data.val_dataloader()
    if isinstance(loader, (list, tuple)):
        loader = loader[0] if loader else None
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):  # which gives each rank other rows
        return [loader.dataset[index] for index in range(min(count, len(loader.dataset)))]
    return list(islice(chain.from_iterable(loader or ()), count))


def _samples(cache: str, scores: Scores, count: int) -> list[dict[str, Any]]:
    """The first completions with their rewards, in plain values for JSON."""
    chosen = zip(scores.rows, scores.texts, scores.first[:, 0].tolist(), strict=True)
    return [{"cache": cache, "reward": reward, **kept_texts(row, text)} for row, text, reward in islice(chosen, count)]
