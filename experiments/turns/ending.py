"""Ending: what a run of ``experiments.turns`` notes beside its own log."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from experiments.runner.course import Notebook, held_out
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.records import Conversation, Rows
from sparse_rl_lightning.rollout.conversations import converse

METRICS = (
    "reward", "rejection_rate", "kv/evicted/prompt", "kv/evicted/drawn", "kv/evicted/given",
    "mismatch/kl_k3/first_turn", "mismatch/kl_k3/later_turns",
)  # fmt: skip


class Ending(Notebook):
    """Greedy conversations about held-out problems before and after training, and the log's numbers by the end.

    They are held with the full cache and with a compressed one.

    Args:
        compressor: Compressor of the second evaluation.
        num_problems: Problems to solve.
        problems_seed: Their seed, the same for every run.
    """

    def __init__(self, compressor: Compressor, num_problems: int = 256, problems_seed: int = 1_000_000) -> None:
        self.caches: dict[str, Compressor] = {"full": FullKV(), "compressed": compressor}
        self.num_problems = num_problems
        self.problems_seed = problems_seed
        self.record = {"before": {}, "after": {}, "logged": {name: [] for name in METRICS}}

    def on_rollout_start(self, trainer: Trainer, module: LightningModule, rows: Rows) -> None:
        """Evaluate before the first rollout."""
        if not self.record["before"]:
            self.record["before"] = self._evaluate(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the numbers of this step."""
        for name, values in self.record["logged"].items():
            values.append(float(trainer.callback_metrics.get(name, math.nan)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the trained policy."""
        self.record["after"] = self._evaluate(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record, of what was logged the mean over the last quarter of the steps."""
        self.record["logged"] = {name: late_mean(values) for name, values in self.record["logged"].items()}
        super().on_fit_end(trainer, pl_module)

    def _evaluate(self, trainer: Trainer, module: Any) -> dict[str, dict[str, float]]:
        problems = held_out(trainer.datamodule, self.num_problems, self.problems_seed)
        ends = {}
        for name, cache in self.caches.items():
            sampler = module.generator.options.sampler(module.policy, module.tokenizer, cache)
            talk = module.generator.conversations()
            rows, _, talks = converse(sampler, talk, problems, module.val_sampling, range(self.num_problems))
            sampler.release()
            ends[name] = numbers(rows, talks)
        return ends


def numbers(rows: Rows, talks: list[Conversation]) -> dict[str, float]:
    """Means over conversations: reward, share right, calls and turns."""
    turns = [[m["content"] for m in talk.messages if m["role"] == "assistant"] for talk in talks]
    answers = zip(turns, rows, strict=True)
    return {
        "reward": statistics.fmean(talk.reward for talk in talks),
        "right": statistics.fmean(texts[-1].rstrip("?") == f"#{row['answer']}" for texts, row in answers),
        "calls": statistics.fmean(sum(not turn.startswith("#") for turn in texts) for texts in turns),
        "turns": statistics.fmean(map(len, turns)),
    }


def late_mean(values: list[float]) -> float | None:
    """Mean of the finite ones in the last quarter, None if there are none."""
    late = [value for value in values[-max(1, len(values) // 4) :] if math.isfinite(value)]
    return statistics.fmean(late) if late else None
