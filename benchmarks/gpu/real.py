"""The real model on a GPU: does it learn to tell stories there, to the last step and its evaluation?

    python -m benchmarks.gpu.real [--state build/gpu] [--save benchmarks/results]

Training is `sparse-rl fit` with configs/real.yaml: SmolLM2 with an adapter, whose products are joined with the layers',
decode steps from CUDA graphs, which are required. A few steps follow whose activations are offloaded to the host.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.gpu.carried import policy_of
from benchmarks.gpu.learning import fit, table_of
from sparse_rl_lightning.report.record import SUMMARY

FEW = ("--trainer.max_steps=2", "--data.num_val=8", "--model.sampling.max_completion_length=8")
VALIDATED = ("--trainer.limit_val_batches=1", "--trainer.val_check_interval=20")
OFFLOAD = ("--trainer.max_steps=4", "--model.learner.gradient_checkpointing=offload")


def main() -> None:
    """Train twice, and keep what it came to after each."""
    parser = options.parser(__doc__, "gpu-real.md", device="cuda", quick=True)
    parser.add_argument(
        "--state", type=Path, default=Path("build/gpu"), help="folder of the model's pieces and of runs"
    )
    args = options.parsed(parser)
    policy = policy_of("real", args.state.absolute(), args.device)
    folder = policy.parent
    graphs = ["--model.rollout.cuda_graphs=require"] if args.device == "cuda" else []
    text = machine(args.device)
    for run, changes in {"real": (), "offloaded": OFFLOAD}.items():
        where = (f"--model.policy.policy={policy}", f"--trainer.default_root_dir=runs/{run}", *VALIDATED)
        shutil.rmtree(folder / "runs" / run, ignore_errors=True)
        fit(folder, "real", args.device, *graphs, *where, *changes, *(FEW if args.quick else ()))
        summary = json.loads((folder / "runs" / run / SUMMARY).read_text(encoding="utf-8"))["summary"]
        text += f"\n\n{table_of(summary, f'configs/real.yaml beside other programs, run {run}', 'reward')}"
        save(args.save, "gpu-real", "benchmarks.gpu.real", text)
    print(text)


if __name__ == "__main__":
    main()
