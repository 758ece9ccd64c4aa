"""What ``experiments.real`` runs: arms by cache, recipe and seeds, on one real model and one task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.arms.runs import CAPPED, Arm, Run, Settings, in_order
from experiments.stability.studies import Recipe

BASE, REPLAYED, FULL = (f"../experiments/real/{name}" for name in ("base", "replay", "dense"))  # as shipped ones
REJECTING = {"class_path": "SparsityAwareRejection", "init_args": {"threshold": 1e-4}}
DENSE = Arm("dense", FULL)
NAIVE = Arm("naive", BASE)
REWEIGHTING = Arm("reweighting only", BASE, (CAPPED,))
SPARSE_RL = Arm("Sparse-RL", BASE, (REJECTING, CAPPED))
REPLAY = Arm("replay", REPLAYED)

BUFFER = 8
HALF, QUARTER = 72, 32
"""Budgets whose slots, with the buffer, are a half and a quarter of the longest sequence: 61 + 96 tokens."""
_SIZES = {"buffer": BUFFER, "num_sinks": 4, "window": 8}
METHODS: dict[str, dict[str, Any]] = {
    "SnapKV": {"class_path": "SnapKV", "init_args": _SIZES},
    "RandomEviction": {"class_path": "RandomEviction", "init_args": _SIZES},
}
PROBLEMS, PROBLEMS_SEED = 256, 1_000_000  # held-out prompts, the same for every run
MONITOR = {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 4, "ceiling_prompts": 0}}
JUDGE = {"reward": "experiments.real.task.story_reward"}
DEVICES = {
    "cpu": {"trainer.accelerator": "cpu"},
    "gpu": {"trainer.accelerator": "gpu", "model.init_args.rollout.cuda_graphs": "require"},
}


@dataclass(frozen=True)
class Study:
    """Arms under a cache, by one recipe, in several seeds."""

    method: str
    budget: int
    arms: Sequence[Arm]
    recipe: Recipe
    seeds: tuple[int, ...]

    @property
    def place(self) -> str:
        """Name of its folder, which studies with the same compressor and recipe share."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.method} {self.recipe}".lower())

    def runs(self, seed: int, folder: Path, policy: Path, device: str = "cpu") -> list[Run]:
        """Those of one seed. Dense rollouts are judged under both budgets, others under their own."""
        recipe = self.recipe
        settings = Settings(
            policy=json.dumps({"class_path": "LoraPolicy", "init_args": {"policy": str(policy.absolute()), "r": 16}}),
            folder=(folder / self.place).absolute(),
            budgets=(HALF, QUARTER),
            steps=recipe.rollouts * recipe.steps,
            every_n_rollouts=0,
            num_problems=PROBLEMS,
            problems_seed=PROBLEMS_SEED,
            threads=1,
            method=METHODS[self.method],
            callbacks=(MONITOR,),
            judge=JUDGE,
            options={**recipe.options(), **DEVICES[device], "data.init_args.seed": str(1 + seed)},
        )
        twice = replace(settings, every_n_rollouts=recipe.rollouts)  # before training too, which is the same for all
        return [
            Run(arm, self.budget, seed, settings) if arm.evicts else Run(arm, None, seed, twice) for arm in self.arms
        ]


USUAL = Recipe(prompts=4, steps=2, rate=5e-4, rollouts=12, warm_up=0)
RATES = tuple(
    Study("SnapKV", HALF, (DENSE,), replace(USUAL, steps=steps, rate=rate), (0,))
    for steps in (1, 2, 4)
    for rate in (2e-4, 5e-4, 1e-3)
)
SEEDS = tuple(range(20, 25))
FIVE = (DENSE, NAIVE, REWEIGHTING, SPARSE_RL, REPLAY)


_HALF = Study("SnapKV", HALF, FIVE, USUAL, SEEDS)
_QUARTER = replace(_HALF, budget=QUARTER, arms=FIVE[1:])
_CHANCE = tuple(replace(study, method="RandomEviction", arms=(SPARSE_RL,)) for study in (_HALF, _QUARTER))
MAIN = (_HALF, _QUARTER, *_CHANCE)
"""Five arms under a half, four under a quarter, and chance under both."""


def planned(
    studies: Iterable[Study], folder: Path, policy: Path, device: str = "cpu", seeds: Iterable[int] | None = None
) -> list[Run]:
    """Every run once, seed after seed, so that an early stop leaves whole seeds."""
    return in_order(studies, lambda study, seed: study.runs(seed, folder, policy, device), seeds)
