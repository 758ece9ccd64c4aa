"""Cells as one table, in the terminal or in Markdown, and as a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from sparse_rl_lightning.files import write_files
from sparse_rl_lightning.quality.cells import Cell
from sparse_rl_lightning.report.charts import LIGHT, STYLE
from sparse_rl_lightning.text import DASH, number, printable, table

HEAD = (
    "method", "budget", "tail", "agreement", "KL", "rejected", "length", "accuracy [95 %]", "KV saved", "ms/event",
    "time", "replay",
)  # fmt: skip
ON_THE_PAGE = ("KV saved", "replay")  # and not in a terminal, which is narrow
LEGEND = (
    "tail: 5th percentile of the acceptance of sampled tokens. agreement: share of them with the same most likely\n"
    "token under both caches. KL: of compressed to full-cache policy, nats per token. rejected: expected share of\n"
    "sequences with a token whose ratio is below 1e-4. length: of completions, over the full cache's. accuracy: of\n"
    "greedy answers, in %."
)
OF_TIMES = (
    "\nms/event: one compression of a sequence in all layers, by native kernels where the method has some. time: per\n"
    "token over the full cache's, on the same completions in turns."
)
WIDTH, COLUMNS = 30, 120


def rows(cells: Sequence[Cell], intervals: bool = False) -> list[list[str]]:
    """The head and a row per cell; a method is named in its first row. Five numbers may have their intervals."""
    found = [list(HEAD)]
    for place, cell in enumerate(cells):
        is_first = place == 0 or cells[place - 1].method != cell.method
        name = printable(cell.method, WIDTH) if is_first else ""
        found.append([name, "full" if cell.budget is None else str(cell.budget), *_numbers(cell, intervals)])
    return found


def _numbers(cell: Cell, intervals: bool) -> list[str]:
    accuracy = DASH
    if cell.accuracy is not None and cell.low is not None and cell.high is not None:
        accuracy = f"{100 * cell.accuracy:.1f} [{100 * cell.low:.1f}, {100 * cell.high:.1f}]"
    saved = DASH if cell.kv_saving is None else f"{100 * cell.kv_saving:.0f} %"
    replay = DASH if cell.replay_difference is None else f"{cell.replay_difference:.0e}"
    return [
        *(_estimate(cell, name, intervals) for name in ("tail", "agreement", "kl", "rejected", "length")),
        accuracy, saved, number(cell.event_ms), number(cell.time_ratio, 2), replay,
    ]  # fmt: skip


def _estimate(cell: Cell, name: str, intervals: bool) -> str:
    """A number that has an interval, with it or without."""
    value, bounds = getattr(cell, name), cell.intervals.get(name) if intervals else None
    if value is None:
        return DASH
    digits, scale, unit = {"rejected": (1, 100, " %"), "length": (2, 1, "")}.get(name, (3, 1, ""))
    around = f" [{', '.join(number(scale * bound, digits) for bound in bounds)}]" if bounds else ""
    return f"{number(scale * value, digits)}{around}{unit}"


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Why cells are empty, a line per method and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.reason:
            found.setdefault((cell.method, cell.reason), []).append(str(cell.budget))
    return [f"{method}, budget {', '.join(own)}: {why}" for (method, why), own in found.items()]


def terminal(cells: Sequence[Cell]) -> str:
    """The table for a terminal, what its columns mean, and why some are empty."""
    said = "\n".join(textwrap.fill(printable(reason), COLUMNS, subsequent_indent="  ") for reason in reasons(cells))
    narrow = measured(rows(cells), ON_THE_PAGE)
    return "\n\n".join(filter(None, [table(narrow, "l" + "r" * (len(narrow[0]) - 1)), legend(cells), said]))


def legend(cells: Sequence[Cell]) -> str:
    """What the columns of the table in a terminal are."""
    return LEGEND + OF_TIMES * any(cell.time_ratio is not None for cell in cells)


def measured(given: list[list[str]], without: Sequence[str] = ()) -> list[list[str]]:
    """A table without columns in which nothing was measured, and without those of these names."""
    kept = [own for own in zip(*given, strict=True) if own[0] not in without and any(c != DASH for c in own[1:])]
    return [list(row) for row in zip(*kept, strict=True)]


def markdown_table(cells: Sequence[Cell]) -> str:
    """The table in Markdown, with intervals."""
    given = measured(rows(cells, intervals=True))
    head, *others = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in given]
    return "\n".join([head, "|---|" + "---:|" * (len(given[0]) - 1), *others])


def explained(cells: Sequence[Cell]) -> str:
    """What the columns of the table in Markdown are."""
    more = (
        "KV saved: share not stored at the end. replay: largest difference between the log-probabilities of sampler "
        "and replay. In brackets: 95 % intervals over the problems."
    )
    return f"{legend(cells).replace(chr(10), ' ')} {more}"


def markdown(cells: Sequence[Cell]) -> str:
    """The table, what its columns mean and the reasons, in Markdown."""
    said = [f"- {reason}" for reason in reasons(cells)]
    return "\n\n".join([markdown_table(cells), explained(cells), *said]) + "\n"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw tail and accuracy, a row per method and a dot per budget, as a PNG.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell.method for cell in reversed(cells)))
    budgets = list(dict.fromkeys(cell.budget for cell in cells))
    with rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure = Figure(figsize=(9, 0.34 * len(names) + 1.6), layout="constrained")
        tails, answers = figure.subplots(1, 2, sharey=True)
        for place, budget in enumerate(budgets):
            own = [cell for cell in cells if cell.budget == budget and cell.tail is not None]
            at = [names.index(cell.method) + 0.12 * (len(budgets) / 2 - place) for cell in own]
            style = {"fmt": "o", "ms": 5, "color": LIGHT[place % len(LIGHT)]}
            tails.errorbar([c.tail for c in own], at, label=f"{budget or 'full cache'}", **style)
            means = [math.nan if c.accuracy is None else c.accuracy for c in own]
            below, above = (
                [abs(m - (v or 0)) for m, v in zip(means, (getattr(c, b) for c in own), strict=True)]
                for b in ("low", "high")
            )
            answers.errorbar(means, at, xerr=[below, above], lw=1, **style)
        tails.set(title="5th percentile of the acceptance", yticks=range(len(names)))
        tails.set_yticklabels([printable(name, WIDTH) for name in names])
        answers.set(title="greedy accuracy, 95 % intervals")
        figure.legend(
            *tails.get_legend_handles_labels(), loc="outside lower center", ncols=len(budgets), title="budget"
        )
        write_files({path: lambda new: figure.savefig(new, dpi=110, format="png", facecolor="white")})
