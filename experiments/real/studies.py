"""What ``experiments.real`` runs: arms by cache, recipe and seeds, on one real model and one task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from experiments.real.teacher import network_of, teach
from experiments.runner.runs import CAPPED, CENTERING_AND_WEIGHTS, Arm
from experiments.runner.studies import Adapted, Recipe, Where

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


@dataclass(frozen=True)
class Writing(Adapted):
    """Stories by a policy that is given, with an adapter; dense runs are judged under several budgets."""

    judged: tuple[int, ...] = (HALF, QUARTER)

    methods = METHODS
    judge: ClassVar = {"reward": "experiments.real.task.story_reward"}
    problems_seed, last = 1_000_000, 1

    def prepare(self, where: Where) -> None:
        """Teach the network that scores begin with."""
        if self.method == "LearnedScore":
            teach(where.policy, where.folder)

    def compressor(self, where: Where) -> dict[str, Any]:
        """With the weights of a network that was taught."""
        method = super().compressor(where)
        if self.method != "LearnedScore":
            return method
        weights = str(network_of(where.folder, where.policy).absolute())
        return {**method, "init_args": {**method["init_args"], "weights": weights}}


@dataclass(frozen=True)
class Ending(Writing):
    """The same, judged with the full cache alone after each of the last three rollouts, whose mean is the end."""

    judged: tuple[int, ...] = ()

    last = 3


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
