"""Values of small arithmetic expressions, read by a parser of our own: nothing is ever evaluated as code."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 256
"""Largest number of characters in an expression; it bounds the numbers too, as there are no powers."""
MAX_DEPTH = 20
"""Largest number of nested parentheses."""

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the integers in it, in order.

    Allowed are integers in ASCII digits, ``+ - * /`` between them, and parentheses; no signs and no spaces.

    Returns:
        None if the text is anything else, too long, too deeply nested, or divides by zero.
    """
    tokens = _TOKEN.findall(text) if len(text) <= MAX_LENGTH else []
    if not tokens or "".join(tokens) != text:
        return None
    parser = _Parser(tokens)
    try:
        value = parser.sum(depth=0)
    except (SyntaxError, ZeroDivisionError):
        return None
    return (value, parser.numbers) if parser.next is None else None


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = iter(tokens)
        self.numbers: list[int] = []
        self.next = next(self.tokens, None)

    def take(self) -> str | None:
        token, self.next = self.next, next(self.tokens, None)
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next in ("+", "-"):
            value = value + self.product(depth) if self.take() == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.next in ("*", "/"):
            value = value * self.atom(depth) if self.take() == "*" else value / self.atom(depth)
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "(" and depth < MAX_DEPTH:
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise SyntaxError
            return value
        if token is None or not token.isdigit():
            raise SyntaxError
        self.numbers.append(int(token))
        return Fraction(int(token))
