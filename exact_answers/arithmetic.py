"""Values of small arithmetic expressions, read by the parser of the checker: nothing is ever evaluated as code."""

from __future__ import annotations

import re
from fractions import Fraction

from exact_answers.values import evaluate, nodes, readable

MAX_LENGTH = 256
"""Largest number of characters in an expression; it bounds the numbers too, as there are no powers."""

_CHARACTERS = re.compile(r"[-+*/()0-9]+")
_UNWRITTEN = re.compile(r"(?:^|[-+*/(])[-+]|[0-9)]\(|\)[0-9]")  # a sign, or a product without one


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the integers in it, in order.

    Allowed are integers in ASCII digits, ``+ - * /`` between them, and parentheses; no signs and no spaces.

    Returns:
        None if the text is anything else, too long, too deeply nested, or divides by zero.
    """
    if len(text) > MAX_LENGTH or not _CHARACTERS.fullmatch(text) or _UNWRITTEN.search(text):
        return None
    tree = readable(text)
    if tree is None:
        return None
    try:
        value: Fraction = evaluate(tree, lambda _: Fraction(0))
    except ZeroDivisionError:
        return None
    return value, [int(node.value) for node in nodes(tree) if node.kind == "num"]
