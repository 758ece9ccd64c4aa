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
    shipped = {**vars(environments), **known_classes()}
    named = {shipped.get(name) or _found(name) for config in configs for name in _texts(config)}
    kinds = sorted(
        (thing for thing in named if hasattr(thing, "__qualname__")), key=lambda thing: str(thing.__qualname__)
    )
    deciding = [thing for thing in kinds if f"{thing.__module__}.".startswith(DECIDING)]
    pure = [said(Path(str(module.__file__)).read_bytes()) for module in ALWAYS]
    return identity({"code": [[thing.__qualname__, _sources(thing)] for thing in deciding], "pure": pure})


@cache
def _sources(thing: Any) -> str:
    """Of its files; many runs name the same. Of a study's own file it is the file alone: it is there to be whole."""
    if thing.__module__ in FROZEN:
        return sha256(Path(inspect.getfile(thing)).read_bytes()).hexdigest()
    return _hash({"files": sorted(said(content) for file, content in source_files(thing).items() if is_own(file))})


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


def _tree(node: Any) -> Any:
    if isinstance(node, list):
        return [_tree(child) for child in node if not _is_silent(child)]
    if not isinstance(node, ast.AST):
        return node
    # empty fields are left out: versions of Python differ in them
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return [type(node).__name__, *((name, _tree(value)) for name, value in fields)]


def _is_silent(node: Any) -> bool:
    """Whether a statement is a docstring, or refuses a setting: ``if ...: raise UserError(...)``."""
    if isinstance(node, ast.If):
        refuses = [
            isinstance(statement, ast.Raise) and ast.unparse(statement).startswith("raise UserError(")
            for statement in node.body
        ]
        return all(refuses) and not node.orelse
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _texts(config: Any) -> Iterator[str]:
    if isinstance(config, str):
        yield config
    elif isinstance(config, dict | list | tuple):
        for value in config.values() if isinstance(config, dict) else config:
            yield from _texts(value)


def _found(name: str) -> Any:
    return imported(name) if name.startswith(("sparse_rl_lightning.", *FROZEN)) else None
