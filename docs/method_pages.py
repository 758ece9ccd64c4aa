"""The page of all compressors: the tables of ``sparse-rl benchmark``, then a section for each method."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from docs import docstrings, listing
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.quality.page import markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "methods.json"
SAID = yaml.safe_load((Path(__file__).parent / "methods.yaml").read_text("utf-8"))
"""Formula and use of every class, by its name."""
KIND = {
    kind.__name__: kind
    for kind in sorted([*listing.METHODS, *listing.WRAPPERS], key=lambda kind: kind.__name__.lower())
}
"""Every class by its name, in the order of the sections."""
NOTE = "<!-- This page is written by `make docs-pages`: change docs/methods.yaml and the docstrings, not the page. -->"

INTRO = """\
# Method by method

This page has every [compressor](compressors.md): first all of them in tables on a real model, then a section for
each, with formula, source and advice when to use it. [Choosing](choosing.md) draws the conclusions.

The tables are those of `sparse-rl benchmark` for {policy} on questions of GSM8K, without training. Brackets are 95 %
intervals over the problems.

| column | what it is |
|---|---|
| tail | 5th percentile of the [acceptance](concepts.md#glossary) over all sampled tokens |
| agreement | share of these tokens for which both caches have the same most likely token |
| KL | KL of compressed-cache to full-cache policy, nats per token; rows are sorted by it |
| rejected | expected share of sequences with a token whose probability ratio is below 1e-4 |
| length | mean length of the completions over that with the full cache |
| KV saved | share of the KV tokens that is not stored at the end |"""

MEASURED = """\
## How it was measured

The policy answers in its chat template and in float32, with up to 512 tokens per completion. Each method samples its
own completions, at temperature 1 unless the heading says otherwise. After `make real-model`, this measures again:
`python -m benchmarks.methods --data gsm8k_test.jsonl --save benchmarks/results`.

All methods have a buffer of 32 tokens, four sinks and a window of 8, and the prompt may be evicted, unless the
heading says otherwise. LagKV's chunks have 31 tokens, and `Pyramid` has beta 2. `Combined` is `SnapKV` with
`KeyDiff`; one set per layer is `SnapKV` alone with `across_heads`. "By age" is `age_normalized: true`, "drawn anew" is
`redraw: true`. Statistics and networks come from other completions of the model. Replay reproduces the sampler's
log-probs in every row; the largest difference is {replay:.0e}.

{runs}

The sections below also name small policies: the tiny models of [another benchmark](measured/compressors.md), on
sums, reductions, countdown and stories."""

LETTERS = """\
## Letters in the formulas

*s* is the score of entry *j*, and higher scores are kept. *k* and *v* are the entry's key (rotated) and value, *p*
its position, *n* the newest position. *D* is the number of channels, *q* a recent query, *g* a query head of the KV
head, *z* a standardized score. Sinks and window stay whatever they score."""

TITLES = {
    "all": "Every method, budget 96",
    "budgets": "Random eviction and the best, other budgets",
    "others": "Three more of the best, other budgets",
    "sinks": "Without sinks, budget 128",
    "cool": "Temperature 0.7, budget 128",
    "open": "Prompts of at most 96 tokens, not protected, budget 192",
    "kept": "The same prompts, protected, budget 192",
}
"""Headings of the parts of the run."""
SHOWN = ("kl", "rejected", "length")
"""Numbers with their intervals."""


def page() -> str:
    """The whole page."""
    kept = json.loads(RESULTS.read_text("utf-8"))
    cells = [cell for part in TITLES for cell in cells_of(kept, part)]
    replay = max(cell.replay_difference or 0.0 for cell in cells)
    parts = [
        NOTE,
        INTRO.format(policy=kept["policy"]),
        *(f"## {title}\n\n{_table(own)}" for title, _, own in _tables(kept)),
        MEASURED.format(replay=replay, runs=_runs(kept)),
        LETTERS,
        *map(section, KIND),
    ]
    return "\n\n".join(parts) + "\n"


def cells_of(kept: dict[str, Any], part: str) -> list[Cell]:
    """What was measured in a part, without rows that say why they are empty."""
    cells = (Cell(**own) for own in kept["parts"].get(part, {"cells": []})["cells"])
    return [cell for cell in cells if not cell.reason]


def _tables(kept: dict[str, Any]) -> list[tuple[str, str, list[Cell]]]:
    """Titles, parts and rows of the tables, as far as they were measured."""
    found = [(title, part, sorted(cells_of(kept, part), key=_order)) for part, title in TITLES.items()]
    return [(title, part, cells) for title, part, cells in found if cells]


def _order(cell: Cell) -> tuple[int, float]:
    return cell.budget or 0, cell.kl or 0.0


def _table(cells: list[Cell]) -> str:
    """The rows, with some of the intervals, and without replay, which the introduction has."""
    return markdown_table([
        replace(cell, replay_difference=None, intervals={n: own for n, own in cell.intervals.items() if n in SHOWN})
        for cell in cells
    ])  # fmt: skip


def _runs(kept: dict[str, Any]) -> str:
    """The problems and the machine of every table."""
    rows = [
        "| table | questions | mean completion, full cache | mean sequence | longest | run |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for title, part, _ in _tables(kept):
        table = kept["parts"][part]
        lengths, (mean, longest) = table["completions"], table["lengths"]
        cells = (title, len(lengths), f"{sum(lengths) / len(lengths):.0f}", mean, longest, table["machine"])
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def section(name: str) -> str:
    """What there is to know of one method."""
    kind = KIND[name]
    parts = [
        f"## {name}", docstrings.summary(kind), f"```math\n{SAID[name]['formula'].strip()}\n```",
        f"**When to use it.** {SAID[name]['when'].strip()}", f"**Source.** {sources(kind)}",
    ]  # fmt: skip
    return "\n\n".join(parts)


def sources(kind: type) -> str:
    """Papers that the docstring names, the class and its settings."""
    said = f"{docstrings.summary(kind)} {docstrings.body(kind)}"
    papers = [f"[arXiv {n}](https://arxiv.org/abs/{n})" for n in dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", said))]
    anchor = f"[settings](settings.md#{kind.__name__.lower()})"
    return ", ".join([*papers, f"`{kind.__module__}.{kind.__name__}`", anchor]) + "."
