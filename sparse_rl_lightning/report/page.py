"""The HTML page of a run: one file, no network, readable on a phone, in light and in dark."""

from __future__ import annotations

from itertools import groupby

from sparse_rl_lightning.report.html import document, folded, table, text
from sparse_rl_lightning.report.panels import SECTIONS
from sparse_rl_lightning.report.plots import MOST_POINTS, Plots, plots_of_run
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.svg import figure
from sparse_rl_lightning.report.terminal import CACHES, facts, results
from sparse_rl_lightning.report.worst import held_out_samples, worst_completions
from sparse_rl_lightning.text import duration, number, shortened

COUNTS = (
    ("skipped_steps", "Optimiser steps skipped because their gradient was not finite"),
    ("empty_rollouts", "Rollouts of which rejection kept no token"),
    ("guard/raises", "Times TailGuard raised the budget"),
)
"""Counters of the history, whose last value is the whole run's."""


HINT = (
    "Numbers beside the names of lines are the last ones; point at a chart, or touch it, to read all charts at that "
    "rollout. Bold lines are means over neighbouring rollouts, pale ones the values."
)


def page(record: RunRecord) -> str:
    """The page as text; of a run without numbers of some kind it has no panel for them.

    Args:
        record: The run, finished or not. All its text is escaped, long text is cut.
    """
    parts = [
        f"<h1>{text(record.title)}</h1>", f'<p class="soft">{text(course(record))}</p>', _warnings(record),
        _tiles(record), charts(plots_of_run(record), _note(record)), worst_completions(record),
        held_out_samples(record), _tables(record),
    ]  # fmt: skip
    return document(record.title, "\n".join(part for part in parts if part))


def course(record: RunRecord) -> str:
    """How far the run came, and how it ended."""
    steps = f", {record.steps:,} optimiser steps" if record.steps else ""
    time = f", {duration(record.seconds)}" if record.seconds else ""
    when = f" Written {record.written.replace('T', ' ').replace('+00:00', ' UTC')}." if record.written else ""
    state = {
        "finished": "", "unknown": " Whether it finished is not known.",
        "running": " Not finished: it goes on, or was killed.",
    }.get(record.state, f" Not finished: {record.state}.")  # fmt: skip
    return f"{len(record.history):,} rollouts{steps}{time}.{state}{when}"


def warnings_of(record: RunRecord) -> list[str]:
    """What went wrong in the run: counters first, then what callbacks said and at which rollout."""
    told = []
    for key, words in COUNTS:
        count = next((row[key] for row in reversed(record.history) if key in row), 0.0)
        told += [f"{words}: {count:,.0f}."] if count > 0 else []
    for key in sorted({key for row in record.history for key in row if key.endswith("/failed")}):
        failed = sum(row.get(key, 0.0) for row in record.history)
        name = key.removeprefix("rewards/").removesuffix("/failed")
        told += [f"Samples that the reward function {name} could not judge: {failed:,.0f}."] if failed > 0 else []
    for warning in record.warnings:
        place, words = warning.get("rollout"), str(warning.get("text") or "")
        where = f"Rollout {place:.0f}: " if isinstance(place, (int, float)) and place >= 0 else ""
        told += [where + shortened(words, 800)] if words else []
    return told


def charts(plots: Plots, note: str = "") -> str:
    """All charts under the headings of their sections."""
    parts = [f'<p class="soft hint">{HINT}</p>'] if plots else []
    ordered = sorted(plots, key=lambda one: SECTIONS.index(one[0]))  # stable
    for section, group in groupby(ordered, key=lambda one: one[0]):
        figures = "\n".join(figure(plot) for _, plot in group)
        parts.append(f'<h2>{text(section)}</h2>\n<div class="charts">\n{figures}\n</div>')
    return "\n".join([*parts, note])


def _note(record: RunRecord) -> str:
    size = -(-len(record.history) // MOST_POINTS)
    if size < 2:
        return ""
    return f'<p class="soft">The run is long: each point of a chart stands for {size} rollouts.</p>'


def _warnings(record: RunRecord) -> str:
    told = warnings_of(record)
    shown = "\n".join(f"<li>{text(words)}</li>" for words in told[:20])
    more = f"<li>and {len(told) - 20:,} more</li>" if len(told) > 20 else ""
    return f'<section class="warnings"><b>Warnings</b><ul>{shown}{more}</ul></section>' if told else ""


def _tiles(record: RunRecord) -> str:
    tiles = []
    for cache, name in CACHES.items():
        before, after = record.before.get(cache), record.after.get(cache)
        if before is not None or after is not None:
            change = number(before) if after is None else f"{number(before)} → {number(after)}"
            tiles.append((f"greedy {record.measure}, {name}", change))
    tiles += facts(record)
    cells = "\n".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(label)}</span></div>' for label, value in tiles
    )
    return f'<div class="tiles">\n{cells}\n</div>' if tiles else ""


def _tables(record: RunRecord) -> str:
    parts = []
    rows = results(record)
    if rows:
        parts.append("<h2>Numbers</h2>\n" + table(rows, "Before and after training", numbers=True))
    about = {**record.settings, **record.versions}
    if about:
        parts.append(
            "<h2>Settings</h2>\n" + table([["setting", "value"], *map(list, about.items())], "Settings and versions")
        )
    if record.config:
        rows = [["key", "value"], *map(list, record.config.items())]
        parts.append(folded(f"Whole configuration, {len(record.config)} keys", table(rows, "Configuration")))
    return "\n".join(parts)
