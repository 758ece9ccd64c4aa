"""A page per compressor: its docstring, its formula, its rows of ``sparse-rl benchmark``, and when to use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from docs import docstrings, listing
from sparse_rl_lightning.cli.benchmark import FLOOR, FULL
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.quality.page import explained, markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "methods.json"
LETTERS = (
    "*s* is the score of entry *j*, higher is kept; *k* and *v* are its key (rotated) and value, *p* its position, *n* "
    "the newest; *D* channels, *q* recent queries, *g* query heads of a KV head, *z* a standardized score. "
    "Sinks and window stay whatever they score."
)
SAID = yaml.safe_load((Path(__file__).parent / "methods.yaml").read_text("utf-8"))
"""Formula and use of every class, by its name."""
KIND = {cls.__name__: cls for cls in [*listing.METHODS, *listing.WRAPPERS]}
NOTE = "<!-- This page is written by `make docs-pages`: change docs/methods.yaml and the docstrings, not the page. -->"


def pages(folder: Path) -> dict[Path, str]:
    """The page of every method and their index, by path."""
    kept = json.loads(RESULTS.read_text("utf-8"))
    found = {folder / f"{name}.md": method_page(name, kept) for name in KIND}
    return {folder / "index.md": index_page(kept), **found}


def cells_of(kept: dict[str, Any], part: str) -> list[Cell]:
    """What was measured in a part, without rows that say why they are empty."""
    cells = (Cell(**own) for own in kept["parts"].get(part, {"cells": []})["cells"])
    return [cell for cell in cells if not cell.reason]


def index_page(kept: dict[str, Any]) -> str:
    """The whole tables, and how they came about."""
    parts = [
        NOTE,
        "# Method by method",
        "Every compressor with its formula, its source, its rows of these tables, and when to use it. The tables are "
        "those of `sparse-rl benchmark` ([what its columns are](../choosing.md#measure-your-own)), on a real instruct "
        "model, by `python -m benchmarks.methods --data gsm8k_test.jsonl --save benchmarks/results` (after `make "
        "real-model`); [compressors](../compressors.md#measured) has small policies on tasks that they can answer.",
        f"{kept['policy']} in float32, questions of GSM8K in its chat template, completions of up to 512 tokens that "
        "each cache drew itself, at temperature 1 if nothing else is said. Buffer 32, four sinks, a window of 8, the "
        "prompt open; LagKV's chunks are 31 tokens, `Pyramid` has beta 2, `Combined` is `SnapKV` and `KeyDiff`, or "
        "`SnapKV` with one set of tokens for the heads of a layer, `Drawn` is around `SnapKV`; statistics come from "
        "other texts of the model. The closest to the full cache come first.",
        *(f"## {title}\n\n{_how(kept, part)}\n\n{markdown_table(cells)}" for title, part, cells in _tables(kept)),
        explained(),
        f"## Letters\n\n{LETTERS}",
        "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(KIND) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


TITLES = {
    "all": "Every method at 96 tokens",
    "budgets": "Chance and the best at other budgets",
    "sinks": "Without sinks, at 128",
    "cool": "At temperature 0.7, at 128",
    "open": "Prompts of at most 96 tokens, open, at 192",
    "kept": "The same prompts, protected, at 192",
}


def _tables(kept: dict[str, Any]) -> list[tuple[str, str, list[Cell]]]:
    """Titles, parts and rows of the tables, as far as they were measured."""
    found = [(title, part, sorted(cells_of(kept, part), key=_order)) for part, title in TITLES.items()]
    return [(title, part, cells) for title, part, cells in found if cells]


def _order(cell: Cell) -> tuple[int, float]:
    return cell.budget or 0, cell.kl or 0.0


def _how(kept: dict[str, Any], part: str) -> str:
    """The machine and the texts of a table."""
    table = kept["parts"][part]
    lengths = table["completions"]
    return (
        f"{len(lengths)} questions, completions of {sum(lengths) / len(lengths):.0f} tokens on average with the full "
        f"cache, sequences of {table['lengths'][0]} and at most {table['lengths'][1]}. {table['machine']}"
    )


def method_page(name: str, kept: dict[str, Any]) -> str:
    """The page of one method."""
    kind = KIND[name]
    wanted = FULL.name if name == "FullKV" else name
    cells = [*cells_of(kept, "all"), *(cell for cell in cells_of(kept, "budgets") if cell.budget)]
    own = [cell for cell in cells if cell.method.partition(", ")[0] == wanted and cell.method != FLOOR.name]
    row = markdown_table(own)
    others = "[Beside random eviction, the full cache and all other methods, with what the columns are](index.md)."
    parts = [
        NOTE, f"# {name}", docstrings.summary(kind), "## Formula", f"```math\n{SAID[name]['formula'].strip()}\n```",
        "[What the letters are](index.md#letters).", docstrings.body(kind),
        "## Source", sources(kind), "## Its rows", f"{row}\n\n{others}",
        "## When to use it", SAID[name]["when"].strip(),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def sources(kind: type) -> str:
    """Papers that the docstring names, the class and its settings."""
    said = f"{docstrings.summary(kind)} {docstrings.body(kind)}"
    papers = [f"[arXiv {n}](https://arxiv.org/abs/{n})" for n in dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", said))]
    anchor = f"[settings](../settings.md#{kind.__name__.lower()})"
    return ", ".join([*papers, f"`{kind.__module__}.{kind.__name__}`", anchor]) + "."
