"""Cells as one table, in the terminal or in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.text import DASH, interval, number, printable, table

MEANINGS = {
    "tail": "5th percentile of the acceptance of sampled tokens",
    "agreement": "share of them with the same most likely token under both caches",
    "KL": "of compressed to full-cache policy, nats per token",
    "rejected": "expected share of sequences with a token whose ratio is below 1e-4",
    "length": "of completions, over the full cache's",
    "accuracy [95 %]": "of greedy answers, in %",
    "KV saved": "share not stored at the end",
    "ms/event": "one compression of a sequence in all layers, by native kernels where the method has some",
    "time": "per token over the full cache's, on the same completions in turns",
    "replay": "largest difference between the log-probabilities of sampler and replay",
}
"""What the columns behind method and budget are."""
FORMS = {
    "tail": (3, 1, ""),
    "agreement": (3, 1, ""),
    "kl": (3, 1, ""),
    "rejected": (1, 100, " %"),
    "length": (2, 1, ""),
}
"""Numbers that have intervals: digits, factor and unit."""
ON_THE_PAGE = ("KV saved", "replay")
"""Columns that are not in a terminal, which is narrow."""
WIDTH, COLUMNS = 30, 120


def rows(cells: Sequence[Cell], intervals: bool = False) -> list[list[str]]:
    """The head and a row per cell; a method is named in its first row. Five numbers may have their intervals."""
    written = [["method", "budget", *MEANINGS]]
    for index, cell in enumerate(cells):
        is_first = index == 0 or cells[index - 1].method != cell.method
        name = printable(cell.method, WIDTH) if is_first else ""
        saved = DASH if cell.kv_saving is None else f"{100 * cell.kv_saving:.0f} %"
        replay = DASH if cell.replay_difference is None else f"{cell.replay_difference:.0e}"
        accuracy = DASH
        if cell.accuracy is not None and cell.low is not None and cell.high is not None:
            accuracy = interval(cell.accuracy, cell.low, cell.high)
        estimates = [_estimate(cell, name, intervals) for name in FORMS]
        costs = [saved, number(cell.event_ms), number(cell.time_ratio, 2), replay]
        written.append([name, "full" if cell.budget is None else str(cell.budget), *estimates, accuracy, *costs])
    return written


def _estimate(cell: Cell, name: str, intervals: bool) -> str:
    """A number that has an interval, with it or without."""
    value, (digits, scale, unit) = getattr(cell, name), FORMS[name]
    if value is None:
        return DASH
    bounds = [number(scale * bound, digits) for bound in cell.intervals.get(name, ())] if intervals else []
    around = f" [{', '.join(bounds)}]" if bounds else ""
    return f"{number(scale * value, digits)}{around}{unit}"


def measured(written: list[list[str]], without: Sequence[str] = ()) -> list[list[str]]:
    """A table without columns in which nothing was measured, and without those of these names."""
    columns = zip(*written, strict=True)
    kept = [column for column in columns if column[0] not in without and any(cell != DASH for cell in column[1:])]
    return [list(row) for row in zip(*kept, strict=True)]


def notes(cells: Sequence[Cell], columns: Sequence[str]) -> list[str]:
    """What the columns are, and why cells are empty, a line per method and reason."""
    budgets: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.reason:
            budgets.setdefault((cell.method, cell.reason), []).append(str(cell.budget))
    legend = " ".join(f"{name}: {MEANINGS[name]}." for name in columns if name in MEANINGS)
    reasons = [f"{method}, budget {', '.join(empty)}: {reason}" for (method, reason), empty in budgets.items()]
    return [legend, *reasons]


def terminal(cells: Sequence[Cell]) -> str:
    """The table for a terminal, what its columns mean, and why some are empty."""
    narrow = measured(rows(cells), ON_THE_PAGE)
    lines = [textwrap.fill(printable(note), COLUMNS, subsequent_indent="  ") for note in notes(cells, narrow[0])]
    return "\n".join([table(narrow, "l" + "r" * (len(narrow[0]) - 1)), "", *lines])


def markdown_table(cells: Sequence[Cell]) -> str:
    """The table in Markdown, with intervals."""
    wide = measured(rows(cells, intervals=True))
    head, *lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in wide]
    return "\n".join([head, "|---|" + "---:|" * (len(wide[0]) - 1), *lines])


def markdown(cells: Sequence[Cell]) -> str:
    """The table, what its columns mean and the reasons, in Markdown."""
    legend, *reasons = notes(cells, list(MEANINGS))
    items = [f"- {reason}" for reason in reasons]
    return "\n\n".join([markdown_table(cells), f"{legend} In brackets: 95 % intervals.", *items]) + "\n"
