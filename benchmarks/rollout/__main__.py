"""Times whole rollouts and single decode steps against transformers and against what the machine allows.

    python -m benchmarks.rollout [--device cpu] [--threads 2] [--rounds 3] [--save DIR]

On an idle machine leave OMP_WAIT_POLICY alone: with PASSIVE every small product wakes its threads anew, and a step of
the engine takes twice as long. Everything goes through the public classes. Contenders take turns within every round,
so a busy machine slows all of them; times are medians over the rounds, ratios medians of the rounds' ratios.

On a CPU (some half an hour; ``--parts`` runs some of them):
speed: equal work for sparse and full cache, ``model.generate`` and ``generate_batch``, beside the bound; then the same
with other lengths, where ``generate`` runs on request only (``--long-rival``).
split: what one step is spent on.
tail: completions of long-tailed lengths, refilled slots against lock-step batches.
state: steps of a compressor with running state, with all slots in use and with free ones between.
vocabulary: kinds of draws from 151,936 tokens, beside ``model.generate``.
decoders: the library's own, and transformers' forward pass.

On a GPU (minutes a part; the page says what it took):
cells: steps at given lengths in shapes of real models. memory: the same memory for all caches. whole: refilled rollouts
of log-normal lengths, and ``generate``. equal: long ones, with as many slots as the same memory holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.common import options
from benchmarks.common.pages import machine, page_name, save, say
from benchmarks.common.tables import Table
from benchmarks.rollout.cells import Grid, cells_table, memory_table
from benchmarks.rollout.decoders import decoders_table
from benchmarks.rollout.policies import SHAPES, SMALL, TINY
from benchmarks.rollout.speed import Setting, speed_tables
from benchmarks.rollout.split import split_table
from benchmarks.rollout.state import state_table
from benchmarks.rollout.tail import Tail, tail_table
from benchmarks.rollout.vocabulary import vocabulary_table
from benchmarks.rollout.whole import equal_table, whole_tables

PARTS = {
    "cpu": ("speed", "split", "tail", "state", "vocabulary", "decoders"),
    "cuda": ("cells", "memory", "whole", "equal"),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    setting: Setting
    new_tokens: int
    other_tokens: tuple[int, ...]  # of sparse and full cache alone
    vocabulary: Setting
    few_tokens: int  # drawn from it
    cycles: int  # of the buffer, that a step is split over
    tail: Tail
    grid: Grid


USUAL = Sizes(
    Setting(SMALL, 16, 64, budget=128, buffer=32, stream_bytes=2**28),
    new_tokens=1024, other_tokens=(768, 4096), cycles=2,
    vocabulary=Setting(SHAPES["0.5B"], 32, 4, budget=12, buffer=4, stream_bytes=2**28), few_tokens=32,
    tail=Tail(SMALL, 64, 8, 32, 64, mean=160, longest=1024),
    grid=Grid(
        ("1.5B", "7B"), (4096, 16384), (1024, 256, 64, 32, 16, 8, 1), (512, 1024), memory_length=16384,
        memory_bytes=40 * 10**9, memory_sequences=1024, num_prompts=64, num_generations=8, num_slots=256,
        prompt_length=512, mean=1000, longest=4096,
    ),
)  # fmt: skip
QUICK = Sizes(
    Setting(TINY, 4, 8, budget=12, buffer=4, stream_bytes=2**20),
    new_tokens=24, other_tokens=(40,), cycles=2,
    vocabulary=Setting(TINY, 4, 8, budget=12, buffer=4, stream_bytes=2**20), few_tokens=4,
    tail=Tail(TINY, 4, 2, 4, 8, mean=12, longest=48),
    grid=Grid(
        ("tiny",), (40, 80), (8, 16), (16,), memory_length=80, memory_bytes=10**6, memory_sequences=16, num_prompts=4,
        num_generations=2, num_slots=4, prompt_length=8, mean=12, longest=48,
    ),
)  # fmt: skip


def tables(args: argparse.Namespace, sizes: Sizes) -> Iterator[Table]:
    """Part by part; a part whose rows take long yields its table after every row."""
    setting, dtype = sizes.setting, torch.bfloat16 if args.device == "cuda" else torch.float32
    grid = replace(sizes.grid, models=tuple(args.models or sizes.grid.models))
    parts: dict[str, Callable[[], Iterable[Table]]] = {
        "speed": lambda: speed_tables(setting, sizes.new_tokens, sizes.other_tokens, args.rounds, args.long_rival),
        "split": lambda: (split_table(setting, setting.prompt_length + sizes.new_tokens // 2, sizes.cycles),),
        "state": lambda: (state_table(setting, args.rounds),),
        "decoders": lambda: (decoders_table(setting, args.rounds),),
        "vocabulary": lambda: (vocabulary_table(sizes.vocabulary, sizes.few_tokens, args.rounds),),
        "tail": lambda: (tail_table(sizes.tail, setting.compressor(), args.rounds),),
        "cells": lambda: cells_table(grid, dtype, args.device),
        "memory": lambda: memory_table(grid, dtype, args.device),
        "whole": lambda: whole_tables(grid, dtype, args.device),
        "equal": lambda: equal_table(grid, dtype, args.device),
    }
    for part in args.parts or PARTS[args.device]:
        start = time.perf_counter()
        yield from parts[part]()
        say(f"{part}: {time.perf_counter() - start:.0f} s")


def main() -> None:
    """Measure everything and print the tables."""
    parser = options.parser(
        __doc__, "rollout-cpu.md, gpu-rollout.md", device=options.here(), threads=2, rounds=3, quick=True
    )
    parser.add_argument("--parts", nargs="+", choices=[part for parts in PARTS.values() for part in parts])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), help="shapes of cells, memory and whole")
    parser.add_argument("--long-rival", action="store_true", help="generate runs the other lengths too")
    parser.add_argument("--page", help="another name for the page")
    args = options.parsed(parser)
    if args.quick:
        args.rounds = 1
    torch.manual_seed(0)
    start = time.perf_counter()
    heading = machine(args.device)
    shown: list[Table] = []
    try:
        for table in tables(args, QUICK if args.quick else USUAL):
            shown += [] if shown and shown[-1] is table else [table]
            keep(args, [heading, *map(str, shown)])  # what is measured stays, whatever comes after it
    finally:
        print(heading, *shown, sep="\n\n", flush=True)
    took = f"All of it took {time.perf_counter() - start:.0f} s."
    print(f"\n{took}")
    keep(args, [heading, *map(str, shown), took])


def keep(args: argparse.Namespace, pages: Sequence[str]) -> None:
    """Write the page where one is wanted."""
    save(args.save, args.page or page_name("rollout", args.device), "benchmarks.rollout", "\n\n".join(pages))


if __name__ == "__main__":
    main()
