"""Mathematics on a GPU: accuracy against minutes and gigabytes, with the full cache and under R-KV.

    python -m benchmarks.gpu.mathematics [--state build/gpu] [--save benchmarks/results]

Joins the pieces of the model, and runs ``experiments.math --studies card`` from it, one run after the other, so that
each has the card to itself. Their lines are gpu-math.jsonl.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.common import options
from benchmarks.gpu.carried import policy_of


def main() -> None:
    """Run what is not finished; on a CPU only see that the command is understood."""
    parser = options.parser(__doc__, "gpu-math.jsonl", device="cuda")
    parser.add_argument("--state", type=Path, default=Path("build/gpu"), help="folder of pieces and runs")
    args = options.parsed(parser)
    state = args.state.absolute()
    told = {
        "studies": "card", "device": "gpu", "jobs": 1, "policy": policy_of("math", state, args.device),
        "runs": state / "math", "kept": (args.save or state).absolute() / "gpu-math.jsonl",
    }  # fmt: skip
    command = [sys.executable, "-m", "experiments.math", *(f"--{name}={value}" for name, value in told.items())]
    sys.exit(subprocess.run([*command, *["--help"] * (args.device == "cpu")]).returncode)


if __name__ == "__main__":
    main()
