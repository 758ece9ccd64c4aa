"""Files of the repository with a line of JSON for everything that a long benchmark has finished."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from sparse_rl_lightning.files import write_whole

FORMER_NAMES = {
    "../experiments/learned_eviction/": "",  # its configuration was shipped, and its classes were the package's
    "experiments.learned_eviction.drawn.": "",
    "experiments.runner.course": "experiments.arms.course",
    "experiments.": "benchmarks.",
}


def read(path: Path) -> list[dict[str, Any]]:
    """Every line, none if there is no file yet."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """All lines anew, whole or not at all."""
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def parser_of(about: str | None, name: str, page: str = "") -> argparse.ArgumentParser:
    """The options of a benchmark that goes on where it was stopped: folders, the file of lines, and its page if any."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, one thread each")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / name, help="folder of the runs")
    parser.add_argument("--kept", type=Path, default=ROOT / "benchmarks" / "results" / f"{name}.jsonl")
    parser.add_argument("--finished", action="store_true", help="run nothing: write what earlier calls have finished")
    if page:
        parser.add_argument("--save", type=Path, help=f"folder of {page} and its pictures")
    return parser


def known_as(text: str) -> str:
    """A text in which what lies in ``experiments`` has the names of before, under which results are kept."""
    for now, before in FORMER_NAMES.items():
        text = text.replace(now, before)
    return text
