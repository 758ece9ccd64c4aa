r"""The bare answer of a gold that has text around it, such as a whole solution that ends with ``\boxed{5}``."""

from __future__ import annotations

import re

from exact_answers.boxes import TAIL, find_last_box

_SAID = re.compile(r"(?:####|\banswers?(?: is\b| are\b)? ?[:=]|\banswers? (?:is|are)\b)[:*]*\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!(?:and|or|text|mathrm)\b)[a-zA-Z]{2,}")


def gold_answer(gold: str) -> str:
    r"""The bare answer that a gold holds; a gold without text around its answer is returned unchanged.

    That is its only ``\boxed{}``, or the last of several with words around them, as in completions; without any, what
    follows ``####`` or "the answer is" to the end of the sentence. Math-verify reads these as the same.
    """
    tail = gold[-TAIL:]
    span = find_last_box(tail)
    if span is not None:
        box, rest = tail[span[1] : span[2]].strip(), tail
        for _ in range(tail.count("\\boxed")):
            if (inner := find_last_box(rest)) is not None:
                rest = rest[: inner[0]] + " " + rest[inner[2] + 1 :]
        return box if _WORD.search(rest) or tail.count("\\boxed") == 1 else gold
    said = list(_SAID.finditer(tail)) if "\\boxed" not in tail else []
    answer = _SENTENCE_END.split(tail[said[-1].end() :], maxsplit=1)[0].strip(" *_") if said else ""
    return answer or gold


def is_tagged(gold: str) -> bool:
    """Whether a gold is text of a markup that no answer has, such as ``<answer>5</answer>``."""
    return re.search(r"</[a-zA-Z]+>", gold) is not None
