"""Tables of one page that quote the measured tables of others, so that a new measurement changes both."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
COMPARED = (
    "FullKV", "RandomEviction", "StreamingLLM", "KeyDiff", "LagKV", "TOVA", "SnapKV", "RKV",
    "Mixture of SnapKV and KeyDiff",
)  # fmt: skip
CORRECTED = ("dense", "naive", "Sparse-RL", "replay")
Row = dict[str, str]


def measured(page: str, heading: str = "Measured") -> list[Row]:
    """The rows of the first table below a heading, cells by the column's title; the first column's may be empty."""
    section = re.split(rf"^#+ {re.escape(heading)}$", (FOLDER / page).read_text("utf-8"), flags=re.MULTILINE)[1]
    table = re.search(r"^\|.*(?:\n\|.*)+", section, re.MULTILINE)
    if table is None:
        raise ValueError(f"there is no table below {heading} in docs/{page}.")
    titles, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in _padded(table[0])]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def _padded(table: str) -> list[str]:
    """Lines whose empty cells are spelled, so that they can be split."""
    return [re.sub(r"\|\s*(?=\|)", "| – ", line) for line in table.splitlines()]


def budgets_table() -> str:
    """Accuracy with the full cache by budget and arm, and what Sparse-RL rejects."""
    found = {(row["budget"], row["–"]): row for row in measured("replay.md")}
    lines = [f"| budget | {' | '.join(CORRECTED)} | rejected by Sparse-RL |", "|---" * (len(CORRECTED) + 2) + "|"]
    for budget in dict.fromkeys(budget for budget, _ in found):
        cells = [found[budget, arm]["full cache"] for arm in CORRECTED]
        rejected = found[budget, "Sparse-RL"]["sequences rejected"]
        lines.append(f"| {' | '.join([budget, *cells, rejected])} |")
    return "\n".join(lines)


def compressors_table() -> str:
    """Some compressors by accuracy, tail and cost, from the budgets where they differ most."""
    found = {row["–"]: row for row in measured("compressors.md")}
    lines = [
        "| compressor | sums, 75 % | stories, tail at 50 % | events per second, stories at 50 % |",
        "|---|---|---|---|",
    ]
    for name in COMPARED:
        row = found[name]
        cells = (
            _at(75, row["sums: greedy accuracy"]),
            _at(50, row["stories: acceptance, 5th percentile"]),
            _at(50, row["stories: events/s"]),
        )
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _at(percent: int, cell: str) -> str:
    """One of the three budgets of a cell, without the mark of what is not better than chance."""
    return cell.split(" / ")[(25, 50, 75).index(percent)].removesuffix("↓")


def learner_table() -> str:
    """Peak memory of the learner's log-probs, all logits against chunks."""
    rows = measured("../benchmarks/results/learner-cpu.md", "Log-probs and entropies, forward and backward")
    names = ("way", "logits at a time", "peak GiB")
    lines = [f"| {' | '.join(row[name] for name in names)} |" for row in rows]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *lines])
