"""Dense, naive, Sparse-RL, replay and every correction on the quickstart's task, from the same warm-up.

    python -m experiments.arms [--budgets 30 26] [--seeds 0] [--steps 240] [--only ARM ...] [--save docs/measured]

Every run is `sparse-rl fit` with a shipped configuration in a process of its own, in a folder below --runs. What is
finished is not run again, unless its rewards, task or compressor have other code now, what was interrupted goes on from
its last checkpoint. All runs of a seed see the same prompts in the same order, and all are evaluated greedily on the
same held-out problems with the full cache and under the compressor. The four arms run under all budgets, the
corrections under the last one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import ROOT
from benchmarks.common.pages import insert, machine, mark, say
from experiments.arms.curves import LAST, Found, sampled, table
from experiments.arms.runs import ARMS, CORRECTIONS, Run, Settings, planned

PAGE = "arms.md"
POLICY = ROOT / "runs" / "warmup" / "policy"
TINY = json.dumps({"class_path": "TinyPolicy"})


def execute(runs: Sequence[Run], only_read: bool = False) -> list[Found]:
    """Results of all runs; what is not finished is run first, unless ``only_read``."""
    found = []
    for number, run in enumerate(runs, start=1):
        start, name = time.perf_counter(), run.folder.name
        if run.is_finished:
            say(f"{number}/{len(runs)} {name}: finished before")
        elif only_read:
            say(f"{number}/{len(runs)} {name}: not there")
            continue
        elif run.execute():
            say(f"{number}/{len(runs)} {name}: {time.perf_counter() - start:.0f} s")
        else:
            say(f"{number}/{len(runs)} {name}: stopped, see {run.folder / 'log.txt'}")
            continue
        found.append(Found.read(run))
    return found


def note(settings: Settings, seeds: Sequence[int], remark: str) -> str:
    """How to read the tables."""
    own = settings.method["init_args"]
    width = 1.96 * math.sqrt(0.25 / settings.num_problems)  # 95 %, at one half
    return (
        f"{machine('cpu')}. {remark}".strip() + f"\n\n{settings.steps} optimizer steps from the policy of "
        f"`configs/warmup.yaml`, everything else as in `configs/quickstart.yaml`: R-KV with buffer {own['buffer']}, "
        f"sequences of about 47 tokens, the same prompts for all. Seeds: {', '.join(map(str, seeds))}, told apart by "
        f"a slash. Accuracies are greedy, on the same {settings.num_problems} held-out problems (±{width:.2f} by their "
        f"number alone), mean of the last {LAST} evaluations, {settings.every_n_rollouts} rollouts apart. Rejected "
        "sequences, tokens whose loss is left out or weighs nothing, and tokens whose gradient the clip of the "
        "staleness ratio stops are means over the run; compression k3 is the distance of the compressed policy from "
        "the dense one in nats per token, mean of the last quarter. Minutes are those of training without evaluations."
    )


def blocks(found: Sequence[Found], settings: Settings, text: str) -> dict[str, str]:
    """What is written into the page, by the name of its mark."""
    under = settings.budgets[-1]
    return {
        "replay": str(table("Budgets and replay", found, ARMS, settings.budgets, text)),
        "corrections": str(table("Corrections by name", found, CORRECTIONS, [under], text)),
    }


def main() -> None:
    """Run the comparison and print or save its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[30, 26], help="corrections run under the last")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps, two per rollout")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="labels of the arms to run; tables need no others")
    parser.add_argument("--policy", type=Path, default=POLICY, help="the policy that all runs start from")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "arms", help="folder of the runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--finished", action="store_true", help="run nothing: write what earlier calls have finished")
    parser.add_argument("--quick", action="store_true", help="random weights, toy sizes: numbers without meaning")
    parser.add_argument("--save", type=Path, help=f"folder of {PAGE}")
    parser.add_argument("--remark", default="", help="a sentence about the machine for the pages")
    args = parser.parse_args()
    if not args.quick and not (args.policy / "config.json").is_file():
        sys.exit(f"error: no policy in {args.policy}: run sparse-rl fit --config configs/warmup.yaml, or give --policy")
    torch.set_num_threads(args.threads)
    settings = Settings(
        TINY if args.quick else str(args.policy.absolute()), args.runs.absolute(), tuple(args.budgets), args.steps,
        threads=args.threads, **({"every_n_rollouts": 1, "num_problems": 4} if args.quick else {}),
    )  # fmt: skip
    runs = planned(settings, args.seeds, settings.budgets[-1])
    known = {run.arm.label for run in runs}
    if args.only and not known.issuperset(args.only):
        sys.exit(f"error: --only knows {sorted(known)}, got {args.only}")
    found = execute([run for run in runs if args.only is None or run.arm.label in args.only], args.finished)
    if not sampled(found, settings.budgets):
        sys.exit("error: no run under a budget was finished")
    for name, text in blocks(found, settings, note(settings, args.seeds, args.remark)).items():
        print(text)
        if args.save:
            insert(args.save / PAGE, text, mark("experiments.arms", name))


if __name__ == "__main__":
    main()
