"""What a run of a study notes beside its own report: a course of evaluations, or whatever else a study asks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from copy import copy
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks.common.arithmetic import solved
from experiments.learned_eviction.drawn import Drawn
from experiments.runner.runs import NOTES
from sparse_rl_lightning.callbacks import RolloutCallback
from sparse_rl_lightning.callbacks.monitors.mismatch_split import mismatch_split
from sparse_rl_lightning.callbacks.outputs.device import on_training_device
from sparse_rl_lightning.cli.classes import imported
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rewards.scoring import Rewards

SPLIT_EVERY = 5  # rollouts
STEPS = {"clipped": "clip_ratio/region_mean", "ratios": "staleness_ratio/max", "grad_norms": "grad_norm"}


class Notebook(RolloutCallback):
    """A record of a run that is written to ``course.json`` at the end of ``fit``, and outlives an interruption."""

    record: dict[str, Any]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record: a run that has it is finished."""
        write_whole(Path(trainer.default_root_dir) / NOTES, json.dumps(self.record))

    def state_dict(self) -> dict[str, Any]:
        """The record, so that a resumed run goes on with it."""
        return dict(self.record)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the record of the run's beginning."""
        self.record = dict(state_dict)


def learned(compressor: Compressor) -> dict[str, Compressor]:
    """For a run with drawn evictions its compressor at temperature 0, by its budget; otherwise empty."""
    if not isinstance(compressor, Drawn):
        return {}
    undrawn = copy(compressor)
    undrawn.temperature = 0.0
    return {str(compressor.budget): undrawn}


def held_out(data: Any, count: int, seed: int | None) -> Rows:
    """Validation rows of a run's data, or of another seed in data of the same class and arguments."""
    if seed is not None:
        given = {name: getattr(data, name) for name in signature(type(data)).parameters if hasattr(data, name)}
        data = type(data)(**{**given, "num_val": count, "seed": seed})
    rows: Rows = data.val_rows()
    return rows[:count]


class Course(Notebook):
    """The reward of greedy answers under some caches, and what becomes of the tokens.

    Notes its mean on the first validation rows with the full cache and under every compressor, whatever the run itself
    samples with; a run that learns what to evict is judged under what it has learned. It judges the weights as they
    are, without the rounding of mixed precision. Notes also the parts of the mismatch; the share of tokens whose loss
    is left out or weighs nothing; the share that the clip of the staleness ratio stops; and of every step the largest
    such ratio and the gradient's norm.

    Args:
        compressors: Told apart by their budgets.
        every_n_rollouts: Evaluate before the first rollout, after every n, and at the end; 0 at the end alone.
        num_problems: Validation rows to solve.
        problems_seed: Seed of other validation rows than the run's own, the same for runs of different seeds.
        reward: Import path of the reward that answers are judged by.
        also_before: Numbers of rollouts before which to evaluate besides.
        split_every: Split the mismatch every n rollouts; 0 never, as where training is timed.
    """

    def __init__(
        self,
        compressors: list[Compressor],
        every_n_rollouts: int = 20,
        num_problems: int = 256,
        problems_seed: int | None = None,
        reward: str = "sparse_rl_lightning.rewards.arithmetic_reward",
        also_before: Sequence[int] = (),
        split_every: int = SPLIT_EVERY,
    ) -> None:
        self.caches: dict[str, Compressor] = {"dense": FullKV(), **{str(c.budget): c for c in compressors}}
        self.every_n_rollouts = every_n_rollouts
        self.num_problems = num_problems
        self.problems_seed = problems_seed
        self.judge = Rewards(imported(reward))
        self.also_before = also_before
        self.split_every = split_every
        self.record = {
            "evaluations": [], "splits": [], "unused": [], "clipped": [], "ratios": [], "grad_norms": [],
            "seconds": 0.0,
        }  # fmt: skip

    def on_rollout_start(self, trainer: Trainer, module: LightningModule, rows: list[dict[str, Any]]) -> None:
        """Evaluate, if it is time."""
        number: Any = module.num_rollouts
        if number in self.also_before or (self.every_n_rollouts and number % self.every_n_rollouts == 0):
            self._evaluate(trainer, module, number)

    def on_rollout_scored(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """Count tokens without a loss; now and then split the mismatch."""
        start, rollout = time.perf_counter(), scored.rollout
        mask = rollout.completion_mask
        used = mask if rollout.keep is None else mask & rollout.keep
        used = used if rollout.weights is None else used & (rollout.weights > 0)
        self.record["unused"].append(float((mask & ~used).sum() / mask.sum()))
        if self.split_every and scored.index % self.split_every == 0 and rollout.evictions is not None:
            split = {name: float(value) for name, value in mismatch_split(module, rollout).items()}
            self.record["splits"].append({"rollouts": scored.index, **split})
        self.record["seconds"] += time.perf_counter() - start

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note clip and ratio of this step, and the gradient's norm of the one before: it is logged after this."""
        for name, metric in STEPS.items():
            self.record[name].append(float(trainer.callback_metrics.get(metric, 0.0)))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate what training came to, also if it was killed after its last step, and write the record."""
        number: Any = pl_module.num_rollouts
        counted = self.record["seconds"]  # the run's own clock has stopped
        with on_training_device(trainer):
            self._evaluate(trainer, pl_module, number)
        self.record["seconds"] = counted
        super().on_fit_end(trainer, pl_module)

    def _evaluate(self, trainer: Trainer, module: Any, number: int) -> None:
        start = time.perf_counter()
        rows = held_out(getattr(trainer, "datamodule", None), self.num_problems, self.problems_seed)
        prompts, rewards = module.generator.encode(rows), {}
        for name, cache in (self.caches | learned(module.generator.compressor)).items():
            sampler = module.generator.options.sampler(module.policy, module.tokenizer, cache)
            rewards[name] = solved(sampler, module.tokenizer, rows, prompts, module.val_sampling, self.judge)
            sampler.release()
        self.record["evaluations"].append({"rollouts": number, **rewards})
        self.record["seconds"] += time.perf_counter() - start
