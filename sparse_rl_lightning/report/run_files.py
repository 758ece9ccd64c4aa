"""The reader of a run's folder, finished or not; numbers that no chart can show are left out."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import is_of, whole_file
from sparse_rl_lightning.report.record import BESIDE, PROGRESS, SUMMARY, RunRecord
from sparse_rl_lightning.text import shortened

METRICS = "metrics.csv"
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
SAME = ("reward", "completions/mean_length", "time/rollout")
"""Keys whose agreement identifies rows of one rollout in a CSV file: no two rollouts take the same time."""


def read_run(folder: str | Path) -> RunRecord:
    """The record of a run: ``progress.json`` of an unfinished one, else ``summary.json``, else a CSV file.

    The folder is the run's ``default_root_dir``, or any in which RunSummary or CSVLogger wrote. ``metrics.csv`` is
    looked for in the folder itself, in its newest ``version_*`` and in the newest one of its ``lightning_logs``; older
    versions are other runs, or earlier parts of this one, and are only named.

    Raises:
        ValueError: If there is no run in the folder, or none of its files can be read.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"{str(path)!r} is not a folder. Give the folder of a run, such as runs/quickstart.")
    versions = [*_versions(path), *_versions(path / "lightning_logs")]  # the latter is Lightning's default
    problems: list[str] = []
    for file in (path / PROGRESS, path / SUMMARY, path / METRICS, *(version / METRICS for version in versions)):
        try:
            record = _from_csv(file) if file.name == METRICS else _from_json(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError, csv.Error) as error:
            problems.append(f"{file} cannot be read: {shortened(str(error) or type(error).__name__, 200)}")
            continue
        told = [f"{problem} The page is made from {file.name}." for problem in problems] + _older(file)
        return replace(record, warnings=[*({"file": file.name, "text": one} for one in told), *record.warnings])
    if problems:
        raise UserError("\n".join([*problems, "Nothing else in the folder describes a run."]))
    raise UserError(
        f"There is no run in {str(path)!r}: it has no {SUMMARY} or {PROGRESS} (RunSummary writes them) and no "
        f"{METRICS} (CSVLogger). Give the folder that the run names as trainer.default_root_dir or as its logger's."
    )


def _versions(folder: Path) -> list[Path]:
    """The folders that CSVLogger has numbered, the newest first."""
    versions = [path for path in folder.glob("version_*") if path.name.removeprefix("version_").isdecimal()]
    return sorted(versions, key=lambda path: (len(path.name), path.name), reverse=True)


def _older(file: Path) -> list[str]:
    """A note on logs of the same name that began earlier: a resumed run continues in a new one."""
    versions = _versions(file.parent.parent) if file.name == METRICS else []
    later = versions[versions.index(file.parent) + 1 :] if file.parent in versions else []
    older = [version for version in later if (version / METRICS).is_file()]
    if not older:
        return []
    names = f"{older[0].name} and {len(older) - 1} before it" if len(older) > 1 else older[0].name
    return [f"The page is made from {file.parent.name} alone; {names} may be earlier parts of the run."]


def _from_json(file: Path) -> RunRecord:
    """The record as RunSummary wrote it."""
    content = json.loads(_text(file))
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
        num_problems=int(counts.get("held_out_problems", 0)),
        measure=measure,
        seconds=counts.get("wall_time_seconds", 0.0),
        steps=int(counts.get("optimizer_steps", 0)),
    )


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a list as a page shows it, without null; numbers that cannot be written are left out."""
    values = {name: value for name, value in entry.items() if value is not None}
    wrong = [name for name, kind in ENTRIES.items() if name in values and not is_of(values[name], kind)]
    if wrong:
        raise UserError(f"{', '.join(wrong)} of an entry of a list: of another type.")
    shown = {name: _number(value) if ENTRIES.get(name) is float else value for name, value in values.items()}
    return {name: value for name, value in shown.items() if value is not None}


def _text(file: Path) -> str:
    return whole_file(file, LARGEST_FILE).decode("utf-8", "replace")


def _from_csv(file: Path) -> RunRecord:
    """The record with a row of history per rollout in a CSVLogger file; Lightning repeats numbers until the next."""
    history: list[dict[str, float]] = []
    validation: list[dict[str, float]] = []
    rows = [_parsed(row) for row in csv.DictReader(io.StringIO(_text(file), newline=""))]
    for row in rows:
        tested = {cache: row[key] for cache in ("dense", "sparse") if (key := f"val/pass@1_{cache}") in row}
        if tested:
            validation.append({"rollout": float(len(history)), **tested})
        is_same = bool(history) and "time/rollout" in row and all(row.get(key) == history[-1].get(key) for key in SAME)
        if "reward" in row and not is_same:
            history.append({**row, "rollout": float(len(history))})
        elif is_same or (history and "completions/mean_length" not in row):
            history[-1].update({name: value for name, value in row.items() if name != "step"})
    if not history:
        raise UserError("no rollout was logged in it.")
    place = file.parent.parent if file.parent.name.startswith("version_") else file.parent
    return RunRecord(
        history=history,
        validation=validation,
        steps=int(history[-1].get("step", 0.0)),
        seconds=math.fsum(row.get("time/block", 0.0) for row in history),
        title=place.parent.name if place.name == "lightning_logs" else place.name,
        measure="accuracy",
        state="unknown",
        settings={
            "source": f"{file.name} alone: RunSummary had written nothing, so there are no completions. If the learner "
            "replayed what it sampled, mismatch is rounding alone"
        },
    )


def _parsed(row: Mapping[str, Any]) -> dict[str, float]:
    values = {}
    for name, text in row.items():
        with suppress(ValueError, TypeError):
            values[name] = float(text)
    return _numbers(values)


def _rows(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [numbers for row in rows if (numbers := _numbers(row))]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that an axis can hold."""
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:  # NaN is not
        return None
    return float(value) if abs(value) >= SMALLEST else 0.0
