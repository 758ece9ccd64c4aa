"""Parameters of which the fast tests take every third, and the slow ones the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Parameters for ``parametrize``; those of a mapping are its values, with its keys as ids."""
    pairs = values.items() if isinstance(values, Mapping) else ((None, value) for value in values)
    marks = ([pytest.mark.slow] if place % every else [] for place in range(len(list(values))))
    return [pytest.param(value, id=name, marks=mark) for (name, value), mark in zip(pairs, marks, strict=True)]
