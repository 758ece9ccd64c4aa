"""What ``experiments.math`` runs: arms under R-KV on word problems, by Qwen2.5-Coder-0.5B with an adapter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from examples.word_problems import write
from experiments.runner.runs import CENTERING_AND_WEIGHTS, Arm, Settings
from experiments.runner.studies import Adapted, Recipe, Where

BASE, FULL = (f"../experiments/math/{name}" for name in ("base", "dense"))  # as shipped ones
DENSE = Arm("dense", FULL)
CENTERED = replace(CENTERING_AND_WEIGHTS, config=BASE)
HALF = 192
"""A budget whose slots, with the buffer, are about half of the longest sequence: some 110 + 320 tokens."""


@dataclass(frozen=True)
class Solving(Adapted):
    """Word problems; the end is the mean of three evaluations with the full cache, on 256 of other templates."""

    methods: ClassVar = {"RKV": {"class_path": "RKV", "init_args": {"buffer": 32, "num_sinks": 4, "window": 8}}}
    judge: ClassVar = {"reward": "sparse_rl_lightning.rewards.boxed_math_reward"}

    def prepare(self, where: Where) -> None:
        """Write the problems, which are the same for every run."""
        write(where.folder / "problems", train=8000, held_out=256, seed=0)

    def options(self, seed: int, where: Where) -> dict[str, str]:
        """With the files of problems; how many there are is theirs to say."""
        options = super().options(seed, where)
        del options["data.init_args.num_train"]
        files = {"path": "train", "val_path": "held_out"}
        folder = where.folder.absolute() / "problems"
        return options | {f"data.init_args.{name}": str(folder / f"{file}.jsonl") for name, file in files.items()}


@dataclass(frozen=True)
class Watched(Solving):
    """Completions as long as the model likes, judged every few rollouts."""

    last = 1

    def options(self, seed: int, where: Where) -> dict[str, str]:
        """With longer completions, of which the learner takes a few at a time."""
        longer = {"sampling.max_completion_length": "768", "learner.micro_batch_tokens": "16384"}
        return super().options(seed, where) | {f"model.init_args.{name}": value for name, value in longer.items()}

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """The same in every run."""
        return replace(super().settings(arm, seed, where), every_n_rollouts=self.recipe.every_n_rollouts)


USUAL = Recipe(prompts=4, steps=1, rate=2e-4, rollouts=30, warm_up=0)
RATES = tuple(Solving("RKV", HALF, (DENSE,), replace(USUAL, rate=rate), (0,)) for rate in (1e-4, 2e-4, 5e-4))
"""Dense training, which chooses the recipe."""
MAIN = (Solving("RKV", HALF, (DENSE, CENTERED), USUAL, tuple(range(40, 48))),)
"""Does training under half of a sequence's tokens reach what dense training reaches?"""
CARD = (Watched("RKV", HALF, (DENSE, CENTERED), replace(USUAL, prompts=16, rollouts=16, every_n_rollouts=4), (60, 61)),)
"""For four minutes of a large GPU: accuracy against time and memory."""
