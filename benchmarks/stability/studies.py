"""What ``benchmarks.stability`` runs: which arms on which task under which compressor, budgets and seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arms.runs import DENSE, NAIVE, REPLAY, Arm, Run, Settings

PAPER, OFFICIAL = Arm("Sparse-RL (paper)", "sparse_rl_paper"), Arm("Sparse-RL (official)", "sparse_rl_official")
REJECTION = Arm("rejection only", "naive", ("SparsityAwareRejection",))
REWEIGHTING = Arm("reweighting only", "naive", ("ImportanceReweighting",))
ALL = (DENSE, NAIVE, REJECTION, REWEIGHTING, PAPER, OFFICIAL, REPLAY)
THREE = (NAIVE, PAPER, REPLAY)

TASKS = {"sum": "warmup", "reduction": "warmup_reduction"}  # and the configuration that warms a policy up for it
BUDGET = 26
BUDGETS = (22, 26, 30)
_SIZES = {"buffer": 4, "num_sinks": 0}
METHODS: dict[str, dict[str, Any]] = {
    "SnapKV": {"class_path": "SnapKV", "init_args": {**_SIZES, "window": 4, "kernel_size": 3}},
    "SnapKV, coarse": {"class_path": "SnapKV", "init_args": {**_SIZES, "window": 8, "kernel_size": 5}},
    "R-KV": {"class_path": "RKV", "init_args": _SIZES},
}
HARSH = {  # only the answer is paid, and the learning rate stays: where something can collapse, it does so soon
    "model.init_args.reward_funcs": '["sparse_rl_lightning.rewards.arithmetic_reward"]',
    "model.init_args.lr_scheduler.init_args.total_iters": "10000",
}
MONITOR = {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 4, "ceiling_prompts": 0}}


def warmed(folder: Path, config: str) -> Path:
    """Where a warm-up that runs in a folder leaves its policy."""
    return folder / "runs" / config / "policy"


@dataclass(frozen=True)
class Scale:
    """How large the study is."""

    steps: int = 200  # optimizer steps, two per rollout
    num_problems: int = 256
    every_n_rollouts: int = 25


@dataclass(frozen=True)
class Study:
    """Arms on a task, under a compressor with each of the budgets."""

    task: str
    method: str
    budgets: tuple[int, ...]
    arms: Sequence[Arm]
    options: Mapping[str, str] = field(default_factory=dict)  # of the command line

    @property
    def place(self) -> str:
        """Name of its folder, which studies of the same task under the same compressor share."""
        return re.sub(r"[^a-z-]+", "-", f"{self.task}-{self.method.lower()}")

    def runs(self, seed: int, scale: Scale, folder: Path) -> list[Run]:
        """Those of one seed; a run that two studies share is equal in both.

        Other seeds see other prompts and are judged on other problems. Dense rollouts depend on no budget and are
        judged under all of them.
        """
        settings = Settings(
            policy=str(warmed(folder, TASKS[self.task]).absolute()),
            folder=(folder / self.place).absolute(),
            budgets=tuple(sorted({*BUDGETS, *self.budgets})),
            steps=scale.steps,
            every_n_rollouts=scale.every_n_rollouts,
            num_problems=scale.num_problems,
            threads=1,
            method=METHODS[self.method],
            callbacks=(MONITOR,),
            options={**self.options, "data.init_args.tasks": self.task, "data.init_args.seed": str(1 + seed)},
        )
        return [
            Run(arm, budget if arm.evicts else None, seed, settings)
            for arm in self.arms
            for budget in (self.budgets if arm.evicts else self.budgets[:1])
        ]


MAIN = tuple(Study(task, "SnapKV", (BUDGET,), ALL) for task in TASKS)
ABLATION = Study("sum", "SnapKV", BUDGETS, THREE)
RKV = Study("sum", "R-KV", (BUDGET,), THREE)
STUDIES = (*MAIN, ABLATION, RKV)

HARD = Study("sum", "SnapKV, coarse", (24,), (DENSE, NAIVE, REPLAY), HARSH)
MILD = Study("sum", "SnapKV", (34,), (PAPER,), HARSH)
SHORT = (HARD, MILD)


def planned(seeds: Iterable[int], scale: Scale, folder: Path, studies: Sequence[Study] = STUDIES) -> list[Run]:
    """Every run once, seed after seed, so that an early stop leaves whole seeds."""
    runs: dict[Path, Run] = {}
    for seed in seeds:
        for study in studies:
            for run in study.runs(seed, scale, folder):
                runs.setdefault(run.folder, run)
    return list(runs.values())
