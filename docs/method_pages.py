"""A page per compressor: its docstring, its formula, its row of ``sparse-rl benchmark``, and when to use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from docs import docstrings, listing
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.quality.page import LEGEND, markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "methods.json"
FLOOR, FULL = "RandomEviction, prompt kept", "full cache"
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
    found = {folder / f"{name}.md": method_page(name, cells) for name in KIND}
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
        LEGEND.replace("\n", " "),
        "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(KIND) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def method_page(name: str, cells: list[Cell]) -> str:
    """The page of one method."""
    kind = KIND[name]
    own = [cell for cell in cells if cell.method == (FULL if name == "FullKV" else name)]
    others = [cell for cell in cells if cell.method in (FLOOR, FULL) and cell not in own]
    row = (
        markdown_table([*others, *own])
        + "\n\n"
        + " ".join(filter(None, [verdict(own, others), "[All methods](index.md)."]))
    )
    parts = [
        NOTE, f"# {name}", docstrings.summary(kind), "## Formula", f"```math\n{SAID[name]['formula'].strip()}\n```",
        LETTERS, docstrings.body(kind),
        "## Source", sources(kind), "## Its row", row, "## When to use it", SAID[name]["when"].strip(),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def sources(kind: type) -> str:
    """Papers that the docstring names, the class and its settings."""
    said = f"{docstrings.summary(kind)} {docstrings.body(kind)}"
    papers = [f"[arXiv {n}](https://arxiv.org/abs/{n})" for n in dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", said))]
    anchor = f"[settings](../settings.md#{kind.__name__.lower()})"
    return ", ".join([*papers, f"`{kind.__module__}.{kind.__name__}`", anchor]) + "."


def verdict(own: list[Cell], others: list[Cell]) -> str:
    """What the row says beside random eviction: by intervals for the accuracy, by size for the tail."""
    floor = {cell.budget: cell for cell in others if cell.method == FLOOR}
    said = []
    for cell in own:
        beside = floor.get(cell.budget)
        if not beside or cell.low is None or cell.high is None or beside.low is None or beside.high is None:
            continue
        word = "above" if cell.low > beside.high else "below" if cell.high < beside.low else "not told apart from"
        tail = "higher" if (cell.tail or 0) > (beside.tail or 0) else "not higher"
        said.append(f"at {cell.budget} accuracy {word} it, tail {tail}")
    return f"Beside random eviction that keeps the prompt, by 95 % intervals: {'; '.join(said)}." if said else ""
