r"""What a completion says outside of its thoughts, which stand between ``<think>`` and ``</think>``."""

from __future__ import annotations

import re

MARKS = {  # the end of a thought by its beginning
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
_HINTS = ("hink", "HINK", "_thought")  # in every mark: most completions have none, and looking for a word is quick
_MARK = re.compile("|".join(rf"({re.escape(begin)})|{re.escape(end)}" for begin, end in MARKS.items()))


def without_thoughts(text: str) -> str:
    """A completion without its thoughts."""
    return " ".join(outside_thoughts(text))


def outside_thoughts(text: str) -> list[str]:
    """The pieces of a completion between its thoughts; the last is empty if a thought lasts to the end.

    A thought that is not closed does, as in a completion that was cut off. What stands before an end without a
    beginning is thought: the template of the prompt may have written the beginning.
    """
    if not any(hint in text for hint in _HINTS):
        return [text]
    pieces: list[str] = []
    place, is_thought = 0, False
    for mark in _MARK.finditer(text):
        is_end = mark.lastindex is None
        if is_end and not is_thought:
            pieces.clear()
        elif not is_thought:
            pieces.append(text[place : mark.start()])
        place, is_thought = mark.end(), not is_end
    return [*pieces, "" if is_thought else text[place:]]
