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
    "method", "budget", "tail", "agreement", "accuracy [95 %]", "KV saved", "ms/event", "time/token", "replay",
)  # fmt: skip
LEGEND = (
    "tail: 5th percentile of the acceptance of sampled tokens. agreement: share of them where both caches have the\n"
    "same favorite. accuracy: of greedy answers, in %. KV saved: share not stored at the end. ms/event: cutting one\n"
    "sequence in all layers. time/token: over that of the full cache, the same texts in turns. replay: largest\n"
    "difference between the log-probabilities of sampler and replay."
)
WIDTH, COLUMNS = 30, 120


def rows(cells: Sequence[Cell]) -> list[list[str]]:
    """The head and a row per cell; a method is named in its first row."""
    found = [list(HEAD)]
    for place, cell in enumerate(cells):
        is_first = place == 0 or cells[place - 1].method != cell.method
        name = printable(cell.method, WIDTH) if is_first else ""
        found.append([name, "full" if cell.budget is None else str(cell.budget), *_numbers(cell)])
    return found


def _numbers(cell: Cell) -> list[str]:
    interval, replay = DASH, DASH
    if cell.accuracy is not None and cell.low is not None and cell.high is not None:
        interval = f"{100 * cell.accuracy:.1f} [{100 * cell.low:.1f}, {100 * cell.high:.1f}]"
    if cell.replay_difference is not None:
        replay = f"{cell.replay_difference:.0e}"
    saving = DASH if cell.kv_saving is None else f"{100 * cell.kv_saving:.0f} %"
    return [
        number(cell.tail), number(cell.agreement), interval, saving, number(cell.event_ms), number(cell.time_ratio, 2),
        replay,
    ]  # fmt: skip


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
    return "\n\n".join(filter(None, [table(rows(cells), "l" + "r" * 8), LEGEND, said]))


def markdown_table(cells: Sequence[Cell]) -> str:
    """The table in Markdown."""
    head, *others = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows(cells)]
    return "\n".join([head, "|---|" + "---:|" * (len(HEAD) - 1), *others])


def markdown(cells: Sequence[Cell]) -> str:
    """The table, what its columns mean and the reasons, in Markdown."""
    said = [f"- {reason}" for reason in reasons(cells)]
    return "\n\n".join([markdown_table(cells), LEGEND.replace("\n", " "), *said]) + "\n"


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
