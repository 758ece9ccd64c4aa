"""The reader of a run's folder, finished or not; numbers that no chart can show are left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import is_of, whole_file
from sparse_rl_lightning.report.record import BESIDE, PROGRESS, SUMMARY, RunRecord
from sparse_rl_lightning.text import shortened

LARGEST_FILE = 2**28
"""Bytes of a run's file; summaries of thousands of rollouts have some megabytes."""
ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("prompt", "completion", "cache", "token", "text", "file"), str),
    **dict.fromkeys(("rollout", "reward", "ratio", "token_place", "length"), float),
    "kinds": list[str],
}
"""What entries of samples, worst completions and warnings hold, by name."""
LARGEST, SMALLEST = 1e30, 1e-30
"""Limits of metrics, beyond which no chart can show them; numbers nearer to 0 count as 0."""


def read_run(folder: str | Path) -> RunRecord:
    """The record of a run as RunSummary wrote it: ``progress.json`` of an unfinished one, else ``summary.json``.

    The folder is the run's ``default_root_dir``, or that of RunSummary.

    Raises:
        ValueError: If there is no run in the folder, or neither file can be read.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"{str(path)!r} is not a folder. Give the folder of a run, such as runs/quickstart.")
    problems: list[str] = []
    for file in (path / PROGRESS, path / SUMMARY):
        try:
            record = _from_json(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            problems.append(f"{file} cannot be read: {shortened(str(error) or type(error).__name__, 200)}")
            continue
        notes = [{"file": file.name, "text": f"{problem} The page is made from {file.name}."} for problem in problems]
        return replace(record, warnings=[*notes, *record.warnings])
    if problems:
        raise UserError("\n".join([*problems, "Nothing else in the folder describes a run."]))
    raise UserError(
        f"There is no run in {str(path)!r}: it has no {SUMMARY} or {PROGRESS}, which the callback RunSummary writes. "
        "Give the folder that such a run names as trainer.default_root_dir."
    )


def _from_json(file: Path) -> RunRecord:
    """The record as RunSummary wrote it."""
    content = json.loads(whole_file(file, LARGEST_FILE).decode("utf-8", "replace"))
    if not isinstance(content, dict) or not isinstance(content.get("history"), list):
        raise UserError("it is not a summary of a run.")
    record, summary = RunRecord(), content.get("summary", {})
    for name in BESIDE:
        default = getattr(record, name)
        value = content.get(name, default)
        if not is_of(value, dict[str, str] if isinstance(default, dict) else type(default)):
            raise UserError(f"{name} is not a {type(default).__name__}, or not one of texts.")
        setattr(record, name, value)
    counts, measure = _numbers(summary), summary.get("measure", "reward")
    if not isinstance(measure, str):
        raise UserError("measure is not a str.")
    return replace(
        record,
        samples=[*map(_entry, record.samples)],
        worst=[*map(_entry, record.worst)],
        warnings=[*map(_entry, record.warnings)],
        history=_rows(content["history"]),
        validation=_rows(record.validation),
        before=_numbers(summary.get("before", {})),
        after=_numbers(summary.get("after", {})),
        num_problems=max(0, int(counts.get("held_out_problems", 0))),
        measure=measure,
        seconds=counts.get("wall_time_seconds", 0.0),
        steps=int(counts.get("optimizer_steps", 0)),
    )


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a list as a page shows it, without null; numbers that cannot be written are left out."""
    values = {name: value for name, value in entry.items() if value is not None}
    wrong = [name for name, entry_type in ENTRIES.items() if name in values and not is_of(values[name], entry_type)]
    if wrong:
        raise UserError(f"{', '.join(wrong)} of an entry of a list: of another type.")
    shown = {name: _number(value) if ENTRIES.get(name) is float else value for name, value in values.items()}
    return {name: value for name, value in shown.items() if value is not None}


def _rows(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [numbers for row in rows if (numbers := _numbers(row))]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that an axis can hold."""
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:  # NaN is not
        return None
    return float(value) if abs(value) >= SMALLEST else 0.0
