"""The real model on a GPU: does it learn to tell stories there, to the last step and its evaluation?

    python -m benchmarks.gpu.real --split build/gpu                   # where there is a network: its file, in halves
    python -m benchmarks.gpu.real [--state build/gpu] [--save benchmarks/results]

Training is `sparse-rl fit` with configs/real.yaml: SmolLM2 with an adapter, whose products are joined with the layers',
decode steps from CUDA graphs, which are required. A few steps follow whose activations are offloaded to the host.
"""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.gpu.learning import fit, table_of
from examples.models import MODELS, checked, gguf_file
from sparse_rl_lightning.cli.training import import_gguf
from sparse_rl_lightning.policies.tiny import TinyPolicy
from sparse_rl_lightning.report.record import SUMMARY

MODEL = "smollm2-135m-instruct"
HALVES = ("real-a", "real-b")  # folders, so that each of two calls carries one
FEW = ("--trainer.max_steps=2", "--data.num_val=8", "--model.sampling.max_completion_length=8")
VALIDATED = ("--trainer.limit_val_batches=1", "--trainer.val_check_interval=20")
OFFLOAD = ("--trainer.max_steps=4", "--model.learner.gradient_checkpointing=offload")


def split(state: Path) -> None:
    """Put the halves of the publisher's file into folders."""
    state.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=state) as scratch:
        whole = gguf_file(MODEL, Path(scratch)).read_bytes()
    middle = len(whole) // 2
    for name, half in zip(HALVES, (whole[:middle], whole[middle:]), strict=True):
        (state / name).mkdir(exist_ok=True)
        (state / name / "half").write_bytes(half)
        print(f"{state / name}: {len(half) / 2**20:.1f} MiB")


def make_policy(folder: Path, state: Path, device: str) -> None:
    """The policy from both halves; in a rehearsal a tiny one."""
    if (folder / "config.json").is_file():
        return
    if device == "cpu":
        for saved in TinyPolicy(alphabet=string.printable, max_position_embeddings=256).load():
            saved.save_pretrained(folder)
        return
    whole = state / "real.gguf"
    whole.write_bytes(b"".join((state / name / "half").read_bytes() for name in HALVES))
    import_gguf.main([str(checked(MODELS[MODEL], whole)), str(folder)])


def main() -> None:
    """Train twice, and keep what it came to after each."""
    parser = options.parser(__doc__, "gpu-real.md", device="cuda", quick=True)
    parser.add_argument("--state", type=Path, default=Path("build/gpu"), help="folder of halves and runs")
    parser.add_argument("--split", type=Path, metavar="FOLDER", help="fetch the model instead, into halves below it")
    args = options.parsed(parser)
    if args.split:
        split(args.split)
        return
    folder = args.state.absolute() / f"real-{args.device}"
    policy = folder / "policy"
    make_policy(policy, args.state.absolute(), args.device)
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
