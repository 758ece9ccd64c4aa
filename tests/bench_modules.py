"""Modules of benchmarks/, which is a folder of scripts and no package."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@contextlib.contextmanager
def bench_modules(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Some of them by name, their folder on the path; afterwards all of them are forgotten."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in {path.stem for path in FOLDER.glob("*.py")} & set(sys.modules):
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
                del sys.modules[name]
