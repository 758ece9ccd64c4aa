"""The runs of the comparison: which configuration, with what changed, and the command line that does it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from benchmarks import ROOT
from benchmarks.common.code import code_of, identity
from benchmarks.common.pages import say
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.files import write_whole

CONFIGS = ROOT / "configs"
DRAWN = "experiments.learned_eviction.drawn.Drawn"
CODE = "code.txt"  # in a run's folder: which code it was begun with
ANY_CALLBACK = str | dict[str, Any]


class Seeded(Protocol):
    """A study in several seeds."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Its seeds."""


S = TypeVar("S", bound=Seeded)


@dataclass(frozen=True)
class Arm:
    """A shipped configuration with callbacks added and options changed."""

    label: str
    config: str
    callbacks: Sequence[ANY_CALLBACK] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of the model
    temperature: float | None = None  # evictions are drawn

    @property
    def evicts(self) -> bool:
        """Whether the rollouts run under a budget."""
        return Path(self.config).name != "dense"

    def samples_with(self, compressor: dict[str, Any]) -> dict[str, Any]:
        """The compressor of its rollouts, made of the method that all arms have."""
        if self.temperature is None:
            return compressor
        return {"class_path": DRAWN, "init_args": {"compressor": compressor, "temperature": self.temperature}}


_UNBOUNDED: tuple[ANY_CALLBACK, ...] = ("SparsityAwareRejection", "ImportanceReweighting")
CAPPED = {"class_path": "ImportanceReweighting", "init_args": {"clip_max": 1.5}}

DENSE, NAIVE = Arm("dense", "dense"), Arm("naive", "naive")
PAPER, REPLAY = Arm("Sparse-RL (paper)", "sparse_rl_paper"), Arm("replay", "replay")
ARMS = (DENSE, NAIVE, PAPER, REPLAY)
CORRECTIONS = (
    NAIVE,
    PAPER,
    Arm("Sparse-RL", "naive", ("SparsityAwareRejection", CAPPED)),
    Arm("Sparse-RL (official)", "sparse_rl_official"),
    Arm("SparsityAwareRejection", "naive", ("SparsityAwareRejection",)),
    *(
        Arm(name, "naive", (name,))
        for name in ("TIS", "IcePop", "SequenceTIS", "GeometricTIS", "SequenceMIS", "SequenceMaskTIS", "CIS")
    ),
    Arm("MIS", "naive", ("MIS",), {"loss.denominator": "kept_tokens"}),
    Arm("off-policy masking", "naive", (), {"loss.off_policy_delta": 1e-4}),
    REPLAY,
    Arm("replay, mixed with Sparse-RL (paper)", "replay", _UNBOUNDED, {"replay_objective": "mixed"}),
    DENSE,
)


def quickstarts_compressor() -> dict[str, Any]:
    """The compressor of the quickstart."""
    config = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text(encoding="utf-8"))
    own: dict[str, Any] = config["model"]["init_args"]["compressor"]
    return own


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    policy: str  # a folder, or TinyPolicy
    folder: Path
    budgets: tuple[int, ...]
    steps: int
    every_n_rollouts: int = 20
    num_problems: int = 256
    problems_seed: int | None = None  # of problems that do not depend on the run's seed
    threads: int = 2
    method: dict[str, Any] = field(default_factory=quickstarts_compressor)  # its budget is replaced
    options: dict[str, Any] = field(default_factory=dict)  # of the command line
    callbacks: Sequence[ANY_CALLBACK] = ()
    judge: Mapping[str, str] = field(default_factory=dict)  # the course's reward, if it is not that of arithmetic

    def compressor(self, budget: int) -> dict[str, Any]:
        """The compressor with a budget."""
        return {**self.method, "init_args": {**self.method["init_args"], "budget": budget}}


def run_in(folder: Path, command: Sequence[str]) -> int:
    """A command line of this checkout in a folder, what it prints in ``log.txt`` there; its exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        return subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode


@dataclass(frozen=True)
class Run:
    """An arm under a budget; one without eviction is evaluated under all of them."""

    arm: Arm
    budget: int | None
    seed: int
    settings: Settings

    @property
    def is_on_gpu(self) -> bool:
        """Whether it trains on a GPU."""
        return self.settings.options.get("trainer.accelerator") == "gpu"

    @property
    def budgets(self) -> tuple[int, ...]:
        """What the policy is evaluated under, the full cache apart."""
        return self.settings.budgets if self.budget is None else (self.budget,)

    @property
    def folder(self) -> Path:
        """Where it writes, told apart by arm, budgets, steps and seed alone; for other settings give another."""
        name = re.sub(r"[^a-z0-9.]+", "-", self.arm.label.lower()).strip("-")
        budgets = "-".join(map(str, self.budgets)) or "full"
        return self.settings.folder / f"{name}-budget-{budgets}-steps-{self.settings.steps}-seed-{self.seed}"

    @cached_property
    def code(self) -> str:
        """Of its configuration and the rewards, tasks and compressors that it names: with others it is another run."""
        config = read_file(CONFIGS / f"{self.arm.config}.yaml")
        told = [yaml.safe_load(word.partition("=")[2]) for word in self.command() if word.startswith("--")]
        return identity({"config": config, "code": code_of(config, told)})

    @property
    def is_finished(self) -> bool:
        """Whether its numbers are there, of this code; they are written last."""
        return (self.folder / "course.json").is_file() and self._has_this_code

    @property
    def _has_this_code(self) -> bool:
        noted = self.folder / CODE
        return noted.is_file() and noted.read_text(encoding="utf-8") == self.code

    @property
    def checkpoint(self) -> Path:
        """What an interrupted run goes on from."""
        return self.folder / "checkpoints" / "last.ckpt"

    def command(self) -> list[str]:
        """The command line, for a process that runs in :attr:`folder`."""
        settings = self.settings
        course = {
            "class_path": "experiments.arms.course.Course",
            "init_args": {
                "compressors": [settings.compressor(budget) for budget in self.budgets],
                "every_n_rollouts": settings.every_n_rollouts,
                "num_problems": settings.num_problems,
                "problems_seed": settings.problems_seed,
                **settings.judge,
            },
        }
        model = {
            "policy": settings.policy,
            "sampling.seed": self.seed,
            "lr_scheduler.init_args.total_iters": settings.steps,
        }
        if self.budget is not None:
            model["compressor"] = json.dumps(self.arm.samples_with(settings.compressor(self.budget)))
        options = {
            "num_threads": settings.threads,
            "seed_everything": self.seed,
            "trainer.default_root_dir": ".",
            "trainer.max_steps": settings.steps,
            **{f"model.init_args.{name}": value for name, value in (model | self.arm.options).items()},
            **settings.options,
        }
        command = [sys.executable, "-m", "sparse_rl_lightning", "fit", f"--config={CONFIGS / self.arm.config}.yaml"]
        command += [f"--{name}={value}" for name, value in options.items()]
        for callback in (*self.arm.callbacks, *settings.callbacks, course):
            spelled = callback if isinstance(callback, dict) else {"class_path": callback}
            command.append(f"--trainer.callbacks+={json.dumps(spelled)}")
        if self.checkpoint.is_file():
            command.append("--ckpt_path=last")
        return command

    def execute(self) -> bool:
        """Run to the end unless it has, from the last checkpoint of an interrupted run; whether it got there.

        What other code has left, or a version that noted none, is put aside.
        """
        if self.folder.exists() and not self._has_this_code:
            places = (self.folder.with_name(f"{self.folder.name}~{number}") for number in count(1))
            aside = next(place for place in places if not place.exists())
            say(f"{self.folder.name}: its configuration or code has changed; it is run anew, was {aside.name}")
            self.folder.rename(aside)
        if not self.is_finished:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / CODE, self.code)
            run_in(self.folder, self.command())
        return self.is_finished


def in_order(studies: Iterable[S], runs_of: Callable[[S, int], list[Run]], seeds: Iterable[int] | None) -> list[Run]:
    """Every run once, in all seeds or in these alone; seed after seed, so that an early stop leaves whole ones."""
    wanted = None if seeds is None else set(seeds)
    found: dict[Path, Run] = {}
    for seed, study in sorted(((seed, own) for own in studies for seed in own.seeds), key=lambda pair: pair[0]):
        if wanted is None or seed in wanted:
            for run in runs_of(study, seed):
                found.setdefault(run.folder, run)
    return list(found.values())


def planned(settings: Settings, seeds: Sequence[int], corrections_under: int) -> list[Run]:
    """Every run once: the arms, the last budget first, then the corrections under one of the budgets."""
    runs = []
    for seed in seeds:
        runs += [Run(arm, None, seed, settings) for arm in ARMS if not arm.evicts]
        runs += [Run(arm, b, seed, settings) for b in settings.budgets[::-1] for arm in ARMS if arm.evicts]
    for seed in seeds:
        rest = [arm for arm in CORRECTIONS if arm not in ARMS]
        runs += [Run(arm, corrections_under, seed, settings) for arm in rest]
    return runs
