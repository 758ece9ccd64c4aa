"""The structure of an answer: lists, sets, tuples, intervals, matrices and relations of single expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

from exact_answers.exact_numbers import parse_number
from exact_answers.spellings.words import OTHERWISE
from exact_answers.units import split_unit

MAX_ITEMS = 64
"""Largest number of parts in an answer; a longer one is compared as text."""

_TOKEN = re.compile(r"\\(?:begin|end)\{[a-z]*\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_FLIPPED = {">": "<", "\\geq": "\\leq"}
_RELATIONS = frozenset({"=", "<", ">", "\\leq", "\\geq", "\\neq", "\\in"})
_LESS = frozenset({"<", "\\leq"})
_LETTER = r"(?:[a-zA-Z]|\\(?!frac|sqrt|text|pi)[a-zA-Z]+)"
_SCRIPT = r"_(?:[0-9a-zA-Z]|\{(?:[^{}]|\{[^{}]*\})*\})"
PLAIN_NAME = rf"{_LETTER}(?:{_SCRIPT})?(?:(?:\^\{{-1\}})?\([0-9a-zA-Z,]+\))?"
"""A pattern of a letter, with its index and its argument."""
_WORDS = rf"(?!(?:[a-zA-Z\x1f ]*[\x1f ])?(?i:{OTHERWISE})[\x1f }}])[a-zA-Z\x1f ]+"
_SEGMENT = r"(?:[A-Z]{2}|\\overline\{[A-Z]{2}\})(?:\^[0-9])?"
THINGS = (  # probabilities, angles, segments, their powers and ratios, areas, marked letters, words
    r"(?:[EP]|\\Pr|\\mathbb ?(?:\{[EP]\}|[EP]))(?:\([^()]*\)|\[[^][]*\])",
    *(r"m?\\angle ?[A-Z]{1,3}", r"\|?[A-Z]{2,3}\|?", r"\|?\\(?:overline|overrightarrow|vec)\{[A-Z]{2}\}\|?"),
    *(_SEGMENT, rf"\\frac\{{{_SEGMENT}\}}\{{{_SEGMENT}\}}", rf"{_SEGMENT}[/:]{_SEGMENT}"),
    *(r"\[[A-Z]{3,4}\]", r"\\(?:mathbf|mathbb|mathcal|boldsymbol|vec|bar|hat|tilde) ?(?:\{[a-zA-Z]\}|[a-zA-Z])"),
    rf"\\(?:text|mathrm)\{{{_WORDS}\}}",
)
"""Patterns of what has a name of several characters."""
_RANGE = (
    r"positive|negative|nonnegative|nonzero|real|complex|rational|natural|whole|even|odd|integers?|numbers?|values|of"
)
_CONDITION = re.compile(  # for all n\ge2, for every positive integer n
    rf",?\\(?:text|textrm|mathrm|mbox)\{{\(?for\x1f(?:all|any|each|every)(?:\x1f(?:{_RANGE}))*(?:\x1f[a-zA-Z])?\)?\}}"
    r"(?:(?:[a-zA-Z]|\\[a-z]+ ?)(?:,[a-zA-Z])*(?:(?:[<>]|\\(?:[gl]eq|neq|in) ?)[-0-9a-zA-Z\\{}]{1,20})?)?$"
)
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[1-9][0-9]{2})+")
_TUPLE = re.compile(rf"\({PLAIN_NAME}(?:,{PLAIN_NAME})+\)")
_NAME = re.compile("|".join((PLAIN_NAME, *THINGS)))
_INDEX = re.compile(r"_(?:[0-9]|\{[0-9]+\})$")


@dataclass(frozen=True)
class Atom:
    """An expression without parts."""

    text: str


@dataclass(frozen=True)
class Group:
    """Several answers together; a ``list`` (a set, or commas) and a ``union`` are unordered, all others ordered."""

    kind: str
    items: tuple[Answer, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the items matters."""
        return self.kind not in ("list", "union")


Answer: TypeAlias = Atom | Group


@lru_cache(maxsize=4096)
def parse_answer(text: str) -> Answer:
    """The parts of a tidied answer, recursively."""
    return _parse(text, depth=0)


def without_variable(text: str) -> str:
    r"""The right side of ``x=...`` or ``x\in...``, and of each part of a list if all name the same variable.

    ``x=1,2`` names it once, ``x_1=1,x_2=2`` with indices; ``AB=CD=5`` names it twice. Anything else is returned
    unchanged, so ``41=42`` is not 42.
    """
    pieces, separators = split_outside(text, frozenset(",;"))
    parts = [split_outside(piece, frozenset({"=", "\\in"})) for piece in pieces]
    named = [(sides[0], *signs) for sides, signs in parts if len(sides) > 1]
    if not all(is_variable(name) for sides, _ in parts for name in sides[:-1]):
        return text
    if len(named) == 1 and len(parts[0][0]) > 1:  # x=1,234 is still a number
        return "".join(sides[-1] + mark for (sides, _), mark in zip(parts, [*separators, ""], strict=True))
    same = len({(_INDEX.sub("_", name), *signs) for name, *signs in named}) == 1
    return ";".join(sides[-1] for sides, _ in parts) if same and len(named) == len(parts) else text


def split_condition(text: str) -> tuple[str, str]:
    r"""An answer and its condition: ``2^n\text{ for all }n\ge2`` is ``2^n``; "" without any condition."""
    condition = _CONDITION.search(text) if "for\x1f" in text else None
    return (text[: condition.start()], condition[0]) if condition and condition.start() else (text, "")


def as_list(answer: Answer) -> Answer:
    """The list that ``70,110`` may be instead of a number; ``2,000`` is not one, as no number begins with 0."""
    if isinstance(answer, Group) or not _GROUPED.fullmatch(answer.text):
        return answer
    return Group("list", tuple(map(Atom, answer.text.split(","))))


def without_braces(text: str) -> str:
    """An answer without the braces around the whole of it, which do not show when typeset."""
    while text.startswith("{") and _closing(tokens := _TOKEN.findall(text)) == len(tokens) - 1:
        text = text[1:-1].strip()
    return text


def is_variable(text: str) -> bool:
    """Whether a text names something, or several things as a tuple."""
    return bool(_NAME.fullmatch(text) or _TUPLE.fullmatch(text))


def as_interval(group: Group) -> Group | None:
    r"""The interval that ``x>2``, ``-2\leq x<1`` or ``x\in(0,1)`` describes, None for anything else."""
    signs, items = group.kind.split(" "), group.items
    place = _variable_place(group)
    if place is None:
        return None
    if signs == ["\\in"]:
        return items[1] if isinstance(items[1], Group) else None
    if len(items) == 3:
        return Group(("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"), (items[0], items[2]))
    if place == 0:
        return Group("()" if signs[0] == "<" else "(]", (Atom("-\\infty"), items[1]))
    return Group("()" if signs[0] == "<" else "[)", (items[0], Atom("\\infty")))


def variable_of(group: Group) -> str | None:
    """The variable of an inequality, read as in :func:`as_interval`."""
    place = _variable_place(group)
    item = None if place is None else group.items[place]
    return item.text if isinstance(item, Atom) else None


def _variable_place(group: Group) -> int | None:
    signs, items = group.kind.split(" "), group.items
    if signs == ["\\in"]:
        return 0 if _is_name(items[0]) else None
    if not _LESS.issuperset(signs):
        return None
    if len(items) == 3:
        return 1 if _is_name(items[1]) else None
    return next((place for place in (0, 1) if len(items) == 2 and _is_name(items[place])), None)


def has_relation(text: str) -> bool:
    """Whether a text has a relation outside all brackets."""
    return any(len(split_outside(part, _RELATIONS)[0]) > 1 for part in split_outside(text, frozenset(",;"))[0])


def _parse(text: str, depth: int) -> Answer:
    if depth > 4 or parse_number(text) is not None or ("," in text and parse_number(split_unit(text)[0]) is not None):
        return Atom(text)
    for separators, kind in ((frozenset(",;"), "list"), (frozenset({"\\cup"}), "union")):
        pieces, _ = split_outside(text, separators)
        if 1 < len(pieces) <= MAX_ITEMS:
            return _group(kind, pieces, depth)
    if text == "\\mathbb{R}":
        return Group("()", (Atom("-\\infty"), Atom("\\infty")))
    return _relation(text, depth) or _bracketed(text, depth) or _matrix(text, depth) or _both_signs(text, depth)


def _is_name(answer: Answer) -> bool:
    return isinstance(answer, Atom) and bool(_NAME.fullmatch(answer.text))


def _relation(text: str, depth: int) -> Answer | None:
    sides, signs = split_outside(text, _RELATIONS)
    if len(sides) == 1:
        return None
    if signs[0] in _FLIPPED:
        sides, signs = sides[::-1], [_FLIPPED.get(sign, sign) for sign in signs[::-1]]
    if signs == ["="] and _TUPLE.fullmatch(sides[0]):  # (x,y)=(1,2)
        names, values = (split_outside(side[1:-1], frozenset(","))[0] for side in sides)
        if sides[1][:1] == "(" and len(names) == len(values):
            return _group("list", [f"{name}={value}" for name, value in zip(names, values, strict=True)], depth)
    return _group(" ".join(signs), sides, depth)


def _bracketed(text: str, depth: int) -> Answer | None:
    tokens = _TOKEN.findall(text)
    if len(tokens) < 3 or tokens[0] not in ("(", "[", "{", "\\{") or _closing(tokens) != len(tokens) - 1:
        return None
    inner = "".join(tokens[1:-1]).strip()
    pieces, _ = split_outside(inner, frozenset(",;"))
    if tokens[0] == "\\{":
        return _braced(inner, pieces, depth) if tokens[-1] == "\\}" else None
    if tokens[0] == "{" or (len(pieces) == 1 and ((tokens[0], tokens[-1]) == ("(", ")") or _MATRIX.fullmatch(inner))):
        return _parse(inner, depth + 1)  # around a number or a matrix
    return _group(tokens[0] + tokens[-1], pieces, depth) if 1 < len(pieces) <= MAX_ITEMS else None


def _braced(inner: str, pieces: list[str], depth: int) -> Answer | None:
    """A set given by its elements, or by a rule: ``{x | x > 0}``."""
    rule, _ = split_outside(inner, frozenset("|:"))
    if len(rule) == 1:
        return _group("list", pieces, depth) if len(pieces) <= MAX_ITEMS else None
    name = rule[0].removesuffix("\\in\\mathbb{R}")
    if len(rule) > 2 or len(pieces) > 1 or not _NAME.fullmatch(name) or not has_relation(rule[1]):
        return None
    return _parse(rule[1], depth + 1)


def _matrix(text: str, depth: int) -> Answer | None:
    match = _MATRIX.fullmatch(text)
    if match is None or match[1] == "vmatrix":
        return None
    rows = [split_outside(row, frozenset("&"))[0] for row in split_outside(match[2], frozenset({"\\\\"}))[0] if row]
    if len({len(row) for row in rows}) != 1 or len(rows) * len(rows[0]) > MAX_ITEMS:
        return None
    return _group(f"matrix {len(rows)}", [cell for row in rows for cell in row], depth)


def _both_signs(text: str, depth: int) -> Answer:
    if text.count("\\pm") != 1 or "\\mp" in text:
        return Atom(text)
    before, after = text.split("\\pm")
    return Group("list", (Atom(f"{before}+{after.strip()}".lstrip("+")), Atom(f"{before}-{after.strip()}")))


def _group(kind: str, pieces: list[str], depth: int) -> Group:
    items: list[Answer] = []
    for piece in pieces:
        item = _parse(piece, depth + 1)
        if kind == "list" and isinstance(item, Group) and item.kind == "list" and "\\pm" in piece:
            items.extend(item.items)
        else:
            items.append(item)
    return Group(kind, tuple(items))


def split_outside(text: str, separators: frozenset[str]) -> tuple[list[str], list[str]]:
    """The pieces of a text between separators outside all brackets, and those separators."""
    if not any(separator in text for separator in separators):
        return [text.strip()], []
    pieces, found, depth = [""], [], 0
    for token in _TOKEN.findall(text):
        if token in separators and depth == 0:
            found.append(token)
            pieces.append("")
        else:
            pieces[-1] += token
        depth += _step(token)
    return [piece.strip() for piece in pieces], found


def _closing(tokens: list[str]) -> int:
    """The index of the bracket that closes the first token; -1 if none does."""
    depths = accumulate(map(_step, tokens))
    return next((place for place, depth in enumerate(depths) if depth == 0), -1)


def _step(token: str) -> int:
    if token in ("{", "(", "[", "\\{", "\\lfloor", "\\lceil") or token.startswith("\\begin{"):
        return 1
    return -(token in ("}", ")", "]", "\\}", "\\rfloor", "\\rceil") or token.startswith("\\end{"))
