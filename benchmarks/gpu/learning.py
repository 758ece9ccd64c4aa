"""The quickstart on a GPU: does training there learn what it learns on a CPU?

    python -m benchmarks.gpu.learning [--state build/gpu] [--save benchmarks/results]

Warm-up and training are `sparse-rl fit` with the shipped configurations, decode steps from CUDA graphs, which are
required. It fails unless the accuracy with the full cache has risen by more than three standard errors. A few steps in
16 bits follow, which need not learn.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.common.tables import Table
from experiments.runner.runs import CONFIGS, run_in
from sparse_rl_lightning.report.record import SUMMARY

ERRORS = 3  # standard errors of a difference of two accuracies
FEW = ("--trainer.max_steps=4", "--data.num_val=8", "--data.num_train=1000")
HALF = ("--trainer.precision=bf16-mixed", "--trainer.max_steps=24", "--trainer.default_root_dir=runs/bf16")


def fit(folder: Path, config: str, device: str, *options: str) -> None:
    """Train with a configuration in this folder."""
    where = [f"--trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}", "--trainer.devices=1"]
    command = [sys.executable, "-m", "sparse_rl_lightning", "fit", f"--config={CONFIGS / config}.yaml", *where]
    if run_in(folder, [*command, *options]):
        sys.exit(f"{config} stopped:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-2000:]}")


def rise(before: float, after: float, problems: int) -> float:
    """The difference of two accuracies in its standard errors."""
    error = math.sqrt(sum(p * (1 - p) / problems for p in (before, after)))
    return (after - before) / max(error, 1e-9)


def table_of(summary: Mapping[str, Any], title: str, judged: str) -> Table:
    """What a run came to, by the greedy mean of what is judged."""
    note = (
        f"{summary['rollouts']} rollouts, {summary['optimizer_steps']} optimizer steps in "
        f"{summary['wall_time_seconds']:.0f} s, {summary['tokens_per_second']:,.0f} tokens/s in rollouts; "
        f"{summary['held_out_problems']} held-out problems."
    )
    table = Table(title, (f"greedy {judged}", "before", "after"), note)
    for name, cache in (("dense", "full cache"), ("sparse", "compressed cache")):
        table.add(cache, *(f"{summary[when][name]:.3f}" for when in ("before", "after")))
    return table


def main() -> None:
    """Warm up, train, judge."""
    parser = options.parser(__doc__, "gpu-train.md", device="cuda", quick=True)
    parser.add_argument("--state", type=Path, default=Path("build/gpu"), help="folder of the runs")
    args = options.parsed(parser)
    folder = args.state.absolute() / f"learning-{args.device}"
    for run in ("quickstart", "bf16"):
        shutil.rmtree(folder / "runs" / run, ignore_errors=True)
    short = FEW if args.quick else ()
    if not (folder / "runs/warmup/policy/config.json").is_file():
        fit(folder, "warmup", args.device, "--trainer.enable_progress_bar=false", *short)
    graphs = ["--model.rollout.cuda_graphs=require"] if args.device == "cuda" else []
    text, summaries = machine(args.device), dict[str, Any]()
    for run, changes in {"quickstart": (), "bf16": HALF}.items():
        fit(folder, "quickstart", args.device, *graphs, *changes, *short)
        summaries[run] = json.loads((folder / "runs" / run / SUMMARY).read_text(encoding="utf-8"))["summary"]
        text += f"\n\n{table_of(summaries[run], f'The quickstart on the device, run {run}', 'accuracy')}"
        save(args.save, "gpu-train", "benchmarks.gpu.learning", text)
    print(text)
    judged = summaries["quickstart"]
    risen = rise(judged["before"]["dense"], judged["after"]["dense"], judged["held_out_problems"])
    print(f"\nThe accuracy with the full cache rose by {risen:.1f} standard errors.")
    sys.exit(risen <= ERRORS and not args.quick)


if __name__ == "__main__":
    main()
