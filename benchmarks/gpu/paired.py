"""Times the same decode steps in two checkouts in turns, and takes the median of their ratios.

    python -m benchmarks.gpu.paired --before ../before [--minutes 3.5] [--save benchmarks/results]
    python -m benchmarks.gpu.paired --before . --set SPARSE_RL_OVERLAP=1       # what a variable of the environment does

Every turn is a process that imports the package from its own checkout, beside which its kernels must lie
(``python3 -m benchmarks.gpu build`` puts them there). What a turn needs exists in checkouts since release 0.2.0.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common import options
from benchmarks.common.pages import machine, save, say
from benchmarks.common.tables import Table

TURN = """
import json, sys, torch
from benchmarks.rollout.clock import Clock
from benchmarks.rollout.policies import SHAPES, random_policy, random_prompts
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV, SnapKV
device, model, length, steps, batches = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
policy = random_policy(SHAPES[model], torch.bfloat16 if device == "cuda" else torch.float32, device)
prompts, times = random_prompts(1, length, SHAPES[model].vocab), {}
for batch in batches:
    for name, method, top_p in ("SnapKV", SnapKV, 1.0), ("R-KV", RKV, 1.0), ("SnapKV, top-p 0.95", SnapKV, 0.95):
        compressor = method(budget=length, buffer=steps, num_sinks=0)
        graphs = "require" if device == "cuda" else True
        sampler = RolloutSampler(policy, compressor, end_token_ids=[], cuda_graphs=graphs)
        clock = Clock(steps // 2, steps // 2 + steps, device)
        params = SamplingParams(num_generations=batch, max_completion_length=2 * steps, top_p=top_p)
        sampler.generate(prompts, params, progress=clock)
        times[f"{name}, {batch} sequences"] = clock.milliseconds
        del sampler
print(json.dumps(times))
"""
SIZES = {"cuda": ("1.5B", 512, 32, [1, 8, 64, 256]), "cpu": ("tiny", 32, 8, [1, 4])}
LEAST = 3  # rounds; more while there is time


def turn(checkout: Path, variables: dict[str, str], device: str) -> dict[str, float]:
    """Milliseconds per step of every cell, in a process of a checkout with further variables."""
    paths = [str(checkout), str(ROOT / "build" / "gpu" / "site"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    model, *sizes = SIZES[device]
    command = [sys.executable, "-c", TURN, device, model, *map(json.dumps, sizes)]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: a turn in {checkout} ended with {done.returncode}: see above")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def table_of(before: list[dict[str, float]], now: list[dict[str, float]], note: str) -> Table:
    """Medians of both, and of their ratios with the least and the largest."""
    table = Table("Steps before and now", ("cell", "ms before", "ms now", "before / now", "least", "largest"), note)
    for cell in now[0]:
        ratios = [old[cell] / new[cell] for old, new in zip(before, now, strict=True)]
        medians = (statistics.median(each[cell] for each in side) for side in (before, now))
        shown = (statistics.median(ratios), min(ratios), max(ratios))
        table.add(cell, *(f"{ms:.3f}" for ms in medians), *(f"{ratio:.3f}" for ratio in shown))
    return table


def main() -> None:
    """Run turns, before first in every other round, until the time is over."""
    parser = options.parser(__doc__, "gpu-paired.md", device="cuda")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--set", metavar="NAME=VALUE", default="", help="a variable of this checkout's turns alone")
    parser.add_argument("--minutes", type=float, default=3.5, help=f"no round begins that ends later, but for {LEAST}")
    args = options.parsed(parser)
    name, _, value = args.set.partition("=")
    sides: list[tuple[Path, dict[str, str], list[dict[str, float]]]] = [
        (args.before.absolute(), {}, []), (ROOT, {name: value} if name else {}, []),
    ]  # fmt: skip
    start, longest = time.monotonic(), 0.0
    for index in count():
        began = time.monotonic()
        if index >= LEAST and began - start + longest > 60 * args.minutes:
            break
        for checkout, variables, times in sides[:: 1 if index % 2 == 0 else -1]:
            times.append(turn(checkout, variables, args.device))
        longest = max(longest, time.monotonic() - began)
        before, now = (times for _, _, times in sides)
        model, budget, buffer, _ = SIZES[args.device]
        set_now = f"{args.set} now. " if name else ""
        note = (
            f"{set_now}{model}, {budget} + {buffer} tokens, no sinks, an eviction of every slot among them; "
            f"{index + 1} rounds."
        )
        say(f"round {index + 1}: {longest:.0f} s")
        text = f"{machine(args.device)}\n\n{table_of(before, now, note)}"
        save(args.save, "gpu-paired", "benchmarks.gpu.paired", text)
    print(text)


if __name__ == "__main__":
    main()
