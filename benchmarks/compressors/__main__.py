"""Measures what every compressor costs in quality, beside random eviction and the full cache.

    python -m benchmarks.compressors [--policy FOLDER] [--stories FOLDER] [--threads 2] [--save docs]

sums: the quickstart's policy on held-out problems. stories: a small Llama on stories that it told itself. The texts
were drawn with the full cache and go token by token through the compressed one, at budgets of 25, 50 and 75 % of
their length; what is compared are the full distributions over the next token. ``--save`` writes the table between its
markers in compressors.md and the picture beside it.

Without --policy the quickstart's policy is taken from runs/quickstart/policy, where ``make bench-compressors`` puts it
(``sparse-rl export``), and if there is none the one before training, runs/warmup/policy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.pages import insert, machine, mark, say
from benchmarks.compressors.methods import PYRAMID_BETA
from benchmarks.compressors.pages import MARK, Results, picture, quality_table, verdict
from benchmarks.compressors.quality import Task, measure
from benchmarks.compressors.texts import QUICK, USUAL, Sizes, default_policy, default_stories, load, stories, sums, toy

PAGE, PICTURE = "compressors.md", "compressors.png"
BEGIN = mark("benchmarks.compressors")
TASKS: dict[str, Callable[..., Task]] = {"sums": sums, "stories": stories}


def tasks(args: argparse.Namespace, sizes: Sizes) -> dict[str, Task]:
    """Tasks whose models are there."""
    found: dict[str, Task] = {}
    for (name, make), folder in zip(TASKS.items(), (args.policy, args.stories), strict=True):
        if args.quick:
            found[name] = make(*toy(), sizes)
        elif (folder / "config.json").is_file():
            say(f"{name}: texts of {folder}")
            source = "/".join(folder.absolute().parts[-2:])  # what is above is a matter of the machine
            found[name] = replace(make(*load(folder), sizes), source=source)
        else:
            option = {"sums": "--policy", "stories": "--stories"}[name]
            say(f"{name}: skipped, there is no model in {folder}; give {option} FOLDER")
    return found


def describe(task: Task) -> str:
    """A sentence about the texts and the model of a task."""
    sizes, parameters = task.sizes, sum(p.numel() for p in task.model.parameters())
    solved = f" and {len(task.problems.rows)} problems solved greedily" if task.problems else ""
    return (
        f"{task.name}: {len(task.texts)} sampled texts of {task.length} tokens on average{solved}, "
        f"{type(task.model).__name__} of {parameters:,} parameters from {task.source}, buffer {sizes.buffer}, "
        f"num_sinks {sizes.num_sinks}, window {sizes.window}."
    )


def note(found: dict[str, Task], remark: str) -> str:
    """How to read the table."""
    what = " ".join(describe(task) for task in found.values())
    return (
        f"{machine('cpu')}. {remark}".strip() + f"\n\n{what} All methods have these sizes, not those of their papers; "
        f"LagKV's chunks are a quarter of a slot, Pyramid has beta {PYRAMID_BETA}; statistics come from other texts of "
        "the same policy.\n\nIn every cell budgets of 25 / 50 / 75 % of the length. Acceptance is Σ min(p_dense, "
        "p_sparse) over the vocabulary, per token; it, perplexity and the share of tokens with the same favorite "
        "count tokens behind the first eviction of a slot of budget + buffer, which are others at every budget. An "
        "event cuts one sequence in all layers and heads; all sequences are cut together. H2O's rate includes its "
        f"sums at every step, not the attention probabilities they need. {MARK} marks what is not better than "
        "RandomEviction; where both fail altogether, and in the last digit, it means little."
    )


def main() -> None:
    """Measure, and print or save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=default_policy(), help="the quickstart's policy")
    parser.add_argument("--stories", type=Path, default=default_stories(), help="a folder with stories260K")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="random weights, toy sizes: numbers without meaning")
    parser.add_argument("--save", type=Path, help=f"folder of {PAGE} and {PICTURE}")
    parser.add_argument("--remark", default="", help="a sentence about the machine for the page")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    found = tasks(args, QUICK if args.quick else USUAL)
    if not found:
        sys.exit("error: nothing to measure on")
    results: dict[str, Results] = {name: list(measure(task, say)) for name, task in found.items()}
    table = quality_table(results, note(found, args.remark))
    text = f"{table}\n\n{verdict(results)} All of it took {time.perf_counter() - start:.0f} s."
    print(text)
    if args.save:
        image = f"![Every compressor at three budgets, beside random eviction]({PICTURE})"
        insert(args.save / PAGE, f"{text}\n\n{image}", BEGIN)
        picture(results, args.save / PICTURE)


if __name__ == "__main__":
    main()
