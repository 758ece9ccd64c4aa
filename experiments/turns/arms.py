"""What ``experiments.turns`` runs: ``configs/tools.yaml`` with one thing changed per arm, as a file of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.code import code_of
from benchmarks.common.kept import known_as
from experiments.arms.runs import CONFIGS, run_in
from sparse_rl_lightning.cli.yaml_files import merged, read_file

METRICS = (
    "reward", "rejection_rate", "kv/evicted/prompt", "kv/evicted/drawn", "kv/evicted/given",
    "mismatch/kl_k3/first_turn", "mismatch/kl_k3/later_turns",
)  # fmt: skip
CORRECTIONS = ("SparsityAwareRejection", "ImportanceReweighting")


@dataclass(frozen=True)
class Arm:
    """An arm: what its model's arguments change, and whether it corrects."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    corrects: bool = False
    module: str = "SparseGRPO"
    protects: str = ""


LONGEST = 17  # tokens of an answer of Calculator: a value and what is left to do, "1798-58-88-42*01;"


def _protecting(name: str, **arguments: Any) -> Arm:
    limit = {"rollout": {"turns": {"max_observation_length": LONGEST}}} if "protect_observations" in arguments else {}
    changed = {"compressor": {"init_args": arguments}, **limit}
    return Arm(f"Sparse-RL, {name} protected", changed, corrects=True, protects=name)


ARMS = (
    Arm("dense", {"compressor": {"class_path": "FullKV"}}),
    Arm("naive"),
    Arm("Sparse-RL", corrects=True),
    Arm("replay", {"replay_objective": "sparse"}, module="ReplayGRPO"),
    _protecting("prompt", protect_prompt=True),
    _protecting("newest observation", protect_observations=1),
)


def configured() -> dict[str, Any]:
    """The compressor of ``tools.yaml``."""
    found: dict[str, Any] = read_file(CONFIGS / "tools.yaml")["model"]["init_args"]["compressor"]
    return found


@dataclass(frozen=True)
class Run:
    """One arm from one seed: its prompts, their order and every draw."""

    arm: Arm
    seed: int
    steps: int
    policy: Path
    folder: Path
    budget: int | None = None  # another than that of the configuration
    num_problems: int = 256

    @property
    def key(self) -> str:
        """Name of its line and of its folder."""
        budget = "" if self.budget is None else f"-budget-{self.budget}"
        return f"{self.arm.name.lower().replace(',', '').replace(' ', '-')}{budget}-seed-{self.seed}"

    @property
    def compressor(self) -> dict[str, Any]:
        """The compressor of the arms that protect nothing."""
        return configured() if self.budget is None else merged(configured(), {"init_args": {"budget": self.budget}})

    def config(self) -> dict[str, Any]:
        """The whole configuration: that of ``tools.yaml``, with the module, the callbacks and what the arm changes."""
        config: dict[str, Any] = read_file(CONFIGS / "tools.yaml")
        model, trainer = merged(config["model"], {"class_path": "SparseGRPO"}), config["trainer"]
        callbacks = read_file(CONFIGS / "quickstart.yaml")["trainer"]["callbacks"]
        plain = model["init_args"]["compressor"] = self.compressor
        own = merged(model, {"class_path": self.arm.module, "init_args": self.arm.arguments})
        own["init_args"] |= {"policy": str(self.policy)}
        own["init_args"]["sampling"]["seed"] = self.seed
        own["init_args"]["lr_scheduler"]["init_args"]["total_iters"] = self.steps
        compared = plain if self.arm.name == "dense" else own["init_args"]["compressor"]
        kept = [c for c in callbacks if self.arm.corrects or c["class_path"] not in CORRECTIONS]
        ending = {
            "class_path": "experiments.turns.ending.Ending",
            "init_args": {"compressor": compared, "num_problems": self.num_problems},
        }
        config["trainer"] = {**trainer, "default_root_dir": ".", "max_steps": self.steps, "callbacks": [*kept, ending]}
        config["data"]["init_args"]["seed"] = 1 + self.seed
        return {**config, "model": own, "seed_everything": self.seed, "num_threads": 1}

    @cached_property
    def settings(self) -> str:
        """Twelve characters that change with the configuration, but for where the policy lies."""
        config = self.config()
        config["model"]["init_args"]["policy"] = None
        return hashlib.sha256(known_as(json.dumps(config, sort_keys=True)).encode()).hexdigest()[:12]

    @cached_property
    def code(self) -> str:
        """Of the rewards, tasks, environments and compressors that the configuration names."""
        return code_of(self.config())

    def execute(self) -> dict[str, Any] | None:
        """Run to the end, from the last checkpoint of an interrupted run; what it came to, None if it stopped."""
        own = self.folder / self.key / self.settings / self.code
        own.mkdir(parents=True, exist_ok=True)
        (own / "run.yaml").write_text(yaml.safe_dump(self.config(), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "sparse_rl_lightning", "fit", "--config=run.yaml"]
        if (own / "checkpoints" / "last.ckpt").is_file():
            command.append("--ckpt_path=last")
        end = own / "ending.json"
        if not end.is_file():
            run_in(own, command)
        found: dict[str, Any] | None = json.loads(end.read_text(encoding="utf-8")) if end.is_file() else None
        return found
