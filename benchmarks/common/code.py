"""The code that a configuration's results depend on: rewards, tasks, caches, corrections that it names, and losses.

Comments, docstrings and refusals of a user's mistakes do not count: no run that ended depends on them, so that hours of
runs are kept where an error message is mended.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from sparse_rl_lightning import advantages, corrections, environments, losses
from sparse_rl_lightning.cli.classes import imported, known_classes
from sparse_rl_lightning.fingerprints import is_own, source_files

PARTS = ("rewards", "data", "environments", "compressors", "callbacks.corrections")
FROZEN = ("experiments.real.task", "experiments.stability.task", "experiments.learned_eviction.drawn")
"""Files of studies, with their tasks, rewards and compressors."""
DECIDING = (*(f"sparse_rl_lightning.{part}." for part in PARTS), *(f"{module}." for module in FROZEN))
ALWAYS = (losses, advantages, corrections)
"""Pure functions that no configuration names, and that every training run goes through."""


def code_of(*configs: Any) -> str:
    """Twelve characters that change with the code of these parts, wherever in the configurations they are named."""
    known = {**vars(environments), **known_classes()}
    named = {known.get(name) or _found(name) for config in configs for name in _texts(config)}
    kinds = sorted((one for one in named if hasattr(one, "__qualname__")), key=lambda one: str(one.__qualname__))
    deciding = [one for one in kinds if f"{one.__module__}.".startswith(DECIDING)]
    pure = [said(Path(str(module.__file__)).read_bytes()) for module in ALWAYS]
    return identity({"code": [[one.__qualname__, _sources(one)] for one in deciding], "pure": pure})


@cache
def _sources(kind: Any) -> str:
    """Of its files; many runs name the same. Of a study's own file it is the file alone: it is there to be whole."""
    if kind.__module__ in FROZEN:
        return sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    return _hash({"files": sorted(said(content) for file, content in source_files(kind).items() if is_own(file))})


def identity(plain: dict[str, Any]) -> str:
    """Twelve characters of a hash of plain values, by which kept runs are known: it must stay as it is."""
    return _hash(plain)[:12]


def _hash(plain: dict[str, Any]) -> str:
    def content(value: Any) -> Any:
        if isinstance(value, dict):
            return sha256(
                json.dumps({str(k): content(v) for k, v in value.items()}, sort_keys=True).encode()
            ).hexdigest()
        if isinstance(value, list | tuple):
            return sha256(json.dumps([content(item) for item in value]).encode()).hexdigest()
        return value

    return str(content(plain))


def said(source: bytes) -> str:
    """A hash of what a file of Python does, by its syntax tree, whatever the version of Python."""
    return sha256(repr(_tree(ast.parse(source))).encode()).hexdigest()


def _tree(part: Any) -> Any:
    if isinstance(part, list):
        return [_tree(one) for one in part if not _is_silent(one)]
    if not isinstance(part, ast.AST):
        return part
    fields = ((name, own) for name, own in ast.iter_fields(part) if own not in (None, []))  # which versions differ in
    return [type(part).__name__, *((name, _tree(own)) for name, own in fields)]


def _is_silent(part: Any) -> bool:
    """Whether a statement is a docstring, or refuses a setting: ``if ...: raise UserError(...)``."""
    if isinstance(part, ast.If):
        refuses = [isinstance(one, ast.Raise) and ast.unparse(one).startswith("raise UserError(") for one in part.body]
        return all(refuses) and not part.orelse
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def _texts(config: Any) -> Iterator[str]:
    if isinstance(config, str):
        yield config
    elif isinstance(config, dict | list | tuple):
        for one in config.values() if isinstance(config, dict) else config:
            yield from _texts(one)


def _found(name: str) -> Any:
    return imported(name) if name.startswith(("sparse_rl_lightning.", *FROZEN)) else None
