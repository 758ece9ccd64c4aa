"""The code that a configuration's results depend on: of the rewards, tasks, environments and compressors it names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sparse_rl_lightning import environments
from sparse_rl_lightning.cli.classes import imported, known_classes
from sparse_rl_lightning.fingerprints import fingerprint, sources

DECIDING = tuple(f"sparse_rl_lightning.{part}." for part in ("rewards", "data", "environments", "compressors"))


def code_of(*configs: Any) -> str:
    """Twelve characters that change with the code of these parts, wherever in the configurations they are named."""
    known = {**vars(environments), **known_classes()}
    named = {known.get(name) or _found(name) for config in configs for name in _texts(config)}
    kinds = sorted((one for one in named if hasattr(one, "__qualname__")), key=lambda one: str(one.__qualname__))
    deciding = [one for one in kinds if f"{one.__module__}.".startswith(DECIDING)]
    return fingerprint(code=[[one.__qualname__, _sources(one)] for one in deciding])[:12]


@cache
def _sources(kind: Any) -> str:
    """As ``sources``; many runs name the same."""
    return sources(kind)


def _texts(config: Any) -> Iterator[str]:
    if isinstance(config, str):
        yield config
    elif isinstance(config, dict | list | tuple):
        for one in config.values() if isinstance(config, dict) else config:
            yield from _texts(one)


def _found(name: str) -> Any:
    return imported(name) if name.startswith("sparse_rl_lightning.") else None
