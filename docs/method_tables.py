"""The tables of ``sparse-rl benchmark`` on a real model, for ``methods.md`` and ``choosing.md``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.tables import Table
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.quality.page import markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "methods.json"
TITLES = {
    "all": "Every method, budget 96",
    "budgets": "Random eviction and the best, other budgets",
    "others": "Three more of the best, other budgets",
    "sinks": "Without sinks, budget 128",
    "cool": "Temperature 0.7, budget 128",
    "open": "Prompts of at most 96 tokens, not protected, budget 192",
    "kept": "The same prompts, protected, budget 192",
    "newer": "Newer methods, the same prompts",
}
"""Headings of the parts of the run, in the order of the page."""
SHOWN = ("kl", "rejected", "length")
"""Numbers with their intervals."""


def run_parts() -> dict[str, dict[str, Any]]:
    """What was measured and when, by part."""
    parts: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))["parts"]
    return parts


def cells_of(part: str) -> list[Cell]:
    """What was measured in a part, without rows that say why they are empty."""
    cells = (Cell(**values) for values in run_parts()[part]["cells"])
    return [cell for cell in cells if not cell.reason]


def part_table(part: str) -> str:
    """The closest to the full cache first, with some of the intervals; what replay came to is in the page's words."""
    cells = sorted(cells_of(part), key=lambda cell: (cell.budget or 0, cell.kl or 0.0))
    intervals = [{name: interval for name, interval in cell.intervals.items() if name in SHOWN} for cell in cells]
    shown = zip(cells, intervals, strict=True)
    return markdown_table([replace(cell, replay_difference=None, intervals=some) for cell, some in shown])


def runs_table() -> str:
    """The problems and the machine of every table."""
    rows = [
        "| table | questions | mean completion, full cache | mean sequence | longest | run |",
        "|---|---:|---:|---:|---:|---|",
    ]
    parts = run_parts()
    for part, title in TITLES.items():
        run = parts[part]
        lengths, (mean, longest) = run["completions"], run["lengths"]
        cells = (title, len(lengths), f"{sum(lengths) / len(lengths):.0f}", mean, longest, run["machine"])
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def chosen_table() -> str:
    """Every compressor at 96 tokens, for who has to choose."""
    table = Table("", ("compressor", "KL", "agreement", "tail", "rejected", "length of completions"))
    for cell in sorted(cells_of("all"), key=lambda cell: cell.kl or 0.0):
        low, high = cell.intervals["length"]
        length = "1" if cell.budget is None else f"{cell.length:.2f} [{low:.2f}, {high:.2f}]"
        shares = f"{max(cell.kl or 0.0, 0.0):.3f}", f"{cell.agreement:.3f}", f"{cell.tail:.3f}", f"{cell.rejected:.1%}"
        table.add(cell.method, *shares, length)
    return table.untitled
