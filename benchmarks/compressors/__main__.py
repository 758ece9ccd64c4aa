"""Measures what every compressor costs in quality, beside random eviction and the full cache.

    python -m benchmarks.compressors [--policy FOLDER] [--stories FOLDER] [--threads 2] [--save docs/measured]

sums, reductions, countdown: small policies on held-out problems of the kind they were trained on. stories: a small
Llama on stories that it told itself. The texts were drawn with the full cache and go token by token through the
compressed one, at budgets of 25, 50 and 75 % of their length, with the prompt open to eviction and with the prompt
protected; what is compared are the full distributions over the next token. What was measured on a task is a line in
--kept, a file of the repository. ``--save`` writes the tables between their markers in compressors.md and the picture
beside it.

Without --policy the quickstart's policy is taken from runs/quickstart/policy, where ``make bench NAME=compressors``
puts it (``sparse-rl export``), and if there is none the one before training, runs/warmup/policy. The other two come
from configs/warmup_reduction.yaml and configs/warmup_countdown.yaml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common import options
from benchmarks.common.pages import insert, machine, mark, say
from benchmarks.compressors import records
from benchmarks.compressors.methods import PYRAMID_BETA
from benchmarks.compressors.pages import (
    MARK,
    TAIL,
    ByTask,
    accuracy_table,
    chance_table,
    measure_table,
    most_solved,
    picture,
)
from benchmarks.compressors.quality import Task, measure
from benchmarks.compressors.records import Measured
from benchmarks.compressors.texts import (
    QUICK,
    USUAL,
    Sizes,
    arithmetic,
    default_policy,
    default_stories,
    load,
    stories,
    toy,
)

PAGE, PICTURE = "compressors.md", "compressors.png"
KEPT = ROOT / "benchmarks" / "results" / "compressors.jsonl"
BEGIN = mark("benchmarks.compressors")
OPTIONS = {"sums": "--policy", **{name: f"--{name}" for name in ("reductions", "countdown", "stories")}}


def tasks(args: argparse.Namespace, sizes: Sizes) -> dict[str, Task]:
    """Tasks whose models are there."""
    ready: dict[str, Task] = {}
    for name, option in OPTIONS.items():
        folder = getattr(args, option.strip("-"))
        make = stories if name == "stories" else partial(arithmetic, name)
        if args.quick:
            ready[name] = make(*toy(), sizes)
        elif (folder / "config.json").is_file():
            say(f"{name}: texts of {folder}")
            source = "/".join(folder.absolute().parts[-2:])  # what is above is a matter of the machine
            ready[name] = replace(make(*load(folder), sizes), source=source)
        else:
            say(f"{name}: skipped, there is no model in {folder}; give {option} FOLDER")
    return ready


def describe(task: Task) -> str:
    """A sentence about the texts and the model of a task."""
    sizes, parameters = task.sizes, sum(p.numel() for p in task.model.parameters())
    solved = f" and {len(task.problems.rows)} problems solved greedily" if task.problems else ""
    return (
        f"{task.name}: {len(task.texts)} sampled texts of {task.length} tokens on average{solved}, "
        f"{type(task.model).__name__} of {parameters:,} parameters from {task.source}, buffer {sizes.buffer}, "
        f"num_sinks {sizes.num_sinks}, window {sizes.window}."
    )


def note(measured: Sequence[Measured]) -> str:
    """How to read the tables."""
    machines, what = " ".join(sorted({line.machine for line in measured})), " ".join(line.about for line in measured)
    return (
        f"{machines}\n\n{what} All methods have these sizes, not those of their papers; "
        f"LagKV's chunks are a quarter of a slot, Pyramid has beta {PYRAMID_BETA}; statistics come from other texts of "
        "the same policy.\n\nTables are of budgets of half the length, with the prompt open to eviction and protected; "
        f"– where the prompt and the window do not fit. {MARK} marks what is not better than RandomEviction with the "
        "prompt as open or protected; where both fail altogether, and in the last digit, it means little. All numbers, "
        f"of every budget and measure, are in `benchmarks/results/{KEPT.name}`, and their tails in the picture."
    )


def page(measured: Sequence[Measured]) -> str:
    """The measured part of the page."""
    results: ByTask = {line.task: line.qualities for line in measured}
    tables = (accuracy_table(results), measure_table(results, TAIL), chance_table(results))
    accuracy, tail, chance = (table.untitled for table in tables)
    return "\n\n".join([
        "## Measured", note(measured),
        "### Greedy accuracy",
        f"With budgets of 25 % of the length no method solves more than {most_solved(results):.0%}.", accuracy,
        "### Tail of the acceptance",
        "The 5th percentile of Σ min(p_dense, p_sparse) over the vocabulary, per token, behind the first eviction of a "
        "slot of budget + buffer.", tail,
        "### Beside chance",
        "In how many of its numbers a method is not better than RandomEviction with the prompt as open or protected. "
        "The numbers are accuracy (where there are problems), perplexity, the share of tokens with the same favorite, "
        "acceptance and its tail, of every task at budgets of 25, 50 and 75 % of the length, as far as they fit. "
        "An event cuts one sequence in all layers and heads; all sequences are cut together. H2O's rate "
        "includes its sums at every step, not the attention probabilities they need.", chance,
        f"![Every compressor at three budgets, with the prompt open and protected]({PICTURE})",
    ])  # fmt: skip


def main() -> None:
    """Measure, and print or save the tables."""
    parser = options.parser(__doc__, f"{PAGE} and {PICTURE}", threads=2, quick=True)
    parser.add_argument("--policy", type=Path, default=default_policy(), help="the quickstart's policy")
    parser.add_argument("--reductions", type=Path, default=ROOT / "runs" / "warmup_reduction" / "policy")
    parser.add_argument("--countdown", type=Path, default=ROOT / "runs" / "warmup_countdown" / "policy")
    parser.add_argument("--stories", type=Path, default=default_stories(), help="a folder with stories260K")
    parser.add_argument("--kept", type=Path, default=KEPT, help="a line per task; those measured now are replaced")
    parser.add_argument(
        "--finished", action="store_true", help="measure nothing: write what earlier calls have measured"
    )
    parser.add_argument("--remark", default="", help="a sentence about the machine")
    args = options.parsed(parser)
    lines = {} if args.quick else records.read(args.kept)
    waiting = {} if args.finished else tasks(args, QUICK if args.quick else USUAL)
    heading = f"{machine('cpu')}. {args.remark}".strip()
    for name, task in waiting.items():
        lines[name] = Measured(name, describe(task), heading, list(measure(task, say)))
        if not args.quick:
            records.write(args.kept, lines.values())
    if not lines:
        sys.exit("error: nothing to measure on, and nothing measured before")
    text = page(list(lines.values()))
    print(text)
    if args.save:
        insert(args.save / PAGE, text, BEGIN)
        picture({name: line.qualities for name, line in lines.items()}, args.save / PICTURE)


if __name__ == "__main__":
    main()
