"""Several runs on one page: their numbers with differences, the settings that differ, all curves together."""

from __future__ import annotations

import re

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.report.measures import MEASURES, greedy
from sparse_rl_lightning.report.page import course, figures, render, warnings_of
from sparse_rl_lightning.report.plots import COLORS, Named, color, plots_of_runs
from sparse_rl_lightning.report.record import REPLAYED
from sparse_rl_lightning.text import DASH, shortened

PLACES = re.compile(r"(^|\.)(default_root_dir|dirpath|save_dir|folder|version)$|^trainer\.logger\..*name$")
"""Keys that only name a place where a run writes."""


def comparison(records: Named) -> str:
    """The page of runs, each under its name, as text; the others are compared with the first.

    Raises:
        ValueError: If there are fewer than two runs, or two have the same name.
    """
    names = [name for name, _ in records]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"A comparison needs at least two runs, each under a name of its own, got {names}.")
    differing, same = differing_settings(records)
    runs = [
        {"name": name, "title": record.title, "color": color(place), "course": course(record),
         "warnings": warnings_of(record)}
        for place, (name, record) in enumerate(records)
    ]  # fmt: skip
    return render(
        title=f"{len(records)} runs compared",
        runs=runs,
        notes=_notes(records),
        numbers=numbers(records),
        unknown=", ".join(shortened(name, 60) for name, record in records if not record.config),
        differing=differing,
        same=same,
        figures=figures(plots_of_runs(records)),
    )


def numbers(records: Named) -> list[list[str]]:
    """Rows of the table of summaries, header first, without numbers that no run has."""
    rows = [["", *(shortened(name, 60) for name, _ in records)]]
    for measure in [*greedy([record for _, record in records]), *MEASURES]:
        values = [measure.find(record) for _, record in records]
        if any(value is not None for value in values):
            rows.append([measure.label, *(measure.cell(value, values[0] if place else None)
                                          for place, value in enumerate(values))])  # fmt: skip
    return rows


def differing_settings(records: Named) -> tuple[list[list[str]], int]:
    """Rows of settings that differ, header first, and the number of equal ones; output paths count for neither."""
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


def _notes(records: Named) -> list[str]:
    """Reasons why the numbers are hard to compare."""
    notes = []
    tested = {(r.measure, r.num_problems) for _, r in records if r.before or r.after}
    if len(tested) > 1:
        how = [f"{shortened(name, 60)} by {r.measure} on {r.num_problems} problems" for name, r in records]
        notes.append(f"The runs were not tested alike: {', '.join(how)}.")
    if len({len(r.history) for _, r in records}) > 1:
        notes.append("The runs are not equally long, so that means over all rollouts cover different stretches.")
    if len({any(REPLAYED in row for row in r.history) for _, r in records}) > 1:
        notes.append(
            "Some runs replay what they sampled. Their mismatch is of the rollouts that MismatchSplit measured, free "
            "of rounding; that of the others is of all rollouts."
        )
    if len(records) > COLORS:
        notes.append(f"Only {COLORS} lines of a chart can be told apart: run {COLORS + 1} looks like the first.")
    return notes
