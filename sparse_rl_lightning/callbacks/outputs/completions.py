"""CompletionsTable: samples of the policy in the terminal, as parquet files and in loggers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule
from sparse_rl_lightning.callbacks.best_effort import BestEffortWrite
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.files import own_folder, writable_folder, write_parquet
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.text import number, printable, prompt_text, say, table

OWN_COLUMNS = ("step", "prompt", "completion", "answer", "reward", "advantage", "rejected")


class CompletionsTable(RolloutCallback):
    """Print a few completions of a rollout and write all of them to ``completions/completions_00000.parquet``.

    The files have one row per completion with the columns ``step``, ``prompt``, ``completion``, ``answer`` if
    the data has one, a column per reward function, ``reward``, ``advantage`` and ``rejected``. In the terminal,
    control characters are shown as escapes and long text loses its middle. A trial run (``fast_dev_run``) writes no
    files.

    Args:
        every_n_rollouts: Every n-th rollout, starting with the first.
        num_samples: Number of completions to print, beginning with the first prompt's.
        folder: Parent of the ``completions`` folder, default ``trainer.default_root_dir``.
        console: Whether to print.
        parquet: Whether to write files.
        loggers: Whether the trainer's loggers get the table: W&B as a table, TensorBoard as text.
        width: Largest number of characters of a prompt and of a completion to print.

    Raises:
        ValueError: If a number is out of range; at the start of ``fit``, if the folder cannot be written.
    """

    def __init__(
        self,
        every_n_rollouts: int = 10,
        num_samples: int = 4,
        folder: str | Path | None = None,
        console: bool = True,
        parquet: bool = True,
        width: int = 60,
        loggers: bool = True,
    ) -> None:
        for name, value, least in (
            ("every_n_rollouts", every_n_rollouts, 1), ("num_samples", num_samples, 0), ("width", width, 10)
        ):  # fmt: skip
            check_number(name, value, least=least, owner="CompletionsTable")
        self.every_n_rollouts = every_n_rollouts
        self.num_samples = num_samples
        self.folder = folder
        self.console = console
        self.parquet = parquet
        self.width = width
        self.loggers = loggers
        self._parquet = BestEffortWrite("CompletionsTable: a table")
        self._logged = BestEffortWrite("CompletionsTable: the table of a logger")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the folder can be written."""
        if stage == "fit" and self._writes(trainer) and trainer.is_global_zero:
            writable_folder(self._folder(trainer), "CompletionsTable: folder")

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Print and write, on rank zero only."""
        if scored.index % self.every_n_rollouts or not trainer.is_global_zero:
            return
        columns = completion_columns(scored, trainer.global_step)
        if self.console and self.num_samples:
            say(f"\nRollout {scored.index}\n{_table(columns, self.num_samples, self.width)}\n")
        if self._writes(trainer):
            folder, name = self._folder(trainer), f"completions_{scored.index:05d}.parquet"
            self._parquet(lambda: write_parquet(own_folder(folder) / name, columns))
        for logger in trainer.loggers if self.loggers else ():
            self._logged(partial(log_table, logger, columns, trainer.global_step))

    def _writes(self, trainer: Trainer) -> bool:
        return self.parquet and not trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it where no type says so

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or trainer.default_root_dir).expanduser() / "completions"


def completion_columns(scored: ScoredRollout, step: int) -> dict[str, list[Any]]:
    """A table of a rollout, after all callbacks that edit it: column names with B values each."""
    rollout, count = scored.rollout, len(scored.completions)
    rows = [row for row in scored.rows for _ in range(scored.num_generations)]
    columns: dict[str, list[Any]] = {
        "step": [step] * count,
        "prompt": [prompt_text(row["prompt"]) for row in rows],
        "completion": list(scored.texts),
    }
    if any("answer" in row for row in rows):
        columns["answer"] = [None if row.get("answer") is None else str(row["answer"]) for row in rows]
    for name, values in scored.reward_table.items():
        columns[f"reward_{name}" if name in OWN_COLUMNS else name] = _numbers(values)
    rejected = [False] * count if rollout.keep is None else (~rollout.keep.any(dim=1)).tolist()
    numbers = {"reward": _numbers(rollout.rewards), "advantage": _numbers(rollout.advantages), "rejected": rejected}
    return columns | {name: values for name, values in numbers.items() if values}


def log_table(logger: Logger, columns: dict[str, list[Any]], step: int) -> None:
    """Log a table of :func:`completion_columns` in the form that the logger supports; other loggers get nothing.

    W&B, and any logger with ``log_text``, gets a table, TensorBoard (an experiment with ``add_text``) text.
    """
    names, rows = list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
    if hasattr(logger, "log_text"):
        logger.log_text("completions", columns=names, data=rows, step=step)
    elif (experiment := getattr(logger, "experiment", None)) is not None and hasattr(experiment, "add_text"):
        body = [[printable(str(value), 200).replace("|", "\\|") for value in row] for row in rows]
        lines = [" | ".join(row) for row in [names, ["---"] * len(names), *body]]
        experiment.add_text("completions", "\n".join(lines), step)


def _numbers(values: Tensor | None) -> list[float | None]:
    """The values as numbers, with None for NaN."""
    return [] if values is None else [None if v != v else v for v in values.double().tolist()]


def _table(columns: dict[str, list[Any]], num_samples: int, width: int) -> str:
    head = ["prompt", "completion", "reward", "advantage", "rejected"]
    shown = [columns.get(name, [None] * num_samples)[:num_samples] for name in head]
    body = [
        [printable(prompt, width), printable(text, width), number(reward, 2), number(gain, 2), "yes" if gone else ""]
        for prompt, text, reward, gain, gone in zip(*shown, strict=True)
    ]
    return table([head, *body], "llrr")
