"""What ``experiments.stability`` runs: which arms on which task under which compressor, recipe, budget and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from experiments.arms.runs import CAPPED, DENSE, NAIVE, PAPER, REPLAY, Arm, Run, Settings, in_order

DELTA = Arm("naive, δ = 2", "naive", options={"loss.delta": 2.0})
REJECTION = Arm("rejection only", "naive", ("SparsityAwareRejection",))
REWEIGHTING = Arm("reweighting only", "naive", (CAPPED,))
SPARSE_RL = Arm("Sparse-RL", "naive", ("SparsityAwareRejection", CAPPED))
OFFICIAL = Arm("Sparse-RL (official)", "sparse_rl_official")
BASELINE = Arm(
    "rejection, baseline of the kept",
    "naive",
    ({"class_path": "SparsityAwareRejection", "init_args": {"baseline": "kept"}},),
)
UNLEARNED = Arm(
    "rejection, the rejected replayed", "replay", ("SparsityAwareRejection",), {"replay_objective": "rejected"}
)
LEARNING = "../experiments/learned_eviction/learned_eviction"
DRAWN = Arm("replay + drawn eviction", LEARNING, options={"eviction_weight": 0.0}, temperature=0.3)
LEARNED = Arm("replay + learned eviction", LEARNING, temperature=0.3)
ALL = (DENSE, NAIVE, DELTA, REJECTION, REWEIGHTING, SPARSE_RL, OFFICIAL, REPLAY)
FOUR = (DENSE, NAIVE, DELTA, SPARSE_RL)

TASKS = {"sum": "warmup", "countdown": "warmup_countdown"}
"""Tasks, and the configuration that warms a policy up for each."""
BUDGET = 34
_SIZES = {"buffer": 4, "num_sinks": 0}
_SNAPKV: dict[str, Any] = {**_SIZES, "window": 8, "kernel_size": 5}
_RANDOM: dict[str, Any] = {**_SIZES, "window": 8, "redraw": True}
METHODS: dict[str, dict[str, Any]] = {
    "RandomEviction": {"class_path": "RandomEviction", "init_args": _RANDOM},
    "RandomEviction, prompt protected": {
        "class_path": "RandomEviction",
        "init_args": {**_RANDOM, "protect_prompt": True},
    },
    "SnapKV": {"class_path": "SnapKV", "init_args": _SNAPKV},
    "SnapKV, prompt protected": {"class_path": "SnapKV", "init_args": {**_SNAPKV, "protect_prompt": True}},
    "KeyDiff": {"class_path": "KeyDiff", "init_args": {**_SIZES, "window": 4}},
    "SnapKV, fine": {"class_path": "SnapKV", "init_args": {**_SIZES, "window": 4, "kernel_size": 3}},
}
MONITOR = {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 8, "ceiling_prompts": 0}}
PROBLEMS, PROBLEMS_SEED = 1024, 1_000_000  # held-out problems, the same for every run


def warmed(folder: Path, config: str) -> Path:
    """Where a warm-up that runs in a folder leaves its policy."""
    return folder / "runs" / config / "policy"


@dataclass(frozen=True)
class Recipe:
    """How a run trains: the learning rate stays after a linear warm-up over the first rollouts."""

    prompts: int = 16  # per rollout, 8 samples each
    steps: int = 4  # optimizer steps per rollout
    rate: float = 2e-4
    rollouts: int = 240
    warm_up: int = 10  # rollouts
    every_n_rollouts: int = 20  # evaluations

    def __str__(self) -> str:
        return f"{self.prompts} x 8, {self.steps} steps, {self.rate_text}"

    @property
    def rate_text(self) -> str:
        """The learning rate as one writes it: 2e-4."""
        return f"{self.rate:.0e}".replace("e-0", "e-")

    def options(self) -> dict[str, str]:
        """Of the command line."""
        schedule = {"start_factor": 0.1, "end_factor": 1.0, "total_iters": self.warm_up * self.steps}
        if not self.warm_up:
            schedule = {"start_factor": 1.0, "end_factor": 1.0, "total_iters": 1}
        return {
            "data.init_args.prompts_per_rollout": str(self.prompts),
            "data.init_args.num_train": "20000",
            "model.init_args.steps_per_generation": str(self.steps),
            "model.init_args.optimizer.init_args.lr": str(self.rate),
            **{f"model.init_args.lr_scheduler.init_args.{name}": str(value) for name, value in schedule.items()},
        }


@dataclass(frozen=True)
class Study:
    """Arms on a task, under a compressor, by one recipe, in several seeds."""

    task: str
    method: str
    budget: int
    arms: Sequence[Arm]
    recipe: Recipe
    seeds: tuple[int, ...]
    options: Mapping[str, str] = field(default_factory=dict)  # of the command line
    judge: Mapping[str, str] = field(default_factory=dict)  # reward of the held-out problems, if not arithmetic's

    @property
    def place(self) -> str:
        """Name of its folder, which studies with the same task, compressor and recipe share."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.task} {self.method} {self.recipe}".lower())

    def runs(self, seed: int, folder: Path) -> list[Run]:
        """Those of one seed; a run that two studies share is equal in both.

        Other seeds see other prompts, all are judged on the same problems.
        """
        recipe = self.recipe
        settings = Settings(
            policy=str(warmed(folder, TASKS[self.task]).absolute()),
            folder=(folder / self.place).absolute(),
            budgets=(self.budget,),
            steps=recipe.rollouts * recipe.steps,
            every_n_rollouts=recipe.every_n_rollouts,
            num_problems=PROBLEMS,
            problems_seed=PROBLEMS_SEED,
            threads=1,
            method=METHODS[self.method],
            callbacks=(MONITOR,),
            judge=self.judge,
            options={
                **{name: self.options[name] for name in ("data.class_path",) if name in self.options},  # comes first
                **recipe.options(), **self.options,
                "data.init_args.tasks": self.task, "data.init_args.seed": str(1 + seed),
            },
        )  # fmt: skip
        return [Run(arm, self.budget if arm.evicts else None, seed, settings) for arm in self.arms]


USUAL = Recipe()
SEEDS, FEW = tuple(range(10, 16)), tuple(range(10, 13))
MAIN = Study("sum", "SnapKV", BUDGET, ALL, USUAL, SEEDS)
QUIET = tuple(
    Study("sum", "SnapKV", BUDGET, (DENSE,), recipe, seeds)
    for recipe, seeds in (
        (Recipe(16, 4, 3e-4), (0, 1, 2)), (Recipe(16, 4, 2e-4), (0, 1, 2)), (Recipe(16, 4, 1e-4), (0,)),
        (Recipe(32, 4, 2e-4), (0,)),
    )
)  # fmt: skip
_ANSWER = {"model.init_args.reward_funcs": '["sparse_rl_lightning.rewards.arithmetic_reward"]'}
_THREE = {**_ANSWER, "data.init_args.num_terms": "3"}
COUNTDOWN = {  # by the slot, of a text of 44 tokens on average
    "half": Study("countdown", "KeyDiff", 18, (DENSE, NAIVE, REPLAY, DRAWN, LEARNED), USUAL, FEW, _THREE),
    "third": Study("countdown", "KeyDiff", 11, (NAIVE, REPLAY, LEARNED), USUAL, FEW, _THREE),
}
CONTROL = tuple(
    Study("sum", method, BUDGET, (NAIVE, SPARSE_RL), USUAL, FEW)
    for method in ("RandomEviction", "RandomEviction, prompt protected", "SnapKV", "SnapKV, prompt protected")
)
SPIRAL = replace(MAIN, arms=(REJECTION, BASELINE, UNLEARNED), seeds=tuple(range(16, 22)))  # none that gave rise to it
TIGHT = replace(MAIN, budget=30, arms=(NAIVE, REWEIGHTING, SPARSE_RL, REPLAY))


FIVE = (DENSE, NAIVE, REWEIGHTING, SPARSE_RL, REPLAY)
FROZEN = {
    "data.class_path": "experiments.stability.task.Sums",
    "model.init_args.reward_funcs": json.dumps(
        [f"experiments.stability.task.{name}" for name in ("right_answer", "right_steps")]
    ),
}
JUDGE = {"reward": "experiments.stability.task.right_answer"}
AGAIN = tuple(
    replace(MAIN, budget=study.budget, arms=arms, seeds=tuple(range(30, 36)), options=FROZEN, judge=JUDGE)
    for study, arms in ((MAIN, FIVE), (TIGHT, FIVE[1:]))
)
"""Both comparisons with task and rewards that are files of this study."""
REMEDIES = replace(
    AGAIN[1],
    arms=(
        replace(BASELINE, label="Sparse-RL, baseline of the kept", callbacks=(*BASELINE.callbacks, CAPPED)),
        replace(UNLEARNED, label="Sparse-RL, the rejected replayed", callbacks=(*UNLEARNED.callbacks, CAPPED)),
        Arm(
            "Sparse-RL, threshold 1e-5",
            "naive",
            ({"class_path": "SparsityAwareRejection", "init_args": {"threshold": 1e-5}}, CAPPED),
        ),
    ),
    seeds=(30, 31, 32),
)
"""What may keep Sparse-RL from rejecting more and more, in the seeds where it was seen first and one beside them."""

MOST_STEPS = 4


def _at(steps: int, rate: float) -> tuple[Study, ...]:
    """Steps per rollout and a rate under the tighter cache; where there are most steps, their ratio bounded too."""
    recipe = Recipe(steps=steps, rate=rate)
    arms = FOUR[1:] if steps == MOST_STEPS else (NAIVE, SPARSE_RL)
    dense = Study("sum", "SnapKV", BUDGET, (DENSE,), recipe, FEW)  # no budget is in its rollouts: main has one of them
    return dense, replace(dense, budget=TIGHT.budget, arms=arms)


STEPS = tuple(_at(steps, rate) for rate in (2e-4, 3e-4) for steps in (1, 2, MOST_STEPS))
GROUPS: dict[str, tuple[Study, ...]] = {
    "quiet": QUIET, "main": (MAIN,), "steps": tuple(chain(*STEPS)), "countdown": tuple(COUNTDOWN.values()),
    "control": CONTROL, "spiral": (SPIRAL,), "tight": (TIGHT,), "again": AGAIN,
    "remedies": (REMEDIES,),
}  # fmt: skip

_HARSH = Recipe(16, 2, 4e-4, rollouts=50, warm_up=0, every_n_rollouts=50)
HARD = Study("sum", "SnapKV", 24, (DENSE, NAIVE, REPLAY), _HARSH, (0, 1, 2), _ANSWER)
MILD = Study("sum", "SnapKV, fine", 34, (PAPER,), _HARSH, (0, 1, 2), _ANSWER)
SHORT = (HARD, MILD)  # only the answer is paid, the rate is high and stays: what can collapse does so in minutes


def planned(studies: Iterable[Study], folder: Path, seeds: Iterable[int] | None = None) -> list[Run]:
    """Every run once, seed after seed, so that an early stop leaves whole seeds."""
    return in_order(studies, lambda study, seed: study.runs(seed, folder), seeds)
