"""What score centering costs a training step: the real model with and without it.

    python -m benchmarks.centering [--threads 2] [--rounds 3] [--top 128] [--dtype float32] [--save FOLDER]

Trainings by configs/real.yaml with bounded weights, one optimizer step per rollout, of which every other one has
`ScoreCentering` too, in processes of their own that take turns. A step is a rollout of 32 samples, its old log-probs,
the forward and backward pass, and the optimizer's; the first of each training does not count. The learner's part is
what follows the rollout, and its peak the resident memory of the process meanwhile. Ratios are medians over the rounds
of a training's medians.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks import REAL, ROOT
from benchmarks.common import options
from benchmarks.common.memory import forget_peak, resident_bytes
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table
from experiments.runner.runs import CAPPED
from sparse_rl_lightning.callbacks import RolloutCallback
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.records import ScoredRollout

TITLE = "Score centering"
WITHOUT, WITH = "weights ≤ 1.5", "and score centering"
WAYS = (WITHOUT, WITH)
CLOCK = {"class_path": "benchmarks.centering.Clock"}
FILE = "steps.json"
PRECISIONS = {"bfloat16": "bf16-mixed", "float32": "32-true"}
"""By the type of the weights."""


@dataclass(frozen=True)
class Step:
    """Seconds of a training step and of the learner's part of it, and resident bytes at the learner's peak."""

    seconds: float
    learner: float
    peak: int


class Clock(RolloutCallback):
    """Times the steps of a training with one micro-batch per rollout, and writes them when it ends."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step begins."""
        self.began = time.perf_counter()

    def on_rollout_drawn(self, trainer: Trainer, module: LightningModule, scored: ScoredRollout) -> None:
        """The learner begins."""
        forget_peak()
        self.drawn = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Both end."""
        now = time.perf_counter()
        self.steps.append(Step(now - self.began, now - self.drawn, resident_bytes(peak=True)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them."""
        write_whole(Path(trainer.default_root_dir) / FILE, json.dumps([asdict(step) for step in self.steps]))


def trained(policy: Path, top: int, steps: int, threads: int, dtype: str) -> Step:
    """The median step of a training in a process of its own; ``top`` 0 is without centering."""
    centering = [{"class_path": "ScoreCentering", "init_args": {"top": top}}] * bool(top)
    weights = {"class_path": "PretrainedPolicy", "init_args": {"path": str(policy), "dtype": dtype}}
    with tempfile.TemporaryDirectory() as folder:
        told = {
            "model.init_args.policy.init_args.policy": json.dumps(weights), "model.init_args.steps_per_generation": 1,
            "num_threads": threads, "trainer.max_steps": 1 + steps, "trainer.default_root_dir": folder,
            "trainer.precision": PRECISIONS[dtype],
            "trainer.callbacks": json.dumps([*centering, CAPPED, CLOCK]), "trainer.enable_checkpointing": "false",
        }  # fmt: skip
        command = [sys.executable, "-m", "sparse_rl_lightning", "fit", f"--config={ROOT / 'configs' / 'real.yaml'}"]
        command += [f"--{name}={value}" for name, value in told.items()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        counted = json.loads((Path(folder) / FILE).read_text())[1:]
    return Step(**{name: statistics.median(step[name] for step in counted) for name in counted[0]})


def cost_table(steps: dict[str, list[Step]], policy: str, top: int, dtype: str) -> Table:
    """Both trainings, and how many times as much the one with centering takes."""
    note = f"{policy} with LoRA, 32 samples of at most 96 tokens, top={top}, {dtype}; {len(steps[WITHOUT])} rounds."
    header = ("corrections", "step, s", "times", "learner, s", "times", "learner's peak, MiB", "times")
    table = Table(TITLE, header, note)
    for name, taken in steps.items():
        cells = []
        for field, scale in (("seconds", 1), ("learner", 1), ("peak", 2**20)):
            values, usual = ([getattr(step, field) / scale for step in some] for some in (taken, steps[WITHOUT]))
            ratios = [mine / theirs for mine, theirs in zip(values, usual, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [f"{statistics.median(values):,.1f}", spread]
        table.add(name, *cells)
    return table


def main() -> None:
    """Measure in turns, and print and save the table after every round."""
    parser = options.parser(__doc__, "centering-cpu.md", threads=2, rounds=3)
    parser.add_argument("--steps", type=int, default=4, help="of each training, behind the first")
    parser.add_argument("--top", type=int, default=128, help="most likely tokens")
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    parser.add_argument("--dtype", choices=PRECISIONS, default="bfloat16", help="float32 where that is emulated")
    args = options.parsed(parser)
    for name in ("top", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not (args.policy / "config.json").is_file():
        sys.exit(f"error: there is no model in {args.policy}: make real-model, or give --policy")
    steps: dict[str, list[Step]] = {name: [] for name in WAYS}
    for turn in range(args.rounds):
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            top = args.top * (name == WITH)
            steps[name].append(trained(args.policy.absolute(), top, args.steps, args.threads, args.dtype))
            say(f"round {turn + 1}, {name}: {steps[name][-1]}")
        page = f"{machine('cpu')}\n\n{cost_table(steps, args.policy.name, args.top, args.dtype)}"
        save(args.save, "centering-cpu", "benchmarks.centering", page)
    print(page)


if __name__ == "__main__":
    main()
