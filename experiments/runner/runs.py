"""A run of a study: which configuration, with what changed, and the command line that does it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT
from benchmarks.common import kept
from benchmarks.common.code import code_of, identity
from benchmarks.common.pages import say
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.files import write_whole

CONFIGS = ROOT / "configs"
DRAWN = "experiments.learned_eviction.drawn.Drawn"
CODE = "code.txt"  # in a run's folder: which code it was begun with
NOTES = "course.json"  # there too: what a notebook noted along the run, written last
CLI = [sys.executable, "-m", "sparse_rl_lightning"]
ANY_CALLBACK = str | dict[str, Any]


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


CAPPED = {"class_path": "ImportanceReweighting", "init_args": {"clip_max": 1.5}}
DENSE, NAIVE = Arm("dense", "dense"), Arm("naive", "naive")
PAPER, REPLAY = Arm("Sparse-RL (paper)", "sparse_rl_paper"), Arm("replay", "replay")
SPARSE_RL = Arm("Sparse-RL", "naive", ("SparsityAwareRejection", CAPPED))
CENTERING = Arm("centering", "naive", ("ScoreCentering",))
CENTERING_AND_WEIGHTS = Arm("centering and weights", "naive", ("ScoreCentering", CAPPED))
OFFICIAL = Arm("Sparse-RL (official)", "sparse_rl_official")


@dataclass(frozen=True)
class Settings:
    """What all runs of a study have in common."""

    policy: str  # a folder, or a class of policies
    folder: Path
    budgets: tuple[int, ...]
    steps: int
    method: dict[str, Any]  # its budget is added
    every_n_rollouts: int = 20
    num_problems: int = 256
    problems_seed: int | None = None  # of problems that do not depend on the run's seed
    options: Mapping[str, Any] = field(default_factory=dict)  # of the command line
    callbacks: Sequence[ANY_CALLBACK] = ()
    judge: Mapping[str, str] = field(default_factory=dict)  # the course's reward, if it is not that of arithmetic
    notebook: dict[str, Any] | None = None  # another one than the course
    apart: str = ""  # the ending of the file of its lines' name

    def compressor(self, budget: int) -> dict[str, Any]:
        """The compressor with a budget."""
        return {**self.method, "init_args": {**self.method["init_args"], "budget": budget}}

    def course(self, budgets: Sequence[int]) -> dict[str, Any]:
        """The notebook of what a run comes to under some budgets."""
        arguments = {
            "compressors": [self.compressor(budget) for budget in budgets],
            "every_n_rollouts": self.every_n_rollouts,
            "num_problems": self.num_problems,
            "problems_seed": self.problems_seed,
            **self.judge,
        }
        return {"class_path": "experiments.runner.course.Course", "init_args": arguments}


def run_in(folder: Path, command: Sequence[str]) -> int:
    """A command line of this checkout in a folder, what it prints in ``log.txt`` there; its exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        return subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode


def warmed(folder: Path, config: str) -> Path:
    """Where a warm-up that runs in a folder leaves its policy."""
    return folder / "runs" / config / "policy"


def warm_up(folder: Path, config: str) -> None:
    """Train the policy that runs start from, where it is not there yet."""
    if not (warmed(folder, config) / "config.json").is_file():
        say(f"warm-up: {config}")
        supervise(folder, CONFIGS / f"{config}.yaml")


def supervise(folder: Path, config: Path, words: Sequence[str] = ()) -> None:
    """Run a warm-up in a folder, or end with a message where it stops; ``words`` are of its command line."""
    quietly = ("--trainer.enable_progress_bar=false", "--num_threads=1")
    if run_in(folder, [*CLI, "fit", f"--config={config}", *words, *quietly]):
        sys.exit(f"error: the warm-up stopped, see {folder / 'log.txt'}")


def hashed(text: str) -> str:
    """Twelve characters that change with the text, whose classes have the names that results are kept under."""
    return hashlib.sha256(kept.known_as(text).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Run:
    """An arm under a budget; one without eviction is evaluated under all of them."""

    arm: Arm
    budget: int | None
    seed: int
    settings: Settings

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

    @property
    def key(self) -> str:
        """The name of its line: that of the study's folder and its own."""
        return f"{self.settings.folder.name}/{self.folder.name}"

    @property
    def settings_hash(self) -> str:
        """Of what it is told, but for where it runs and what it is resumed from."""
        words = [word for word in self.command()[1:] if not word.startswith("--ckpt_path")]
        for folder in sorted((str(ROOT), str(self.settings.folder.parent)), key=len, reverse=True):
            words = [word.replace(folder, "") for word in words]
        return hashed("\n".join(words))

    @cached_property
    def code(self) -> str:
        """Of its configuration and the rewards, tasks and compressors that it names: with others it is another run."""
        config = read_file(CONFIGS / f"{self.arm.config}.yaml")
        values = [yaml.safe_load(word.partition("=")[2]) for word in self.command() if word.startswith("--")]
        return identity({"config": config, "code": code_of(config, values)})

    @property
    def start(self) -> str:
        """Of the weights of the policy it starts from; empty where they are no files."""
        policy = self.settings.policy
        folder = json.loads(policy)["init_args"]["policy"] if policy.startswith("{") else policy
        return _digest_of(tuple(sorted(Path(folder).glob("*.safetensors"))))

    @property
    def is_finished(self) -> bool:
        """Whether its numbers are there, of this code; they are written last."""
        return (self.folder / NOTES).is_file() and self._has_this_code

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
        model = {
            "policy": settings.policy,
            "sampling.seed": self.seed,
            "lr_scheduler.init_args.total_iters": settings.steps,
        }
        if self.budget is not None:
            model["compressor"] = json.dumps(self.arm.samples_with(settings.compressor(self.budget)))
        options = {
            "num_threads": 1,
            "seed_everything": self.seed,
            "trainer.default_root_dir": ".",
            "trainer.max_steps": settings.steps,
            **{f"model.init_args.{name}": value for name, value in (model | self.arm.options).items()},
            **settings.options,
        }
        notebook = settings.notebook or settings.course(self.budgets)
        command = [*CLI, "fit", f"--config={CONFIGS / self.arm.config}.yaml"]
        command += [f"--{name}={value}" for name, value in options.items()]
        for callback in (*self.arm.callbacks, *settings.callbacks, notebook):
            spelled = callback if isinstance(callback, dict) else {"class_path": callback}
            command.append(f"--trainer.callbacks+={json.dumps(spelled)}")
        return command + ["--ckpt_path=last"] * self.checkpoint.is_file()

    def execute(self) -> bool:
        """Run to the end unless it has, from the last checkpoint of an interrupted run; whether it got there.

        What other code has left, or a version that noted none, is put aside.
        """
        if self.folder.exists() and not self._has_this_code:
            places = (self.folder.with_name(f"{self.folder.name}~{number}") for number in count(1))
            aside = next(folder for folder in places if not folder.exists())
            say(f"{self.folder.name}: its configuration or code has changed; it is run anew, was {aside.name}")
            self.folder.rename(aside)
        if not self.is_finished:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / CODE, self.code)
            run_in(self.folder, self.command())
        return self.is_finished


@cache
def _digest_of(files: tuple[Path, ...]) -> str:
    weights = hashlib.sha256()
    for file in files:
        weights.update(file.read_bytes())
    return weights.hexdigest()[:12] if files else ""
