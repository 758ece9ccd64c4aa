"""A page per compressor: its docstring, its formula, its row of ``sparse-rl benchmark``, and when to use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from docs import docstrings, listing
from sparse_rl_lightning.cli.benchmark import FULL
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
    cells = [Cell(**own) for own in kept["cells"]]
    found = {folder / f"{name}.md": method_page(name, cells, kept["remark"]) for name in KIND}
    return {folder / "index.md": index_page(kept, cells), **found}


def index_page(kept: dict[str, Any], cells: list[Cell]) -> str:
    """The whole table, and how it came about."""
    place = f"{kept['machine']}. {kept['remark']}".strip()
    policy = f"Policy {kept['policy']}, held-out sums, texts of {kept['lengths'][0]} tokens on average."
    parts = [
        NOTE,
        "# Method by method",
        "Every compressor with its formula, its source, its row of one table, and when to use it. The table is that of "
        "`sparse-rl benchmark` ([what its columns are](../choosing.md#measure-your-own)), over all methods by "
        "`python -m benchmarks.methods --save benchmarks/results`; [compressors](../compressors.md#measured) has other "
        "tasks, with texts of the full cache in place of each method's own.",
        f"{place} {policy} Buffer 4, one sink, a window of 4; LagKV's chunks are 5 tokens, `Combined` is `SnapKV` and "
        "`KeyDiff`, `Drawn` is around `SnapKV`. The first row never evicts the prompt, the others may.",
        markdown_table(cells),
        explained(),
        f"## Letters\n\n{LETTERS}",
        "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(KIND) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def method_page(name: str, cells: list[Cell], remark: str) -> str:
    """The page of one method."""
    kind = KIND[name]
    own = [cell for cell in cells if cell.method == (FULL.name if name == "FullKV" else name)]
    row = f"{markdown_table(own)}\n\n{remark}" if own else "None: it has to be learned first."
    others = "[Beside random eviction, the full cache and all other methods, with what the columns are](index.md)."
    parts = [
        NOTE, f"# {name}", docstrings.summary(kind), "## Formula", f"```math\n{SAID[name]['formula'].strip()}\n```",
        "[What the letters are](index.md#letters).", docstrings.body(kind),
        "## Source", sources(kind), "## Its row", f"{row} {others}", "## When to use it", SAID[name]["when"].strip(),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def sources(kind: type) -> str:
    """Papers that the docstring names, the class and its settings."""
    said = f"{docstrings.summary(kind)} {docstrings.body(kind)}"
    papers = [f"[arXiv {n}](https://arxiv.org/abs/{n})" for n in dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", said))]
    anchor = f"[settings](../settings.md#{kind.__name__.lower()})"
    return ", ".join([*papers, f"`{kind.__module__}.{kind.__name__}`", anchor]) + "."
