r"""The readings of an answer and its gold answer that are tried in turn: as written, as angles, as what they state."""

from __future__ import annotations

import re
from collections.abc import Iterator

from exact_answers.spellings.statements import stated_value
from exact_answers.structure import has_relation
from exact_answers.text import tidy

_FUNCTION = re.compile(r"(?<![a-zA-Z])(?:sin|cos|tan|cot|sec|csc)(?![a-z]{2})")
_DEGREES = re.compile(
    r"(?<![\^_0-9.])([0-9]+(?:\.[0-9]+)?)\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|°|\\degree(?![a-zA-Z]))"
)


def readings(answer: str, gold: str) -> Iterator[tuple[str, str]]:
    r"""The pairs to compare until one is the same.

    Degrees within functions are angles, ``\sin 30^\circ``; elsewhere the mark is dropped. An equation that states a
    value is that value, if the gold answer is no relation itself.
    """
    yield answer, gold
    angles = _in_radians(answer), _in_radians(gold)
    if angles != (answer, gold):
        yield angles
    if "=" in answer and not has_relation(tidy(gold)):
        value = stated_value(tidy(answer))
        if value is not None:
            yield value, gold


def _in_radians(text: str) -> str:
    is_angle = "°" in text or "\\circ" in text or "\\degree" in text
    if not (is_angle and _FUNCTION.search(text)):
        return text
    return _DEGREES.sub(r"\\frac{\1\\pi}{180}", text)
