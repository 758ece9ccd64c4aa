"""Several runs on one page: their numbers with differences, the settings in which they differ, all curves together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_rl_lightning.report.html import document, folded, table, text
from sparse_rl_lightning.report.page import charts, course, warnings_of
from sparse_rl_lightning.report.plots import COLORS, color, plots_of_runs
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.terminal import CACHES
from sparse_rl_lightning.text import DASH, duration, number, percent, shortened, size

Named = Sequence[tuple[str, RunRecord]]

PLACES = re.compile(r"(^|\.)(default_root_dir|dirpath|save_dir|folder|version)$|^trainer\.logger\..*name$")
"""Keys that only say where a run writes."""
STAGES = ("rollout", "rescoring", "rewards", "update")


@dataclass(frozen=True)
class Measure:
    """A row of the table: how to find a number in a record, to write it, and to write how two differ."""

    label: str
    find: Callable[[RunRecord, dict[str, Any]], float | None]
    write: Callable[[float], str]
    differ: Callable[[float, float], str]


def comparison(records: Named) -> str:
    """The page as text.

    Args:
        records: Each run under the name to show for it, the one that the others are compared with first.

    Raises:
        ValueError: If there are fewer than two runs, or two have the same name.
    """
    names = [name for name, _ in records]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"A comparison needs at least two runs, each under a name of its own, got {names}.")
    title = f"{len(records)} runs compared"
    parts = [
        f"<h1>{text(title)}</h1>", _runs(records), _notes(records), "<h2>Numbers</h2>",
        table(numbers(records), f"Means over rollouts; in brackets the difference from {names[0]}", numbers=True),
        "<h2>Settings that differ</h2>", _settings(records), charts(plots_of_runs(records)),
    ]  # fmt: skip
    return document(title, "\n".join(part for part in parts if part))


def numbers(records: Named) -> list[list[str]]:
    """Rows of the table of summaries, header first; what no run has is left out."""
    summaries = [(record, record.summary()) for _, record in records]
    rows = [["", *(shortened(name, 60) for name, _ in records)]]
    for measure in _measures(summaries):
        values = [measure.find(record, summary) for record, summary in summaries]
        if any(value is not None for value in values):
            rows.append(
                [measure.label, *(_cell(measure, value, values[0], place) for place, value in enumerate(values))]
            )
    return rows


def differing_settings(records: Named) -> tuple[list[list[str]], int]:
    """Rows of settings that differ, header first, and how many are the same; where a run writes counts for neither."""
    told = [{**record.settings, **record.versions, **record.config} for _, record in records]
    told = [_with_arguments(one, told) for one in told]
    keys = [key for key in dict.fromkeys(key for one in told for key in one) if not PLACES.search(key)]
    rows = [[key, *(one.get(key, DASH) for one in told)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return [["setting", *(name for name, _ in records)], *differing], len(rows) - len(differing)


def _with_arguments(own: dict[str, str], told: list[dict[str, str]]) -> dict[str, str]:
    """A callback that another run lacks becomes one setting with its arguments, not one per argument."""
    lacking = [key for key, value in own.items() if value == "used" and any(key not in other for other in told)]
    kept = {key: value for key, value in own.items() if not key.startswith(tuple(f"{name}." for name in lacking))}
    for name in lacking:
        arguments = {key.removeprefix(f"{name}."): value for key, value in own.items() if key.startswith(f"{name}.")}
        given = ", ".join(f"{key}={value}" for key, value in arguments.items() if value != "null")
        kept[name] = f"used: {given}" if given else "used"
    return kept


def _measures(summaries: Sequence[tuple[RunRecord, dict[str, Any]]]) -> list[Measure]:
    points, plain = _difference(100.0, 1, " pp"), _difference(1.0, 3)
    greedy = [
        Measure(f"greedy {'/'.join(dict.fromkeys(r.measure for r, _ in summaries))}, {name}, {moment}",
                lambda _, s, moment=moment, cache=cache: s[moment].get(cache), number, plain)  # type: ignore[misc]
        for cache, name in CACHES.items() for moment in ("before", "after")
    ]  # fmt: skip
    stages = [
        Measure(f"seconds per rollout, {stage}", lambda r, _, key=f"time/{stage}": r.mean(key), number, _ratio)  # type: ignore[misc]
        for stage in STAGES
    ]
    return [
        *greedy,
        Measure("reward, last tenth of the rollouts", lambda r, _: _late(r, "reward"), number, plain),
        Measure("completion length, last tenth, tokens", lambda r, _: _late(r, "completions/mean_length"),
                lambda v: number(v, 1), _difference(1.0, 1)),
        Measure("rejected sequences", lambda _, s: s["rejection_rate"], percent, points),
        Measure("mismatch KL (k3), nats per token", lambda _, s: s["mismatch_kl_k3"], lambda v: number(v, 4),
                _difference(1.0, 4)),
        Measure("acceptance, 5th percentile", lambda r, _: r.mean("acceptance/p05"), number, plain),
        Measure("KV tokens saved at the end of a sequence", lambda _, s: s["kv_saving_final"], percent, points),
        Measure("KV tokens saved over all decode steps", lambda _, s: s["kv_saving_integral"], percent, points),
        Measure("peak KV memory", lambda _, s: s["kv_peak_bytes"], size, _ratio),
        Measure("repeated 4-grams", lambda _, s: s["repetition_rate"], percent, points),
        Measure("rollout speed, tokens per second", lambda _, s: s["tokens_per_second"], _count, _ratio),
        *stages,
        Measure("rollouts", lambda _, s: s["rollouts"], _count, _difference(1.0, 0)),
        Measure("optimiser steps", lambda _, s: s["optimizer_steps"] or None, _count, _difference(1.0, 0)),
        Measure("time of training", lambda _, s: s["wall_time_seconds"] or None, duration, _ratio),
    ]  # fmt: skip


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _late(record: RunRecord, key: str) -> float | None:
    last = RunRecord(history=record.history[-max(1, len(record.history) // 10) :])
    return last.mean(key)


def _cell(measure: Measure, value: float | None, first: float | None, place: int) -> str:
    if value is None:
        return DASH
    change = f" ({measure.differ(value, first)})" if place and first is not None else ""
    return measure.write(value) + change


def _difference(factor: float, digits: int, unit: str = "") -> Callable[[float, float], str]:
    def differ(value: float, first: float) -> str:
        shown = f"{factor * (value - first):+.{digits}f}".replace("-", "−")
        return ("±" + shown[1:] if not float(shown[1:]) else shown) + unit

    return differ


def _ratio(value: float, first: float) -> str:
    return f"×{value / first:.2f}" if first > 0 else DASH


def _runs(records: Named) -> str:
    items = []
    for place, (name, record) in enumerate(records):
        told = warnings_of(record)
        warned = (
            folded(f"{len(told)} warnings", f"<ul>{''.join(f'<li>{text(w)}</li>' for w in told[:20])}</ul>")
            if told
            else ""
        )
        items.append(
            f'<article class="{color(place)}"><b><i class="swatch"></i> {text(shortened(name, 200))}</b>'
            f'<p>{text(record.title)}</p><p class="soft">{text(course(record))}</p>{warned}</article>'
        )
    return f'<div class="cards runs">{"".join(items)}</div>'


def _notes(records: Named) -> str:
    """What makes numbers hard to compare."""
    notes = []
    tested = {(r.measure, r.num_problems) for _, r in records if r.before or r.after}
    if len(tested) > 1:
        how = [f"{shortened(name, 60)} by {r.measure} on {r.num_problems} problems" for name, r in records]
        notes.append(f"The runs were not tested alike: {', '.join(how)}.")
    if len({len(r.history) for _, r in records}) > 1:
        notes.append("The runs are not equally long, so that means over all rollouts speak of different stretches.")
    if len(records) > COLORS:
        notes.append(f"Only {COLORS} lines of a chart can be told apart: run {COLORS + 1} looks like the first.")
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return f'<section class="warnings"><b>Mind</b><ul>{items}</ul></section>' if notes else ""


def _settings(records: Named) -> str:
    unknown = [name for name, record in records if not record.config]
    rows, same = differing_settings(records)
    parts = []
    if unknown:
        names = ", ".join(shortened(name, 60) for name in unknown)
        parts.append(f'<p class="soft">No whole configuration was recorded of {text(names)}.</p>')
    if len(rows) > 1:
        parts.append(table([rows[0], *rows[1:200]], f"{len(rows) - 1} settings differ, {same} are the same"))
    elif same:
        parts.append(f'<p class="soft">None: all {same} settings are the same.</p>')
    return "\n".join(parts)
