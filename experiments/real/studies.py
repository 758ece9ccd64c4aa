"""What ``experiments.real`` runs: arms by cache, recipe and seeds, on one real model and one task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.arms.runs import CAPPED, Arm, Run, Settings, in_order
from experiments.real.teacher import network_of
from experiments.stability.studies import Recipe

BASE, REPLAYED, LEARNING, FULL = (
    f"../experiments/real/{name}" for name in ("base", "replay", "learned", "dense")
)  # as shipped ones
REJECTING = {"class_path": "SparsityAwareRejection", "init_args": {"threshold": 1e-4}}
DENSE = Arm("dense", FULL)
NAIVE = Arm("naive", BASE)
REWEIGHTING = Arm("reweighting only", BASE, (CAPPED,))
SPARSE_RL = Arm("Sparse-RL", BASE, (REJECTING, CAPPED))
REPLAY = Arm("replay", REPLAYED)
DRAWN = Arm("replay + drawn eviction", LEARNING, options={"eviction_weight": 0.0}, temperature=0.3)
LEARNED = Arm("replay + learned eviction", LEARNING, temperature=0.3)

BUFFER = 8
HALF, QUARTER = 72, 32
"""Budgets whose slots, with the buffer, are a half and a quarter of the longest sequence: 61 + 96 tokens."""
_SIZES = {"buffer": BUFFER, "num_sinks": 4, "window": 8}
METHODS: dict[str, dict[str, Any]] = {
    "SnapKV": {"class_path": "SnapKV", "init_args": _SIZES},
    "RandomEviction": {"class_path": "RandomEviction", "init_args": _SIZES},
    "H2O, by age": {"class_path": "H2O", "init_args": {**_SIZES, "age_normalized": True}},
    "LearnedScore": {"class_path": "LearnedScore", "init_args": _SIZES},
}
PROBLEMS, PROBLEMS_SEED = 256, 1_000_000  # held-out prompts, the same for every run
MONITOR = {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 4, "ceiling_prompts": 0}}
JUDGE = {"reward": "experiments.real.task.story_reward"}
DEVICES = {
    "cpu": {"trainer.accelerator": "cpu"},
    "gpu": {"trainer.accelerator": "gpu", "trainer.devices": "1", "model.init_args.rollout.cuda_graphs": "require"},
}
EAGER = ("H2O, by age", "LearnedScore")
"""Methods with running numbers, which Python updates: no graph holds their steps."""


@dataclass(frozen=True)
class Study:
    """Arms under a cache, by one recipe, in several seeds."""

    method: str
    budget: int
    arms: Sequence[Arm]
    recipe: Recipe
    seeds: tuple[int, ...]
    judged: tuple[int, ...] = (HALF, QUARTER)  # budgets under which dense runs are judged too

    @property
    def place(self) -> str:
        """Name of its folder, which studies with the same compressor and recipe share."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.method} {self.recipe}".lower())

    def compressor(self, folder: Path, policy: Path) -> dict[str, Any]:
        """Its class and arguments but for the budget."""
        method = METHODS[self.method]
        if self.method != "LearnedScore":
            return method
        return {**method, "init_args": {**method["init_args"], "weights": str(network_of(folder, policy).absolute())}}

    def runs(self, seed: int, folder: Path, policy: Path, device: str = "cpu") -> list[Run]:
        """Those of one seed. Dense runs are judged under several budgets, others under their own.

        The policy before training is the same in all, and judged once.
        """
        recipe, chosen = self.recipe, dict(DEVICES[device])
        if self.method in EAGER:
            chosen.pop("model.init_args.rollout.cuda_graphs", None)
        settings = Settings(
            policy=json.dumps({"class_path": "LoraPolicy", "init_args": {"policy": str(policy.absolute()), "r": 16}}),
            folder=(folder / self.place).absolute(),
            budgets=self.judged,
            steps=recipe.rollouts * recipe.steps,
            every_n_rollouts=0,
            num_problems=PROBLEMS,
            problems_seed=PROBLEMS_SEED,
            threads=1,
            method=self.compressor(folder, policy),
            callbacks=(MONITOR,),
            judge=JUDGE,
            options={**recipe.options(), **chosen, "data.init_args.seed": str(1 + seed)},
        )
        before = recipe.rollouts if self.judged and seed == self.seeds[0] else 0
        dense = replace(settings, every_n_rollouts=before)
        return [
            Run(arm, self.budget, seed, settings) if arm.evicts else Run(arm, None, seed, dense) for arm in self.arms
        ]


USUAL = Recipe(prompts=4, steps=1, rate=5e-4, rollouts=12, warm_up=0)
"""The best of RATES."""
RATES = tuple(
    Study("SnapKV", HALF, (DENSE,), replace(USUAL, steps=steps, rate=rate), (0,), judged=())
    for steps in (1, 2, 4)
    for rate in (2e-4, 5e-4, 1e-3)
)
SEEDS = tuple(range(20, 25))
FIVE = (DENSE, NAIVE, REWEIGHTING, SPARSE_RL, REPLAY)


_HALF = Study("SnapKV", HALF, FIVE, USUAL, SEEDS)
_QUARTER = replace(_HALF, budget=QUARTER, arms=FIVE[1:])
CELL = replace(_QUARTER, seeds=(20,))
"""Whose naive run had drawn other tokens than its partners before any update: run again, on one machine."""
_CHANCE = tuple(replace(study, method="RandomEviction", arms=(SPARSE_RL,)) for study in (_HALF, _QUARTER))
MAIN = (_HALF, _QUARTER, *_CHANCE)
"""Five arms under a half, four under a quarter, and chance under both."""
LEARNING_TO_EVICT = (
    replace(_QUARTER, method="H2O, by age", arms=(REPLAY,)),
    replace(_QUARTER, method="LearnedScore", arms=(REPLAY, DRAWN, LEARNED)),
)
"""Under a quarter, beside replay of MAIN: the best rule, a network that imitates attention, drawn, and learning on."""


def planned(
    studies: Iterable[Study], folder: Path, policy: Path, device: str = "cpu", seeds: Iterable[int] | None = None
) -> list[Run]:
    """Every run once, seed after seed, so that an early stop leaves whole seeds."""
    return in_order(studies, lambda study, seed: study.runs(seed, folder, policy, device), seeds)
