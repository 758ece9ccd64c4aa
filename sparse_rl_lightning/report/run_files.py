"""A run as it lies on disk, finished or not: JSON and CSV that anyone may have written, so nothing in it is trusted."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_rl_lightning.report.record import PROGRESS, SUMMARY, RunRecord
from sparse_rl_lightning.text import shortened

METRICS = "metrics.csv"
LARGEST_FILE = 512 * 1024**2
LARGEST_NUMBER = 1e30
"""Beyond it a number is taken for none: no metric is so large, and charts of it would overflow."""
SMALLEST_NUMBER = 1e-30
"""Nearer to 0 it is taken for 0: there a logarithm or the step of an axis fails."""
MOST_ROLLOUTS = 1e9
LONGEST_TEXT = 4000
MOST_ENTRIES = 2000
SAME = ("reward", "completions/mean_length", "time/rollout")
"""Rows of a CSV file that agree in these speak of the same rollout: no two rollouts take the same time."""


def read_run(folder: str | Path) -> RunRecord:
    """The record of a run: of one that goes on or was killed ``progress.json``, else ``summary.json``, else a CSV file.

    ``metrics.csv`` is looked for in the folder itself, in its newest ``version_*`` and in that of its
    ``lightning_logs``; older versions are other runs, or earlier parts of this one, and are only told of. Fields of a
    file that are not what they should be are left out; nothing is unpickled.

    Args:
        folder: A run's ``default_root_dir``, or wherever RunSummary or CSVLogger wrote.

    Raises:
        ValueError: If there is no run in the folder, or none of its files can be read.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is no folder. Give the folder of a run, such as runs/quickstart.")
    problems: list[str] = []
    for file in _candidates(path):
        try:
            record = _from_csv(file) if file.name == METRICS else _from_json(file)
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            problems.append(f"{file} cannot be read: {shortened(str(error) or type(error).__name__, 200)}")
            continue
        told = [f"{problem} The page is made from {file.name}." for problem in problems] + _older(file)
        return replace(record, warnings=[*({"file": file.name, "text": one} for one in told), *record.warnings])
    if problems:
        raise ValueError("\n".join([*problems, "Nothing else in the folder describes a run."]))
    raise ValueError(
        f"There is no run in {str(path)!r}: it has no {SUMMARY} or {PROGRESS} (RunSummary writes them) and no "
        f"{METRICS} (CSVLogger). Give the folder that the run names as trainer.default_root_dir or as its logger's."
    )


def _candidates(folder: Path) -> list[Path]:
    versions = [*_versions(folder), *_versions(folder / "lightning_logs")]  # the latter is Lightning's default
    wanted = [folder / PROGRESS, folder / SUMMARY, folder / METRICS, *(version / METRICS for version in versions)]
    return [path for path in wanted if path.is_file()]


def _versions(folder: Path) -> list[Path]:
    """Folders that CSVLogger has numbered, the newest first."""
    versions = [p for p in folder.glob("version_*") if p.name.removeprefix("version_").isdecimal()]
    return sorted(versions, key=lambda p: (len(p.name), p.name), reverse=True)


def _older(file: Path) -> list[str]:
    """A note on logs of the same name that began earlier: a resumed run continues in a new one."""
    versions = _versions(file.parent.parent) if file.name == METRICS else []
    older = versions[versions.index(file.parent) + 1 :] if file.parent in versions else []
    older = [version for version in older if (version / METRICS).is_file()]
    if not older:
        return []
    names = f"{older[0].name} and {len(older) - 1} before it" if len(older) > 1 else older[0].name
    return [f"The page is made from {file.parent.name} alone; {names} may be earlier parts of the run."]


def _text_of(file: Path) -> str:
    size = file.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"it has {size:,} bytes, more than {LARGEST_FILE:,}.")
    return file.read_text(encoding="utf-8", errors="replace")


# ---------------------------------------------------------------- RunSummary's files


def _from_json(file: Path) -> RunRecord:
    found = json.loads(_text_of(file))
    if not isinstance(found, dict) or not isinstance(found.get("history"), list):
        raise ValueError("it is no summary of a run.")
    summary = found["summary"] if isinstance(found.get("summary"), dict) else {}
    seconds, steps, problems = (
        _number(summary.get(name)) or 0.0 for name in ("wall_time_seconds", "optimizer_steps", "held_out_problems")
    )
    return RunRecord(
        history=_rollouts(found["history"]),
        before=_numbers(summary.get("before")),
        after=_numbers(summary.get("after")),
        num_problems=int(problems),
        measure=_word(summary.get("measure"), "reward"),
        seconds=seconds,
        steps=int(steps),
        settings=_words(found.get("settings")),
        samples=_entries(found.get("samples")),
        title=_word(found.get("title"), file.parent.name),
        validation=[row for row in map(_numbers, _listed(found.get("validation"))) if row and _is_rollout(row)],
        worst=_entries(found.get("worst")),
        warnings=[
            {key: entry[key] for key in ("rollout", "text") if key in entry}
            for entry in _entries(found.get("warnings"))
        ],
        config=_words(found.get("config")),
        versions=_words(found.get("versions")),
        state=_word(found.get("state"), "running" if file.name == PROGRESS else "finished"),
        written=_word(found.get("written"), ""),
    )


def _rollouts(rows: list[Any]) -> list[dict[str, float]]:
    """Rows that can stand on an axis, each rollout once: the first that names it."""
    kept: dict[float, dict[str, float]] = {}
    for row in map(_numbers, rows):
        if row and _is_rollout(row):
            kept.setdefault(row.get("rollout", float(len(kept))), row)
    return list(kept.values())


def _is_rollout(row: Mapping[str, float]) -> bool:
    return 0 <= row.get("rollout", 0.0) <= MOST_ROLLOUTS


def _listed(value: Any) -> list[Any]:
    return value[:MOST_ENTRIES] if isinstance(value, list) else []


def _entries(value: Any) -> list[dict[str, Any]]:
    """Dictionaries of text, finite numbers, and lists of text."""
    entries = []
    for item in _listed(value):
        if isinstance(item, dict):
            entries.append({str(key): _plain(one) for key, one in item.items()})
    return entries


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_word(one, "") for one in value[:10]]
    if value is None or isinstance(value, bool):
        return value
    return _number(value) if isinstance(value, (int, float)) else _word(value, "")


def _word(value: Any, default: str) -> str:
    return shortened(value, LONGEST_TEXT) if isinstance(value, str) else default


def _words(value: Any) -> dict[str, str]:
    items = list(value.items())[:MOST_ENTRIES] if isinstance(value, Mapping) else []
    return {shortened(key, 200): shortened(text, LONGEST_TEXT) for key, text in items if isinstance(text, str)}


def _numbers(value: Any) -> dict[str, float]:
    """Names with numbers; the others are left out."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {name: number for name, item in items if (number := _number(item)) is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not abs(value) <= LARGEST_NUMBER:  # NaN compares as false
        return None
    return float(value) if abs(value) >= SMALLEST_NUMBER else 0.0


# ---------------------------------------------------------------- CSVLogger's file


def _from_csv(file: Path) -> RunRecord:
    """A row of the history for every rollout that was logged; Lightning repeats its numbers until the next."""
    history: list[dict[str, float]] = []
    validation: list[dict[str, float]] = []
    limit = csv.field_size_limit(LARGEST_FILE)
    try:
        rows = list(csv.DictReader(io.StringIO(_text_of(file), newline="")))
    finally:
        csv.field_size_limit(limit)
    for row in rows:
        values = _parsed(row)
        tested = {
            cache: values[f"val/pass@1_{cache}"] for cache in ("dense", "sparse") if f"val/pass@1_{cache}" in values
        }
        if tested:
            validation.append({"rollout": float(len(history)), **tested})
        if history and "time/rollout" in values and all(values.get(key) == history[-1].get(key) for key in SAME):
            history[-1].update({name: value for name, value in values.items() if name != "step"})
        elif "reward" in values:
            history.append({**values, "rollout": float(len(history))})
        elif history and "completions/mean_length" not in values:
            history[-1].update({name: value for name, value in values.items() if name != "step"})
    if not history:
        raise ValueError("no rollout was logged in it.")
    return RunRecord(
        history=history,
        validation=validation,
        steps=int(history[-1].get("step", 0.0)),
        seconds=math.fsum(row.get("time/block", 0.0) for row in history),
        title=_title(file.parent),
        measure="accuracy",
        state="unknown",
        settings={"source": f"{file.name} alone: RunSummary had written nothing, so there are no completions"},
    )


def _title(folder: Path) -> str:
    named = folder.parent if folder.name.startswith("version_") else folder
    return named.parent.name if named.name == "lightning_logs" else named.name


def _parsed(row: Mapping[str | None, Any]) -> dict[str, float]:
    values = {}
    for name, text in row.items():
        try:
            number = _number(float(text)) if isinstance(text, str) and len(text) < 40 else None
        except ValueError:
            continue
        if isinstance(name, str) and number is not None:
            values[name] = number
    return values
