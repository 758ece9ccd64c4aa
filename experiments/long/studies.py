"""What ``experiments.long`` runs: arms on sums of eighty numbers, from a policy that learns longer and longer ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.pages import say
from experiments.runner.runs import CENTERING_AND_WEIGHTS, DENSE, NAIVE, REPLAY, Arm, Settings, supervise
from experiments.runner.studies import MONITOR, Recipe, Study, Where

TERMS, LONGEST = 80, 1060  # numbers of a question, tokens of a completion
ANSWER, STEPS = (f"experiments.stability.task.{name}" for name in ("right_answer", "right_steps"))
SIZES = {"buffer": 32, "num_sinks": 4, "window": 8}
METHODS: dict[str, dict[str, Any]] = {
    f"{name}{how}": {"class_path": name, "init_args": {**SIZES, **more, **protection}}
    for name, more in {"SnapKV": {"kernel_size": 5}, "RKV": {}}.items()
    for how, protection in {"": {}, ", prompt protected": {"protect_prompt": True}}.items()
}


@dataclass(frozen=True)
class Stage:
    """Supervised training on sums of so many numbers, until this share of the tokens is right, or for so many steps.

    The learning rate falls to zero in these steps.
    """

    terms: int
    questions: int  # of a step
    rate: float
    right: float
    steps: int = 2000

    def policy(self, where: Where) -> Path:
        """What it leaves."""
        return (where.folder / "warmup" / f"{self.terms}-terms" / "policy").absolute()

    def options(self, before: Path | None) -> dict[str, Any]:
        """Of the command line, from a policy or from the beginning."""
        return {
            "data.num_terms": self.terms,
            "data.prompts_per_rollout": self.questions,
            "model.optimizer.lr": self.rate,
            "trainer.callbacks.stopping_threshold": self.right,
            "trainer.max_steps": self.steps,
            "model.lr_scheduler.total_iters": self.steps,
            **({"model.policy": before} if before else {}),
        }


STAGES = (
    Stage(4, 96, 1e-3, 0.97), Stage(12, 32, 1e-3, 0.99), Stage(32, 12, 1e-3, 0.997), Stage(56, 8, 1e-3, 0.996),
    Stage(TERMS, 6, 1e-3, 0.9997, steps=600),
)  # fmt: skip


@dataclass(frozen=True)
class Long(Study):
    """Completions of a thousand tokens; greedy answers to 128 held-out questions are the same for every run."""

    warmed_by = ""

    def prepare(self, where: Where) -> None:
        """Warm the policy up, stage by stage."""
        before: Path | None = None
        for stage in STAGES:
            policy = stage.policy(where)
            if not (policy / "config.json").is_file():
                say(f"warm-up: {stage.terms} numbers")
                words = [f"--{name}={value}" for name, value in stage.options(before).items()]
                if (policy.parent / "checkpoints" / "last.ckpt").is_file():
                    words.append("--ckpt_path=last")
                supervise(policy.parent, Path(__file__).with_name("warmup.yaml"), words)
            before = policy

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """Of every run."""
        recipe = self.recipe
        return Settings(
            policy=str(STAGES[-1].policy(where)),
            folder=self.folder(where),
            budgets=(self.budget,),
            steps=recipe.rollouts * recipe.steps,
            method=METHODS[self.method],
            every_n_rollouts=recipe.every_n_rollouts,
            num_problems=128,
            callbacks=(MONITOR,),
            judge={"reward": ANSWER},
            options={
                "data.class_path": "experiments.long.task.LongSums",
                **recipe.options(),
                "data.init_args.num_train": "4000",
                "data.init_args.num_terms": str(TERMS),
                "data.init_args.seed": str(1 + seed),
                "model.init_args.reward_funcs": json.dumps([ANSWER, STEPS]),
                "model.init_args.sampling.max_completion_length": str(LONGEST),
            },
        )


USUAL = Recipe(prompts=8, steps=2, rate=1e-4, rollouts=40, warm_up=4, every_n_rollouts=10)
ARMS = (DENSE, NAIVE, CENTERING_AND_WEIGHTS, REPLAY)
QUARTER = Long("SnapKV", 272, ARMS, USUAL, (0, 1, 2))
"""With the buffer a quarter of the longest sequences, 304 of some 1,230 tokens."""
