"""What ``experiments.math`` runs: arms under R-KV on word problems, by Qwen2.5-Coder-0.5B with an adapter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from examples.word_problems import texts, write
from experiments.runner.runs import CENTERING_AND_WEIGHTS, Arm, Settings, hashed
from experiments.runner.studies import Adapted, Recipe, Where

BASE, FULL = (f"../experiments/math/{name}" for name in ("base", "dense"))  # as shipped ones
DENSE = Arm("dense", FULL)
CENTERED = replace(CENTERING_AND_WEIGHTS, config=BASE)
BUDGET = 192
"""With the buffer 224 tokens: 55 % of the longest sequence of ``MAIN`` (90 + 320), a quarter of that of ``CARD``."""


@cache
def problems() -> dict[str, str]:
    """The files of problems, the same for every run."""
    return texts(train=8000, held_out=256, seed=0)


@cache
def folder_of_problems() -> str:
    """Its name says what they are: with others every run is another one."""
    return f"problems-{hashed(str(problems()))}"


@dataclass(frozen=True)
class Solving(Adapted):
    """Word problems; the end is the mean of three evaluations with the full cache, on 256 of other templates."""

    methods: ClassVar = {"RKV": {"class_path": "RKV", "init_args": {"buffer": 32, "num_sinks": 4, "window": 8}}}
    judge: ClassVar = {"reward": "sparse_rl_lightning.rewards.boxed_math_reward"}

    def files(self, where: Where) -> Path:
        """Folder of the problems."""
        return where.folder.absolute() / folder_of_problems()

    def prepare(self, where: Where) -> None:
        """Write the problems."""
        write(self.files(where), problems())

    def options(self, seed: int, where: Where) -> dict[str, str]:
        """With the files of problems; how many there are is theirs to say."""
        options = super().options(seed, where)
        del options["data.init_args.num_train"]
        return options | {
            "data.init_args.path": str(self.files(where) / "train.jsonl"),
            "data.init_args.val_path": str(self.files(where) / "held_out.jsonl"),
        }


@dataclass(frozen=True)
class Watched(Solving):
    """Completions of up to 768 tokens, judged every few rollouts; nothing else takes time beside training."""

    last = 1

    def options(self, seed: int, where: Where) -> dict[str, str]:
        """With longer completions, of which the learner takes a few at a time."""
        longer = {"sampling.max_completion_length": "768", "learner.micro_batch_tokens": "16384"}
        return super().options(seed, where) | {f"model.init_args.{name}": value for name, value in longer.items()}

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """The same evaluations in every run, and no other measurements."""
        settings = replace(
            super().settings(arm, seed, where), every_n_rollouts=self.recipe.every_n_rollouts, callbacks=()
        )
        course = settings.course(())
        course["init_args"]["split_every"] = 0
        return replace(settings, notebook=course)


USUAL = Recipe(prompts=4, steps=1, rate=2e-4, rollouts=30, warm_up=0)
RATES = tuple(Solving("RKV", BUDGET, (DENSE,), replace(USUAL, rate=rate), (0,)) for rate in (1e-4, 2e-4, 5e-4))
"""Dense training, which chooses the recipe."""
MAIN = Solving("RKV", BUDGET, (DENSE, CENTERED), USUAL, tuple(range(40, 48)))
"""Does training under half of a sequence's tokens reach what dense training reaches?"""
CARD = Watched("RKV", BUDGET, (DENSE, CENTERED), replace(USUAL, prompts=16, rollouts=16, every_n_rollouts=4), (60, 61))
"""For some minutes of a large GPU: accuracy against time and memory."""
