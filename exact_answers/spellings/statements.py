r"""Equations that state what an answer is: ``m+n=73`` says 73, ``\text{Smallest }n=50`` says 50, ``a:b=2:3`` says 2:3.

The left side must be a quantity that somebody may have asked for. An equation for one letter that is not solved for it
(``2x=10``, ``x^2=5``, ``|x|=5``), one in normal form (``x+y-5=0``), a curve's (``x^2+y^2=1``) and a chain say nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

from exact_answers.expressions import Node
from exact_answers.spellings.words import CONDITIONS, OTHERWISE, TEXT_CONTENT
from exact_answers.structure import PLAIN_NAME, THINGS, is_variable, split_outside
from exact_answers.units import split_unit
from exact_answers.values import nodes, readable

_RELATIONS = frozenset({"=", "<", ">", "\\leq", "\\geq", "\\neq", "\\in", "\\approx", "\\equiv", ",", ";"})
_RATIO = frozenset({":"})
_TURNED = re.compile(rf"(?i:{OTHERWISE})|^\W*(?:text\W*)?(?i:{CONDITIONS})")
_SHAPE = r"\\(?:triangle|angle|square|odot|parallel) ?[A-Z]{1,4}"
_PHRASE = re.compile(  # pieces of \text{Smallest }n, \text{Area of }\triangle ABC, \max f, \gcd(a,b), N\bmod 1000
    rf"\\(?:text|textrm|textbf|mathrm|mbox)\{{[a-zA-Z\x1f,:]+\}}(?:_(?:[0-9a-zA-Z]|\{{[0-9a-zA-Z]+\}}))?|{_SHAPE}|"
    r"\\(?:operatorname\{[a-zA-Z]+\}|gcd|lcm|max|min|deg|det|dim|arg|Re|Im)_?(?:\([^()]*\))?|"
    rf"(?<=[a-zA-Z)}}])\\(?:bmod|mod) ?[0-9]+$|{PLAIN_NAME}| "
)
_WORDY = re.compile(rf"\\(?:text|math|mbox|operatorname|gcd|lcm|max|min|deg|det|dim|arg|Re|Im|b?mod)|{_SHAPE}")
_SIZE = re.compile(r"\\#[A-Z]|\|[A-Z]\|")
_THING = re.compile(rf"{_SHAPE}|{'|'.join(THINGS)}|(?<![A-Za-z\\])[A-Z]{{2,4}}(?![A-Za-z])")
_COORDINATES = frozenset("xyz")
_ANGLES = frozenset("\\sin \\cos \\tan \\cot \\sec \\csc".split())


@lru_cache(maxsize=4096)
def stated_value(text: str) -> str | None:
    """The right side of a tidied equation whose left side is a quantity; None for any other text."""
    sides, signs = split_outside(text, _RELATIONS)
    if signs != ["="] or not all(sides) or sides[1] == "0" or _letters(sides[0]) & _letters(split_unit(sides[1])[0]):
        return None
    return sides[1] if is_quantity(sides[0]) else None


def is_quantity(text: str) -> bool:
    """Whether a tidied text says what was asked for, and not an equation's side that is yet to be solved."""
    if _TURNED.search(_words(text)):
        return False
    parts = split_outside(text, _RATIO)[0]
    if len(parts) > 1:
        return all(part and (is_variable(part) or is_quantity(part)) for part in parts)
    if is_variable(text) or text.isalpha() or _SIZE.fullmatch(text):
        return True
    if _WORDY.search(text) and "".join(_PHRASE.findall(text)) == text:
        return True
    tree = readable(_THING.sub(_letter, text))
    names = {node.name for node in nodes(tree) if node.kind == "var"} if tree else set()
    if tree is None or (names <= _COORDINATES and any(node.kind == "power" for node in nodes(tree))):
        return False
    return len(names) > 1 or (len(names) == 1 and _is_measure(tree))


def _is_measure(tree: Node) -> bool:
    r"""Whether an expression of one letter is a quantity by itself: ``\tan\theta``, ``\frac{V}{\pi}``."""
    if tree.kind == "function":
        return tree.name in _ANGLES
    if tree.kind != "product" or len(tree.parts) != 2:
        return False
    above, below = tree.parts
    return (
        above.kind == "var" and below.kind == "inverse" and {n.kind for n in nodes(below)} & {"const", "root"} != set()
    )


def _letter(match: re.Match[str]) -> str:
    r"""A single name, which the reader knows, for an angle, a segment or a probability."""
    return rf"\hat{{{re.sub('[^a-zA-Z0-9]', '', match[0])}}}"


def _words(text: str) -> str:
    """What a text says in letters, without its commands."""
    return re.sub(r"\\[a-zA-Z]+", " ", TEXT_CONTENT.sub(r" \1 ", text).replace("\x1f", " "))


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", TEXT_CONTENT.sub("", text))))
