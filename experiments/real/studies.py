"""What ``experiments.real`` runs: arms by cache, recipe and seeds, on one real model and one task."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from experiments.real.teacher import network_of, teach
from experiments.runner.runs import CAPPED, CENTERING_AND_WEIGHTS, Arm, Settings
from experiments.runner.studies import Recipe, Study, Where

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

HALF, QUARTER = 72, 32
"""Budgets whose slots, with the buffer, are a half and a quarter of the longest sequence: 61 + 96 tokens."""
_SIZES = {"buffer": 8, "num_sinks": 4, "window": 8}
METHODS: dict[str, dict[str, Any]] = {
    "SnapKV": {"class_path": "SnapKV", "init_args": _SIZES},
    "RandomEviction": {"class_path": "RandomEviction", "init_args": _SIZES},
    "H2O, by age": {"class_path": "H2O", "init_args": {**_SIZES, "age_normalized": True}},
    "LearnedScore": {"class_path": "LearnedScore", "init_args": _SIZES},
}
PROBLEMS, PROBLEMS_SEED = 256, 1_000_000  # held-out prompts, the same for every run
MONITOR = {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 4, "ceiling_prompts": 0}}
JUDGE = {"reward": "experiments.real.task.story_reward"}


@dataclass(frozen=True)
class Writing(Study):
    """Stories by a policy that is given, with an adapter; dense runs are judged under several budgets."""

    judged: tuple[int, ...] = (HALF, QUARTER)

    last, warmed_by = 1, ""

    def prepare(self, where: Where) -> None:
        """Teach the network that scores begin with."""
        if self.method == "LearnedScore":
            teach(where.policy, where.folder)

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """The policy before training is the same in all runs, and judged once, in the dense run of the first seed."""
        recipe, method = self.recipe, METHODS[self.method]
        if self.method == "LearnedScore":
            weights = str(network_of(where.folder, where.policy).absolute())
            method = {**method, "init_args": {**method["init_args"], "weights": weights}}
        is_first = bool(self.judged) and seed == self.seeds[0] and not arm.evicts
        adapted = {"class_path": "LoraPolicy", "init_args": {"policy": str(where.policy.absolute()), "r": 16}}
        return Settings(
            policy=json.dumps(adapted),
            folder=self.folder(where),
            budgets=self.judged,
            steps=recipe.rollouts * recipe.steps,
            method=method,
            every_n_rollouts=recipe.rollouts if is_first else 0,
            num_problems=PROBLEMS,
            problems_seed=PROBLEMS_SEED,
            callbacks=(MONITOR,),
            judge=JUDGE,
            apart=self.apart,
            options={
                **recipe.options(),
                "trainer.accelerator": where.device,
                "data.init_args.seed": str(1 + seed),
                **({"trainer.devices": "1"} if where.device == "gpu" else {}),
            },
        )


@dataclass(frozen=True)
class Ending(Writing):
    """The same, judged with the full cache alone after each of the last three rollouts, whose mean is the end."""

    judged: tuple[int, ...] = ()

    last = 3

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """Notes three evaluations and no other."""
        usual = super().settings(arm, seed, where)
        course = usual.course(())
        course["init_args"]["also_before"] = [self.recipe.rollouts - 2, self.recipe.rollouts - 1]
        return replace(usual, notebook=course)


USUAL = Recipe(prompts=4, steps=1, rate=5e-4, rollouts=12, warm_up=0)
"""The best of RATES."""
RATES = tuple(
    Writing("SnapKV", HALF, (DENSE,), replace(USUAL, steps=steps, rate=rate), (0,), judged=())
    for steps in (1, 2, 4)
    for rate in (2e-4, 5e-4, 1e-3)
)
FIVE = (DENSE, NAIVE, REWEIGHTING, SPARSE_RL, REPLAY)
_HALF = Writing("SnapKV", HALF, FIVE, USUAL, tuple(range(20, 25)))
_QUARTER = replace(_HALF, budget=QUARTER, arms=FIVE[1:])
CELL = replace(_QUARTER, seeds=(20,), apart="again")
"""Whose naive run had drawn other tokens than its partners before any update: run again, on one machine."""
_CHANCE = tuple(replace(study, method="RandomEviction", arms=(SPARSE_RL,)) for study in (_HALF, _QUARTER))
MAIN = (_HALF, _QUARTER, *_CHANCE)
"""Five arms under a half, four under a quarter, and chance under both."""
CENTERED = replace(_QUARTER, arms=(replace(CENTERING_AND_WEIGHTS, config=BASE),))
"""Under a quarter, beside the kept arms of MAIN."""
EQUIVALENCE = Ending("SnapKV", HALF, (DENSE, REWEIGHTING), USUAL, tuple(range(25, 38)))
"""Is training with bounded weights under a half as good as with the full cache?"""
LEARNING_TO_EVICT = (
    replace(_QUARTER, method="H2O, by age", arms=(REPLAY,)),
    replace(_QUARTER, method="LearnedScore", arms=(REPLAY, DRAWN, LEARNED)),
)
"""Under a quarter, beside replay of MAIN: the best rule, a network that imitates attention, drawn, and learning on."""
