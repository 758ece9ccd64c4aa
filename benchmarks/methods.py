"""Runs ``sparse-rl benchmark`` over every compressor on the quickstart's policy, for the pages of the methods.

    python -m benchmarks.methods [--policy FOLDER] [--save benchmarks/results]

``--save`` keeps table and machine in methods.json, of which ``python -m docs.generate`` writes docs/methods. Cells that
are finished in the folder of the run are not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import ROOT
from benchmarks.common.pages import machine
from benchmarks.compressors.texts import default_policy
from sparse_rl_lightning import compressors
from sparse_rl_lightning.cli.benchmark import main as benchmark
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.files import write_whole

SIZES = {"buffer": 4, "num_sinks": 1, "window": 4}
BUDGETS = ("20", "27", "34")  # of about 46 tokens; a prompt of 12 and the window fit the least
SNAPKV, KEYDIFF = ({"class_path": name, "init_args": {"budget": 20, **SIZES}} for name in ("SnapKV", "KeyDiff"))
WITH_ARGUMENTS: dict[str, dict[str, Any]] = {
    "LagKV": {"budget": 20, **SIZES, "lag_size": 5},  # a quarter of the least slot: the default is larger than it
    "Combined": {"compressors": [SNAPKV, KEYDIFF]},
    "Drawn": {"compressor": SNAPKV},
}
UNMEASURED = {"Compressor", "QueryStatistics", "FullKV", "LearnedScore"}
"""No methods, the full cache that has its row, and a network that a run has to train first."""


def names(folder: Path) -> list[str]:
    """Every method as the command takes it; files for those that need arguments are written into the folder."""
    found = []
    for name in compressors.__all__:
        assert isinstance(getattr(compressors, name), type)
        if name in UNMEASURED:
            continue
        assert issubclass(getattr(compressors, name), Compressor)
        path = folder / f"{name}.yaml"
        if name in WITH_ARGUMENTS:
            write_whole(path, yaml.safe_dump({"class_path": name, "init_args": WITH_ARGUMENTS[name]}))
        found.append(str(path) if name in WITH_ARGUMENTS else name)
    return found


def main(args: list[str] | None = None) -> None:
    """Run the command, and keep its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=default_policy(), help="the quickstart's policy")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "methods", help="folder of the run")
    parser.add_argument("--problems", default="256")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--remark", default="", help="a sentence about the machine for the pages")
    parser.add_argument("--save", type=Path, help="folder of methods.json")
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    own = [*sizes, "--budgets", *given.budgets, "--problems", given.problems, "--output", str(given.runs)]
    benchmark([*names(given.runs), "--policy", str(given.policy), *own])
    if given.save:
        content = json.loads((given.runs / "table.json").read_text("utf-8"))
        source = "/".join(given.policy.absolute().parts[-2:])  # what is above is a matter of the machine
        kept = {"machine": machine("cpu"), "remark": given.remark, "policy": source, **content}
        write_whole(given.save / "methods.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
