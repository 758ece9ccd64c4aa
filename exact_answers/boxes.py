r"""The answer in a text: the last ``\boxed{}``, found in one scan of its end, and what a gold answer says without."""

from __future__ import annotations

import re

from exact_answers.thoughts import without_thoughts

TAIL = 8_000
"""Number of characters at the end of a completion that are searched for a box."""
MAX_BOX = 512
"""Largest number of characters in a boxed answer; benchmark golds have at most 210."""
MAX_NESTING = 20
"""Largest depth of nested braces in a boxed answer."""

_BRACE = re.compile(r"(\\{1,2}boxed\s*\{)|\\.|([{}])", re.DOTALL)  # two backslashes: escaped once too often
_ANNOUNCED = re.compile(
    r"(?:so |thus |hence |therefore |and )?(?:the |my |our )?(?:final |correct )?answers?(?: is| are)? ?[:=]? ?", re.I
)
_SAID = re.compile(r"(?:####|\banswers?(?: is\b| are\b)? ?[:=]|\banswers? (?:is|are)\b)[:*]*\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.?](?:\s|$)")  # an exclamation mark is a factorial
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!(?:and|or|text|mathrm)\b)[a-zA-Z]{2,}")


def extract_boxed(text: str, boxes_in_thoughts: bool = False) -> str | None:
    r"""The content of the last ``\boxed{}``, or None if there is none that counts.

    A box inside another is part of it, and all of it if only words announce it. A box that is empty, longer than
    ``MAX_BOX``, nested deeper than ``MAX_NESTING`` or not closed does not count, and neither does any box before it.

    Args:
        text: Completion.
        boxes_in_thoughts: Whether a box in ``<think>`` counts too.
    """
    tail = answer_tail(text, boxes_in_thoughts)
    span = find_last_box(tail)
    if span is None:
        return None
    content = tail[span[1] : span[2]].strip()
    return announced_box(content) if content and is_within_limits(content) else None


def answer_tail(text: str, with_thoughts: bool = False) -> str:
    """The end of a completion that is searched for its answer."""
    return (text if with_thoughts else without_thoughts(text))[-TAIL:]


def announced_box(answer: str) -> str:
    r"""The content of the inner box of ``\text{The answer is }\boxed{5}``; any other answer unchanged."""
    span = find_last_box(answer) if "boxed" in answer else None
    if span is None or answer[span[2] + 1 :].strip(" \n$.)"):
        return answer
    words = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}|[$\s]+", r" \1 ", answer[: span[0]])
    inner = answer[span[1] : span[2]].strip()
    return inner if inner and _ANNOUNCED.fullmatch(" ".join(words.split())) else answer


def find_last_box(text: str) -> tuple[int, int, int] | None:
    r"""The start of the last ``\boxed{}``, and the start and end of its content; None if it is not closed."""
    open_braces: list[tuple[int, int] | None] = []  # None for a brace that is not a box's
    last: tuple[int, int, int] | None = None
    first = text.find("\\boxed")
    while first > 0 and text[first - 1] == "\\":
        first -= 1  # the backslashes before it may be pairs
    for match in _BRACE.finditer(text, first) if first >= 0 else ():  # braces before all boxes do not matter
        if match.lastindex == 1:
            open_braces.append(match.span())
        elif match.lastindex and match[2] == "{":
            open_braces.append(None)
        elif match.lastindex and open_braces and (opened := open_braces.pop()):
            last = (*opened, match.start())
    unclosed = max((opened[0] for opened in open_braces if opened), default=-1)
    return last if last and last[0] > unclosed else None


def is_within_limits(answer: str) -> bool:
    """Whether an answer is short enough and its braces are nested shallowly enough to be read."""
    if len(answer) > MAX_BOX:
        return False
    depth = deepest = 0
    for match in _BRACE.finditer(answer):
        depth += (match[0][-1] == "{" and match[0] != "\\{") - (match[0] == "}")
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTING


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
