"""What ``experiments.stability`` runs: which arms on which task under which compressor, recipe, budget and seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.runner.runs import (
    CAPPED,
    CENTERING,
    CENTERING_AND_WEIGHTS,
    DENSE,
    NAIVE,
    OFFICIAL,
    PAPER,
    REPLAY,
    SPARSE_RL,
    Arm,
    Settings,
    warmed,
)
from experiments.runner.studies import Recipe, Study, Where

DELTA = Arm("naive, δ = 2", "naive", options={"loss.delta": 2.0})
REJECTION = Arm("rejection only", "naive", ("SparsityAwareRejection",))
REWEIGHTING = Arm("reweighting only", "naive", (CAPPED,))
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


@dataclass(frozen=True)
class Arithmetic(Study):
    """Arithmetic under SnapKV, unless it says otherwise; studies with the same task share a warm-up."""

    task: str = "sum"
    options: Mapping[str, str] = field(default_factory=dict)  # of the command line
    judge: Mapping[str, str] = field(default_factory=dict)  # reward of the held-out problems, if not arithmetic's

    @property
    def warmed_by(self) -> str:  # type: ignore[override]  # depends on the task
        """The configuration of the task's warm-up."""
        return TASKS[self.task]

    @property
    def place(self) -> str:
        """Name of its folder, which begins with the task."""
        return f"{self.task}-{super().place}"

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """Other seeds see other prompts, all are judged on the same problems."""
        recipe = self.recipe
        return Settings(
            policy=str(warmed(where.folder, self.warmed_by).absolute()),
            folder=self.folder(where),
            budgets=(self.budget,),
            steps=recipe.rollouts * recipe.steps,
            method=METHODS[self.method],
            every_n_rollouts=recipe.every_n_rollouts,
            num_problems=PROBLEMS,
            problems_seed=PROBLEMS_SEED,
            callbacks=(MONITOR,),
            judge=self.judge,
            apart=self.apart,
            options={
                **{name: self.options[name] for name in ("data.class_path",) if name in self.options},  # comes first
                **recipe.options(), **self.options,
                "data.init_args.tasks": self.task, "data.init_args.seed": str(1 + seed),
            },
        )  # fmt: skip


USUAL = Recipe()
SEEDS, FEW = tuple(range(10, 16)), tuple(range(10, 13))
MAIN = Arithmetic("SnapKV", BUDGET, ALL, USUAL, SEEDS)
QUIET = tuple(
    Arithmetic("SnapKV", BUDGET, (DENSE,), recipe, seeds)
    for recipe, seeds in (
        (Recipe(16, 4, 3e-4), (0, 1, 2)), (Recipe(16, 4, 2e-4), (0, 1, 2)), (Recipe(16, 4, 1e-4), (0,)),
        (Recipe(32, 4, 2e-4), (0,)),
    )
)  # fmt: skip
_ANSWER = {"model.init_args.reward_funcs": '["sparse_rl_lightning.rewards.arithmetic_reward"]'}
_THREE = {**_ANSWER, "data.init_args.num_terms": "3"}
COUNTDOWN = (  # slots of a half and a third of a text, of 44 tokens on average
    Arithmetic("KeyDiff", 18, (DENSE, NAIVE, REPLAY, DRAWN, LEARNED), USUAL, FEW, "countdown", _THREE),
    Arithmetic("KeyDiff", 11, (NAIVE, REPLAY, LEARNED), USUAL, FEW, "countdown", _THREE),
)
CONTROL = tuple(
    Arithmetic(method, BUDGET, (NAIVE, SPARSE_RL), USUAL, FEW)
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
_AGAIN = replace(
    MAIN,
    arms=FIVE,
    seeds=tuple(range(30, 36)),
    options=FROZEN,
    judge={"reward": "experiments.stability.task.right_answer"},
)
AGAIN = (_AGAIN, replace(_AGAIN, budget=TIGHT.budget, arms=FIVE[1:]))
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
CENTERED = tuple(replace(study, arms=(CENTERING, CENTERING_AND_WEIGHTS)) for study in AGAIN)
"""Score centering in the same seeds under both caches, beside the kept arms of AGAIN."""

_EACH_STEPS = [Recipe(steps=steps, rate=rate) for rate in (2e-4, 3e-4) for steps in (1, 2, 4)]
STEPS = (  # dense rollouts know no budget, main has one of them; where there are most steps, their ratio is bounded too
    *(replace(MAIN, arms=(DENSE,), recipe=recipe, seeds=FEW) for recipe in _EACH_STEPS),
    *(replace(TIGHT, arms=(NAIVE, SPARSE_RL), recipe=recipe, seeds=FEW) for recipe in _EACH_STEPS if recipe.steps < 4),
    *(replace(TIGHT, arms=(NAIVE, DELTA, SPARSE_RL), recipe=r, seeds=FEW) for r in _EACH_STEPS if r.steps == 4),
)
"""Steps per rollout and rates under the tighter cache."""

_HARSH = Recipe(16, 2, 4e-4, rollouts=50, warm_up=0, every_n_rollouts=50)
SHORT = (
    Arithmetic("SnapKV", 24, (DENSE, NAIVE, REPLAY), _HARSH, (0, 1, 2), options=_ANSWER, apart="short"),
    Arithmetic("SnapKV, fine", 34, (PAPER,), _HARSH, (0, 1, 2), options=_ANSWER, apart="short"),
)
"""Only the answer is paid, the rate is high and stays: what can collapse does so in minutes."""

GROUPS: dict[str, tuple[Study, ...]] = {
    "quiet": QUIET, "main": (MAIN,), "steps": STEPS, "countdown": COUNTDOWN,
    "control": CONTROL, "spiral": (SPIRAL,), "tight": (TIGHT,), "again": AGAIN,
    "remedies": (REMEDIES,), "centered": CENTERED, "short": SHORT,
}  # fmt: skip
