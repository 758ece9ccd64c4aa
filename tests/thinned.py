"""Parameters of which the fast tests take every third or so, and the slow ones the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def thinned(values: Sequence[Any] | Mapping[str, Any], every: int = 3) -> list[Any]:
    """Parameters for ``parametrize``: the first of ``every`` few is fast.

    Those of a mapping are its values, with its keys as ids; give ``list(mapping)`` where the keys are meant.
    """
    pairs = list(values.items()) if isinstance(values, Mapping) else [(None, value) for value in values]
    marks: list[list[pytest.MarkDecorator]] = [
        [pytest.mark.slow] if place % every else [] for place in range(len(pairs))
    ]
    return [pytest.param(value, id=name, marks=mark) for (name, value), mark in zip(pairs, marks, strict=True)]
