"""The tail of the acceptance before and after DistillSparse, under one schedule and on the same held-out prompts.

    python -m experiments.distill [--steps 480] [--threads 2] [--quick] [--save docs/measured]

Every run is `configs/distill.yaml` with a schedule in place of its budget, and with what the adapter learns from
changed. Its policy is measured three times: as it was at the start, as it is at the end without its adapter, and with
it. Only the last two tell what the adapter does, because training moves the policy too. The vocabulary is small, so the
acceptance is exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.common.pages import insert, machine, mark, say
from benchmarks.common.tables import Table
from sparse_rl_lightning.acceptance import AcceptanceTail, rollout_acceptance
from sparse_rl_lightning.cli import main as cli
from sparse_rl_lightning.modules import DistillSparse
from sparse_rl_lightning.rollout import SamplingParams

POLICY = ROOT / "runs" / "warmup" / "policy"
BEGIN = mark("experiments.distill")
SCHEDULE = {"class_path": "LengthSchedule", "init_args": {"starts": [0, 32, 40], "budgets": [22, 26, 30]}}
VARIANTS: dict[str, dict[str, Any]] = {
    "policy gradient + 0.001 KL (Sparrow)": {"kl_coef": 0.001, "policy_gradient": True},
    "KL alone": {"kl_coef": 1.0, "policy_gradient": False},
}


@dataclass(frozen=True)
class Sizes:
    """How much is trained and measured."""

    policy: str
    steps: int
    num_prompts: int
    threads: int


@dataclass(frozen=True)
class Tail:
    """Acceptance of a policy's rollouts."""

    p05: float
    mean: float
    near_one: float
    tokens: int

    def cells(self) -> tuple[str, ...]:
        """Cells of a row of the table."""
        return f"{self.p05:.3f}", f"{self.mean:.4f}", f"{self.near_one:.3f}", f"{self.tokens:,}"


@torch.no_grad()
def measure(module: DistillSparse, rows: list[dict[str, Any]], adapted: bool) -> Tail:
    """The acceptance of rollouts under the module's compressor, with or without the adapter."""
    sampler = module.generator.sampler()
    vocabulary = int(module.policy.config.vocab_size)
    params = SamplingParams(
        num_generations=4,
        max_completion_length=module.generator.sampling.max_completion_length,
        top_logprobs=vocabulary,
        seed=1,
    )
    with module.adapter_on() if adapted else nullcontext():
        rollout = sampler.generate(module.generator.encode(rows), params)
    lower, _ = rollout_acceptance(module.policy.eval(), rollout)
    found = AcceptanceTail.of(lower, rollout.completion_mask)
    return Tail(found.overall, found.mean, found.near_one, sum(found.tokens.values()))


def train(sizes: Sizes, folder: Path, adapter: dict[str, Any]) -> Iterator[tuple[str, Tail]]:
    """Tails before and after a fit."""
    arguments = {
        "num_threads": sizes.threads, "model.init_args.policy": sizes.policy,
        "model.init_args.compressor.init_args.budget": json.dumps(SCHEDULE),
        "model.init_args.lr_scheduler.init_args.total_iters": sizes.steps,
        **{f"model.init_args.adapter.{name}": value for name, value in adapter.items()},
        "data.init_args.num_val": sizes.num_prompts, "trainer.default_root_dir": folder,
    }  # fmt: skip
    config = f"--config={ROOT / 'configs' / 'distill.yaml'}"

    def fit(steps: int) -> tuple[DistillSparse, list[dict[str, Any]]]:
        options = [f"--{name}={value}" for name, value in arguments.items()]
        run = cli(["fit", config, *options, f"--trainer.max_steps={steps}", "--trainer.callbacks=null",
                   "--trainer.enable_checkpointing=false", "--trainer.logger=false"])  # fmt: skip
        return run.model, run.datamodule.val_rows()

    module, rows = fit(0)
    module.configure_model()
    yield "before", measure(module, rows, adapted=True)
    module, rows = fit(sizes.steps)
    yield "after, without the adapter", measure(module, rows, adapted=False)
    yield "after, with the adapter", measure(module, rows, adapted=True)


def results(sizes: Sizes) -> Table:
    """One row for every measurement."""
    note = (
        f"{machine('cpu')}. {sizes.steps} optimizer steps of `configs/distill.yaml`, half of them the adapter's, R-KV "
        f"with budgets {SCHEDULE['init_args']['budgets']} from {SCHEDULE['init_args']['starts']} tokens on; "
        f"{sizes.num_prompts} held-out problems x 4 samples. Acceptance exact, of the policy as it is at that time."
    )
    header = ("the adapter learns from", "policy", "5th percentile", "mean", "share > 0.999", "tokens")
    table = Table("The tail before and after DistillSparse", header, note)
    for name, adapter in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            for state, tail in train(sizes, Path(folder), adapter):
                say(f"{name}, {state}: {tail}")
                table.add(name, state, *tail.cells())
    return table


def main() -> None:
    """Train, measure, and print or save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=480, help="optimizer steps, half of them the adapter's")
    parser.add_argument("--policy", type=Path, default=POLICY, help="the policy that all runs start from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="random weights, a few steps: numbers without meaning")
    parser.add_argument("--save", type=Path, help="folder of sparrow.md")
    args = parser.parse_args()
    if not args.quick and not (args.policy / "config.json").is_file():
        sys.exit(f"error: no policy in {args.policy}: run sparse-rl fit --config configs/warmup.yaml, or give --policy")
    torch.set_num_threads(args.threads)
    policy = json.dumps({"class_path": "TinyPolicy"}) if args.quick else str(args.policy.absolute())
    text = str(results(Sizes(policy, 4 if args.quick else args.steps, 4 if args.quick else 128, args.threads)))
    print(text)
    if args.save:
        insert(args.save / "sparrow.md", text, BEGIN)


if __name__ == "__main__":
    main()
