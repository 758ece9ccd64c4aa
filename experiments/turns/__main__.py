"""Training on conversations with a calculator under a cache that forgets: which arm learns, and what it forgets.

    python -m experiments.turns [--seeds 0 1 2] [--steps 180] [--arms dense naive] [--budget 34] [--save docs/measured]

Every run is `sparse-rl fit` of `configs/tools.yaml` with one thing changed, in a process and a folder of its own below
--runs, from one warm-up. An interrupted run goes on from its last checkpoint. A finished one is a line in --kept and is
not run again, unless its environment, task or compressor has other code now. Seeds come one after the other, so that an
early end leaves whole ones. The tables have all arms and seeds that are finished, whichever were asked for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.common import kept
from benchmarks.common.pages import insert, machine, mark, say
from benchmarks.common.tables import Table
from experiments.arms.runs import CONFIGS, run_in
from experiments.turns.arms import ARMS, Run, configured
from sparse_rl_lightning.text import DASH

PAGE = "turns.md"
SEEDS = [0, 1, 2]
Line = dict[str, Any]
Finished = tuple[Run, Line]


def warm_up(folder: Path) -> Path:
    """The policy that all runs start from, trained where it is not there yet."""
    policy = folder / "runs" / "warmup_tools" / "policy"
    if not (policy / "config.json").is_file():
        say("warm-up")
        command = [sys.executable, "-m", "sparse_rl_lightning", "fit", f"--config={CONFIGS / 'warmup_tools.yaml'}"]
        if run_in(folder, [*command, "--num_threads=1"]):
            sys.exit(f"error: the warm-up stopped, see {folder / 'log.txt'}")
    return policy


def execute(runs: Sequence[Run], path: Path, jobs: int) -> None:
    """Run what has no line yet, or one of other code, and write its line."""
    lines_of = finished(runs, path)
    done = {run.key for run, line in lines_of if line.get("code") == run.code}
    if changed := len(lines_of) - len(done):
        say(f"{changed} are run anew: their environment, task or compressor has changed, or was not noted")
    waiting = [run for run in runs if run.key not in done]
    say(f"{len(runs) - len(waiting)} of {len(runs)} runs were finished before")

    def one(run: Run) -> None:
        start = time.perf_counter()
        found = run.execute()
        minutes = round((time.perf_counter() - start) / 60, 1)
        if found is None:
            say(f"{run.key}: stopped, see {run.folder / run.key / run.settings / run.code / 'log.txt'}")
            return
        names = {"key": run.key, "settings": run.settings, "code": run.code, "machine": machine("cpu")}
        names["minutes"] = minutes
        with lock:
            lines = {line["key"]: line for line in kept.read(path)} | {run.key: {**names, **rounded(found)}}
            kept.write(path, (lines[key] for key in sorted(lines)))
        say(f"{run.key}: {minutes} min, {lines[run.key]['after']}")

    lock = Lock()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, waiting))


def finished(runs: Sequence[Run], path: Path) -> list[Finished]:
    """The runs that have a line with their settings, and it."""
    lines = {(line["key"], line["settings"]): line for line in kept.read(path)}
    return [(run, lines[run.key, run.settings]) for run in runs if (run.key, run.settings) in lines]


def rounded(value: Any) -> Any:
    """The same with four digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ---------------------------------------------------------------- the table


def _end(cache: str, name: str, form: str) -> Callable[[Line], str]:
    return lambda line: f"{line['after'][cache][name]:{form}}"


def _logged(name: str, form: str) -> Callable[[Line], str]:
    return lambda line: DASH if line["logged"][name] is None else f"{line['logged'][name]:{form}}"


SOLVED: dict[str, Callable[[Line], str]] = {
    "right, full cache": _end("full", "right", ".2f"),
    "right, compressed": _end("compressed", "right", ".2f"),
    "reward": _end("compressed", "reward", ".2f"),
    "calls": _end("compressed", "calls", ".1f"),
    "turns": _end("compressed", "turns", ".1f"),
}
FORGOTTEN: dict[str, Callable[[Line], str]] = {
    "prompt evicted": _logged("kv/evicted/prompt", ".0%"),
    "drawn": _logged("kv/evicted/drawn", ".0%"),
    "given": _logged("kv/evicted/given", ".0%"),
    "k3, first turn": _logged("mismatch/kl_k3/first_turn", ".2g"),
    "k3, later turns": _logged("mismatch/kl_k3/later_turns", ".2g"),
    "rejected": _logged("rejection_rate", ".0%"),
}


def solved(runs: Sequence[Run], lines: Sequence[Finished]) -> Table:
    """What every arm solves in the end, its seeds behind each other; first what the policy solved before training."""
    compressor = runs[0].compressor
    sizes, minutes = compressor["init_args"], statistics.median(line["minutes"] for _, line in lines)
    note = (
        f"{len(lines)} of {len(runs)} runs, {runs[0].steps} optimizer steps each, {minutes:.0f} minutes (median). "
        f"{compressor['class_path']} with budget {sizes['budget']} and buffer {sizes['buffer']}. "
        f"{runs[0].num_problems} held-out problems solved greedily, with the full cache and with the one that the run "
        "drew under (dense: as naive), whose reward, calls and turns are given. Seeds behind each other. Machines: "
        f"{'; '.join(sorted({line['machine'] for _, line in lines}))}."
    )
    result = Table("Solved", ("", *SOLVED), note)
    first = {run.arm.protects: line for run, line in reversed(lines)}
    for protects in dict.fromkeys(run.arm.protects for run, _ in lines):
        before = {**first[protects], "after": first[protects]["before"]}
        name = f"before training{protects and f', {protects} protected'}"
        result.add(name, *(value(before) for value in SOLVED.values()))
    return _by_arm(result, runs, lines, SOLVED)


def forgotten(runs: Sequence[Run], lines: Sequence[Finished]) -> Table:
    """What every arm's cache forgot in the last quarter of training, and what that changed."""
    note = (
        "The last quarter of training: tokens evicted when their conversation was over, k3 (nats/token, KL from the "
        "policy that drew to the one that learns) and conversations rejected."
    )
    return _by_arm(Table("Forgotten", ("", *FORGOTTEN), note), runs, lines, FORGOTTEN)


def _by_arm(
    table: Table, runs: Sequence[Run], lines: Sequence[Finished], columns: dict[str, Callable[[Line], str]]
) -> Table:
    """A row per arm; a seed that is not finished leaves a dash, so that the others keep their places."""
    found = {run.key: line for run, line in lines}
    for name in dict.fromkeys(run.arm.name for run, _ in lines):
        own = [found.get(run.key) for run in runs if run.arm.name == name]
        table.add(name, *(" / ".join(value(one) if one else DASH for one in own) for value in columns.values()))
    return table


def main() -> None:
    """Run the study and print or save its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=180, help="optimizer steps, two per rollout")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="default all")
    parser.add_argument("--budget", type=int, help="of the cache, default that of the configuration")
    kept.add_options(parser, "turns", PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.runs.absolute()
    policy = folder if args.finished else warm_up(folder)
    seeds = sorted({*SEEDS, *args.seeds})
    budget = None if args.budget == configured()["init_args"]["budget"] else args.budget
    runs = [Run(arm, seed, args.steps, policy, folder, budget) for seed in seeds for arm in ARMS]
    if not args.finished:
        chosen = [run for run in runs if run.seed in args.seeds and run.arm.name in (args.arms or [run.arm.name])]
        execute(chosen, args.kept, args.jobs)
    lines = finished(runs, args.kept)
    if not lines:
        sys.exit(f"error: no run of {len(runs)} is finished: run without --finished")
    text = "\n\n".join(table(runs, lines).untitled for table in (solved, forgotten))
    print(text)
    if args.save:
        block = "" if budget is None else f"budget {budget}"
        insert(args.save / PAGE, text, mark("experiments.turns", block))


if __name__ == "__main__":
    main()
