r"""Whether the last ``\boxed{}`` of a completion is the gold answer, decided exactly and in linear time.

Conventions, where mathematics leaves a choice:

- ``%``, ``\$`` and degree signs are dropped: ``50\%`` is 50, not one half.
- Words behind a number (``5\text{ cm}^2``) are its unit. A unit may be left out, but two units must agree.
- ``x=5`` is 5 where the other side has no equation.
- ``1,234`` is 1234, and so is ``1\,234``; ``1 234`` is not a number.
- ``(E)`` is E. A number base belongs to the number: ``52_8`` is neither 52 nor ``52_5``.
- Numbers are compared exactly, never by tolerance; everything else as normalised text. Sets are not tuples.
"""

from __future__ import annotations

import re

from sparse_rl_lightning.rewards.numbers import Number, parse_number, same_number

TAIL = 8_000
"""Characters at the end of a completion that are searched for a box."""
MAX_BOX = 512
"""Characters a boxed answer may have; benchmark golds have at most 210."""
MAX_NESTING = 20
"""Braces that a boxed answer may nest."""

_BRACE = re.compile(r"(\\boxed\s*\{)|\\.|([{}])", re.DOTALL)
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?:[/*]?\\(?:text|textrm|mathrm|mbox)\s*\{(?:[^\W\d_]|[ ./'])*\}(?:\^(?:[0-9]|\{-?[0-9]\}))?)+")
_UNIT_START = re.compile(r"[/*]?\\(?:text|textrm|mathrm|mbox)\s*\{")
_VARIABLES = frozenset({"e", "i", "j", "k", "n", "x", "y", "z", "pi"})
_SCALES = ("hundred", "thousand", "million", "billion", "trillion", "dozen")
_DROPPED = ("\\left", "\\right", "\\displaystyle", "\\$", "\\%", "\\!", "\\,", "\\degree", "\\big", "\\Big")
_SPACES = ("\\ ", "\\;", "\\:", "\\quad", "\\qquad")
_REPLACED = {
    **dict.fromkeys(_DROPPED, ""),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    "\\le": "\\leq",
    "\\ge": "\\geq",
    "\\ne": "\\neq",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lbrack": "[",
    "\\rbrack": "]",
    "\\lvert": "|",
    "\\rvert": "|",
}
_PLAIN = str.maketrans({"$": None, "%": None, "°": None, "−": "-", "~": " "})


def verify(completion: str, gold: str) -> bool:
    r"""Whether the last balanced ``\boxed{}`` of a completion holds the gold answer.

    Args:
        completion: What the policy wrote; hostile text of any length is fine.
        gold: The bare answer, without a box. An empty gold matches nothing.
    """
    boxed = extract_boxed(completion)
    return boxed is not None and same_answer(boxed, gold)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{}``, or None where there is none that counts.

    A box inside another is part of it. A box that is empty, longer than ``MAX_BOX``, nested deeper than
    ``MAX_NESTING`` or not closed does not count, and neither does any box before it.
    """
    tail = text[-TAIL:]
    span = find_last_box(tail)
    if span is None:
        return None
    content = tail[span[1] : span[2]].strip()
    return content if content and len(content) <= MAX_BOX and _nesting(content) <= MAX_NESTING else None


def find_last_box(text: str) -> tuple[int, int, int] | None:
    r"""Where the last ``\boxed{}`` begins, its content begins and its content ends; None if it is not closed."""
    open_braces: list[tuple[int, int] | None] = []  # None for a brace that is not a box's
    last: tuple[int, int, int] | None = None
    for match in _BRACE.finditer(text):
        box, brace = match.groups()
        if box:
            open_braces.append(match.span())
        elif brace == "{":
            open_braces.append(None)
        elif brace and open_braces and (opened := open_braces.pop()):
            last = (*opened, match.start())
    unclosed = max((opened[0] for opened in open_braces if opened), default=-1)
    return last if last and last[0] > unclosed else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two bare answers are the same number or, where one is no number, the same normalised text."""
    if max(len(answer), len(gold)) > MAX_BOX:
        return False
    first, second = _tidy(answer), _tidy(gold)
    if ("=" in first) != ("=" in second):
        first, second = _without_variable(first), _without_variable(second)
    (one, unit), (two, other_unit) = _quantity(first), _quantity(second)
    if one is not None and two is not None:
        return same_number(one, two) and (not unit or not other_unit or unit == other_unit)
    first, second = _plain_text(first), _plain_text(second)
    return first == second != ""


def normalize_answer(text: str) -> str:
    """One spelling for the many ways to typeset an answer: spacing, fractions, braces, text commands, units' marks."""
    return _plain_text(_tidy(text))


def _tidy(text: str) -> str:
    """Everything of the normalisation that keeps a unit recognisable."""
    text = _COMMAND.sub(lambda match: _REPLACED.get(match[0], match[0]), text).translate(_PLAIN)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("{,}", ",")
    text = re.sub(r"(?<![0-9]) | (?![0-9])", "", " ".join(text.split()))
    text = re.sub(r"\\frac([0-9a-zA-Z]) ?", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})([0-9a-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\{([0-9a-zA-Z])\}", r"\1\2", text)
    return text.rstrip(".,;")


def _plain_text(text: str) -> str:
    text = _TEXT.sub(r"\1", text).rstrip(".,;")
    return text[1:-1] if re.fullmatch(r"\([a-zA-Z]\)", text) else text


def _without_variable(text: str) -> str:
    return text[2:] if re.match(r"[a-zA-Z]=[^=]*$", text) else text


def _quantity(text: str) -> tuple[Number | None, str]:
    """The number and the unit of a text; (None, "") where it is anything else."""
    start = _UNIT_START.search(text)
    if start is None:
        return parse_number(text), ""
    value, unit = parse_number(text[: start.start()]), text[start.start() :]
    names = [name.casefold() for name in _TEXT.findall(unit)]
    if value is None or not _UNIT.fullmatch(unit) or not _VARIABLES.isdisjoint(names) or names[0].startswith(_SCALES):
        return None, ""
    return value, _TEXT.sub(r"\1", unit)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for match in _BRACE.finditer(text):
        depth += (match[0][-1] == "{" and match[0] != "\\{") - (match[0] == "}")
        deepest = max(deepest, depth)
    return deepest
