"""Hashes of what runs of the command line draw, log and learn: a change that claims to change nothing shows it by them.

``python tests/digests.py`` prints a line per run, with ``--against main~3`` beside those of that commit. They hold for
one machine: another one rounds otherwise.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback

ROOT = Path(__file__).parents[1]
NATIVE = "sparse_rl_lightning/_C.abi3.so"
TIMED = re.compile("time|seconds|per_second|memory|bytes")
"""Logged numbers that another run has otherwise."""

TWO_RANKS = {"trainer": {"devices": 2, "strategy": "sparse_rl_deepspeed_stage_3"}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # the configuration, and what is laid over it
    "quickstart": ("quickstart", {}),
    "dense": ("dense", {}),
    "ReplayGRPO": ("replay", {}),
    "DistillSparse": ("distill", {}),
    "retrieval": ("retrieval", {}),
    "conversation": ("tools", {"model": {"init_args": {"policy": {"init_args": {"alphabet": "0123456789+-*?;#!"}}}}}),
    "slots": ("quickstart", {"model": {"init_args": {"rollout": {"num_slots": 24}}}}),
    "partial rollouts": (
        "quickstart", {"model": {"init_args": {"rollout": {"num_slots": 64, "partial_rollout_steps": 16}}}},
    ),
    "ZeRO-3 on two ranks": ("quickstart", TWO_RANKS),
}  # fmt: skip


class Digest(RolloutCallback):
    """Appends a hash of every rollout's tensors to ``rollouts-RANK.txt``."""

    def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
        found = hashlib.sha256("".join(scored.completions).encode())
        for tensor in tensors(scored.rollout):
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        with Path(f"rollouts-{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{found.hexdigest()}\n")


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that an untrained policy earns, too."""
    return [sum(character.isdigit() for character in text) / len(text) if text else 0.0 for text in completions]


def tensors(value: Any) -> list[Tensor]:
    """All tensors inside a record, in its own order, whatever their names are."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [one for field in fields(value) for one in tensors(getattr(value, field.name))]
    if isinstance(value, dict):
        return [one for item in value.values() for one in tensors(item)]
    return [one for item in value for one in tensors(item)] if isinstance(value, list | tuple) else []


def hashed(*texts: str | bytes) -> str:
    """A short hash of texts."""
    parts = [one if isinstance(one, bytes) else one.encode() for one in texts]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def logged(path: Path) -> str:
    """What ``metrics.csv`` has, without what is timed."""
    rows = csv.DictReader(path.open(encoding="utf-8"))
    return "\n".join(",".join(f"{key}={row[key]}" for key in sorted(row) if not TIMED.search(key)) for row in rows)


def digest(name: str, library: Path) -> str:
    """One run of a checkout of the library, in an empty folder."""
    config, changes = RUNS[name]
    policy = {
        "class_path": "sparse_rl_lightning.policies.TinyPolicy",
        "init_args": {"hidden_size": 64, "max_position_embeddings": 256},
    }
    common: dict[str, Any] = {
        "num_threads": 1,
        "model": {"init_args": {"reward_funcs": ["digests.digits"], "policy": policy}},
        "data": {"init_args": {"num_train": 64, "num_val": 8, "prompts_per_rollout": 4}},
        "trainer": {
            "max_steps": 8, "default_root_dir": "run", "log_every_n_steps": 1,
            "callbacks+": [
                {"class_path": "digests.Digest"}, {"class_path": "ExportPolicy", "init_args": {"folder": "policy"}},
            ],
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(library / "configs", folder / "configs")
        shutil.copy(__file__, folder)
        (folder / "configs" / "all.yaml").write_text(yaml.safe_dump({"base": f"{config}.yaml", **common}))
        (folder / "configs" / "one.yaml").write_text(yaml.safe_dump({"base": "all.yaml", **changes}))
        paths = {"PYTHONPATH": f"{library}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "sparse_rl_lightning", "fit", "--config", "configs/one.yaml"]
        done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        drawn = [path.read_text() for path in sorted(folder.glob("rollouts-*.txt"))]
        (metrics,) = folder.rglob("metrics.csv")
        weights = [one.float().numpy().tobytes() for one in load_file(folder / "policy" / "model.safetensors").values()]
        return f"rollouts {hashed(*drawn)}, logged {hashed(logged(metrics))}, weights {hashed(*weights)}"


def main() -> None:
    """Print the digests, and what differs from another commit's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="run this commit too; it must have the same native sources")
    parser.add_argument("--runs", nargs="*", choices=RUNS, metavar="RUN", help=", ".join(RUNS))
    args = parser.parse_args()
    runs, differ = args.runs or list(RUNS), []
    with tempfile.TemporaryDirectory() as place:
        other = Path(place) / "other"
        if args.against:
            subprocess.run(["git", "worktree", "add", "-q", "--detach", other, args.against], cwd=ROOT, check=True)
            shutil.copy(ROOT / NATIVE, other / NATIVE)
        try:
            for name in runs:
                own = digest(name, ROOT)
                same = not args.against or own == digest(name, other)
                differ += [] if same else [name]
                print(f"{name}: {own}{'' if same else '   DIFFERS'}", flush=True)
        finally:
            if args.against:
                subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    sys.exit(f"These differ from {args.against}: {', '.join(differ)}" if differ else 0)


if __name__ == "__main__":
    main()
