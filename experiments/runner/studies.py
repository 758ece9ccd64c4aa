"""A study: arms under a cache, by one recipe, in several seeds."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.runner.runs import Arm, Run, Settings, warm_up

MONITOR = {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 4, "ceiling_prompts": 0}}


@dataclass(frozen=True)
class Where:
    """Where studies run, and what their policies are made of."""

    folder: Path
    policy: Path = Path()  # that all runs start from, in studies that warm none up
    device: str = "cpu"  # as the trainer's accelerator is called


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
        rate = f"{self.rate:.0e}".replace("e-0", "e-")  # as one writes it: 2e-4
        return f"{self.prompts} x 8, {self.steps} steps, {rate}"

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
class Study(ABC):
    """Arms under a cache, by one recipe, in several seeds; each task has a subclass that says what its runs share."""

    method: str
    budget: int
    arms: Sequence[Arm]
    recipe: Recipe
    seeds: tuple[int, ...]
    apart: str = field(default="", kw_only=True)  # the ending of the name of a file of lines of its own

    last = 3  # evaluations that make the end
    warmed_by = "warmup"  # the configuration whose policy the runs start from; empty where they start from another

    @property
    def place(self) -> str:
        """Name of its folder, which studies with the same compressor and recipe share."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.method} {self.recipe}".lower())

    @abstractmethod
    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """What an arm's run of a seed has in common with the others."""

    def prepare(self, where: Where) -> None:
        """Make what the runs need and is not there yet: a policy that is warmed up."""
        if self.warmed_by:
            warm_up(where.folder, self.warmed_by)

    def runs(self, seed: int, where: Where) -> list[Run]:
        """Those of one seed; a run that two studies share is equal in both."""
        return [
            Run(arm, self.budget if arm.evicts else None, seed, self.settings(arm, seed, where)) for arm in self.arms
        ]

    def folder(self, where: Where) -> Path:
        """Of its runs."""
        return (where.folder / self.apart / self.place).absolute()


@dataclass(frozen=True)
class Adapted(Study):
    """A policy that is given trains with an adapter; where dense runs are judged under budgets, the first one twice."""

    judged: tuple[int, ...] = ()  # budgets that dense runs are judged under

    methods: ClassVar[Mapping[str, dict[str, Any]]] = {}  # compressors by how the study calls them, without budgets
    judge: ClassVar[Mapping[str, str]] = {}
    problems_seed: ClassVar[int | None] = None  # of held-out problems, which are the same for every run
    warmed_by = ""

    def compressor(self, where: Where) -> dict[str, Any]:
        """What rollouts are drawn under, without its budget."""
        return self.methods[self.method]

    def options(self, seed: int, where: Where) -> dict[str, str]:
        """Of the command line."""
        drawn = {"trainer.accelerator": where.device, "data.init_args.seed": str(1 + seed)}
        return self.recipe.options() | drawn | ({"trainer.devices": "1"} if where.device == "gpu" else {})

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """The policy before training is the same in all runs, and judged once, in the dense run of the first seed."""
        adapted = {"class_path": "LoraPolicy", "init_args": {"policy": str(where.policy.absolute()), "r": 16}}
        is_first = bool(self.judged) and seed == self.seeds[0] and not arm.evicts
        settings = Settings(
            policy=json.dumps(adapted),
            folder=self.folder(where),
            budgets=self.judged,
            steps=self.recipe.rollouts * self.recipe.steps,
            method=self.compressor(where),
            every_n_rollouts=self.recipe.rollouts if is_first else 0,
            problems_seed=self.problems_seed,
            callbacks=(MONITOR,),
            judge=self.judge,
            apart=self.apart,
            options=self.options(seed, where),
        )
        if self.last == 1:
            return settings
        course = settings.course(self.judged)
        course["init_args"]["also_before"] = list(range(self.recipe.rollouts - self.last + 1, self.recipe.rollouts))
        return replace(settings, notebook=course)


def planned(studies: Iterable[Any], where: Where, seeds: Iterable[int] | None = None) -> list[Run]:
    """Every run once, in all seeds or in these alone; seed after seed, so that an early stop leaves whole ones."""
    wanted = None if seeds is None else set(seeds)
    runs: dict[Path, Run] = {}
    pairs = [(seed, study) for study in studies for seed in study.seeds if wanted is None or seed in wanted]
    for seed, study in sorted(pairs, key=lambda pair: pair[0]):
        for run in study.runs(seed, where):
            runs.setdefault(run.folder, run)
    return list(runs.values())
