"""Several runs on one page: their numbers with differences, the settings in which they differ, all curves together."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from sparse_rl_lightning.report.page import course, figures, render, warnings_of
from sparse_rl_lightning.report.plots import COLORS, Named, color, plots_of_runs
from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.report.terminal import CACHES
from sparse_rl_lightning.text import DASH, duration, number, percent, shortened, size

Find = Callable[[RunRecord], float | None]

PLACES = re.compile(r"(^|\.)(default_root_dir|dirpath|save_dir|folder|version)$|^trainer\.logger\..*name$")
"""Keys that only name the place where a run writes."""


def comparison(records: Named) -> str:
    """The page as text.

    Args:
        records: Each run under the name to show for it; the others are compared with the first.

    Raises:
        ValueError: If there are fewer than two runs, or two have the same name.
    """
    names = [name for name, _ in records]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"A comparison needs at least two runs, each under a name of its own, got {names}.")
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
    """Rows of the table of summaries, header first; a number that no run has is left out."""
    rows = [["", *(shortened(name, 60) for name, _ in records)]]
    for measure in [*_greedy(records), *MEASURES]:
        values = [measure.find(record) for _, record in records]
        if any(value is not None for value in values):
            rows.append([measure.label, *(measure.cell(value, values[0] if place else None)
                                          for place, value in enumerate(values))])  # fmt: skip
    return rows


def differing_settings(records: Named) -> tuple[list[list[str]], int]:
    """Rows of settings that differ, header first, and how many are the same; places of writing count for neither."""
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
    """Reasons why numbers are hard to compare."""
    notes = []
    tested = {(r.measure, r.num_problems) for _, r in records if r.before or r.after}
    if len(tested) > 1:
        how = [f"{shortened(name, 60)} by {r.measure} on {r.num_problems} problems" for name, r in records]
        notes.append(f"The runs were not tested alike: {', '.join(how)}.")
    if len({len(r.history) for _, r in records}) > 1:
        notes.append("The runs are not equally long, so that means over all rollouts cover different stretches.")
    if len(records) > COLORS:
        notes.append(f"Only {COLORS} lines of a chart can be told apart: run {COLORS + 1} looks like the first.")
    return notes


# ---------------------------------------------------------------- the table of numbers


@dataclass(frozen=True)
class Measure:
    """A row of the table: how to find a number in a record, to write it, and to write how two differ."""

    label: str
    find: Find
    write: Callable[[float], str]
    differ: Callable[[float, float], str]

    def cell(self, value: float | None, first: float | None) -> str:
        """A number, with its difference from the first run's in brackets."""
        if value is None:
            return DASH
        return self.write(value) + ("" if first is None else f" ({self.differ(value, first)})")


def _difference(digits: int, factor: float = 1.0, unit: str = "") -> Callable[[float, float], str]:
    def differ(value: float, first: float) -> str:
        shown = f"{factor * (value - first):+.{digits}f}".replace("-", "−")
        return ("±" + shown[1:] if not float(shown[1:]) else shown) + unit

    return differ


def _ratio(value: float, first: float) -> str:
    return f"×{value / first:.2f}" if first > 0 else DASH


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _mean(key: str) -> Find:
    return lambda record: record.mean(key)


def _late(key: str) -> Find:
    return lambda record: RunRecord(history=record.history[-max(1, len(record.history) // 10) :]).mean(key)


POINTS = _difference(1, 100.0, " pp")
MEASURES = (
    Measure("reward, last tenth of the rollouts", _late("reward"), number, _difference(3)),
    Measure("completion length, last tenth, tokens", _late("completions/mean_length"), lambda v: number(v, 1),
            _difference(1)),
    Measure("rejected sequences", _mean("rejection_rate"), percent, POINTS),
    Measure("mismatch KL (k3), nats per token", _mean("mismatch/kl_k3"), lambda v: number(v, 4), _difference(4)),
    Measure("acceptance, 5th percentile", _mean("acceptance/p05"), number, _difference(3)),
    Measure("KV tokens saved at the end of a sequence", _mean("kv/saving_final"), percent, POINTS),
    Measure("KV tokens saved over all decode steps", _mean("kv/saving_integral"), percent, POINTS),
    Measure("peak KV memory", lambda record: record.maximum("kv/peak_bytes"), size, _ratio),
    Measure("repeated 4-grams", _mean("completions/repetition_rate"), percent, POINTS),
    Measure("rollout speed, tokens per second", _mean("time/tokens_per_second"), _count, _ratio),
    *(Measure(f"seconds per rollout, {stage}", _mean(f"time/{stage}"), number, _ratio)
      for stage in ("rollout", "rescoring", "rewards", "update")),
    Measure("rollouts", lambda record: len(record.history), _count, _difference(0)),
    Measure("optimizer steps", lambda record: record.steps or None, _count, _difference(0)),
    Measure("time of training", lambda record: record.seconds or None, duration, _ratio),
)  # fmt: skip


def _greedy(records: Named) -> list[Measure]:
    """Greedy results before and after training, by cache."""
    measured = "/".join(dict.fromkeys(record.measure for _, record in records))

    def measure(cache: str, name: str, moment: str) -> Measure:
        return Measure(
            f"greedy {measured}, {name}, {moment}", lambda r: getattr(r, moment).get(cache), number, _difference(3)
        )

    return [measure(cache, name, moment) for cache, name in CACHES.items() for moment in ("before", "after")]
