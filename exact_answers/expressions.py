r"""A parser from a single LaTeX expression to a tree, or to a refusal: nothing is guessed and nothing is evaluated.

Ambiguous notation is refused: ``x^53`` (is the exponent 5?), ``a/bc``, ``1\frac{1}{2}x``, ``\sin x/2``,
``f(x+1)``, words. A refused expression is still compared as text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import takewhile
from typing import NamedTuple, NoReturn

TIMES = ("*", "\\cdot", "\\times")
BRACKETS = {"{": "}", "(": ")", "[": "]", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
ROUNDED = {"\\lfloor": "floor", "\\lceil": "ceil"}


def _commands(names: str) -> frozenset[str]:
    return frozenset(f"\\{name}" for name in names.split())


FUNCTIONS = _commands("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp ln log lg")
"""Functions of one argument."""
GREEK = _commands(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi "
    "chi psi omega hbar ell Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
"""Greek letters; pi is a number."""
MARKS = _commands("vec overrightarrow dot ddot bar overline hat tilde mathbb mathcal")
"""Commands that turn a letter into a name."""
PRIMARY = _commands("frac sqrt binom pi lfloor lceil") | FUNCTIONS | GREEK | MARKS
"""Commands that can begin an operand."""
MAX_DEPTH = 24
"""Largest depth of nested brackets and functions."""

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[a-zA-Z]|'+|[-+*/^_(){}\[\]|!]|\s+", re.DOTALL)
_ROMAN = re.compile(r"\\(?:text|textit|mathrm|mathbf|mathit|boldsymbol|bm)\{([a-zA-Z])\}")
_WORD = re.compile(r"[a-zA-Z' ]{2,}")
_ABOVE = re.compile(r"\{(?:d|\\partial)(?:\^(?:[0-9]|\{[0-9]\}))?.*\}")
_BELOW = re.compile(r"\{(?:d|\\partial)(?:[a-zA-Z]|\\[a-zA-Z]+)(?:\^(?:[0-9]|\{[0-9]\}))?\}")


class Node(NamedTuple):
    """An operation on other nodes, or a leaf: ``num`` with its value, ``var`` or ``const`` with its name."""

    kind: str
    parts: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


class Unreadable(ValueError):
    """An expression that this parser refuses."""


def read_expression(text: str) -> Node:
    """The tree of a tidied expression; raises :class:`Unreadable` for anything unknown or ambiguous."""
    text = _ROMAN.sub(r"\1", text)
    if _WORD.fullmatch(text):
        raise Unreadable("a word")
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise Unreadable("an unknown character")
    reader = _Reader([token for token in tokens if not token.isspace()])
    node = reader.sum()
    if reader.token:
        raise Unreadable(f"{reader.token!r} after the end")
    return node


class _Reader:
    """A recursive descent parser; every method reads what it is named after and leaves ``token`` at the next one."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.place = self.depth = self.bars = 0
        self.raised = -1  # end of the last exponent: a digit after it is another factor, as in 2^6 3^5

    @property
    def token(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.token
        if not token or wanted not in (None, token):
            self.refuse()
        self.place += 1
        return token

    def deepen(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse()

    def refuse(self) -> NoReturn:
        raise Unreadable(f"{self.token!r} at token {self.place}")

    def sum(self) -> Node:
        terms = [self.signed_product()]
        while self.token in ("+", "-"):
            terms.append(self.signed_product())
        return _joined("sum", terms)

    def signed_product(self) -> Node:
        sign = self.take() if self.token in ("+", "-") else "+"
        return Node("neg", (self.product(),)) if sign == "-" else self.product()

    def product(self) -> Node:
        is_literal = self.token[:1].isdigit()
        factors = [self.factor()]
        while True:
            if self.token in TIMES:
                self.take()
                factors.append(self.signed_factor())
            elif self.token == "/":
                self.take()
                factors.append(Node("inverse", (self.signed_factor(),)))
                if self.starts_factor():
                    self.refuse()  # a/bc
            elif self.starts_factor():
                factors.append(self.implicit_factor(after_literal=is_literal and len(factors) == 1))
            else:
                return _joined("product", factors)

    def signed_factor(self) -> Node:
        if self.token == "-":
            self.take()
            return Node("neg", (self.factor(),))
        return self.factor()

    def implicit_factor(self, after_literal: bool) -> Node:
        if self.token[0] in "0123456789." and self.tokens[self.place - 1] not in (")", "]", "!"):
            if self.place != self.raised or self.tokens[self.place + 1 : self.place + 2] == ["/"]:
                self.refuse()  # x2, 2^3 1/2
        is_fraction = self.token == "\\frac"
        factor = self.factor()
        if after_literal and is_fraction and factor.kind == "product" and _is_number(factor):
            self.refuse()  # a mixed number inside an expression
        return factor

    def starts_factor(self) -> bool:
        token = self.token
        opens = token in ("{", "(", "[") or (token == "|" and not self.bars)
        return bool(token) and (token[0].isalnum() or token[0] == "." or opens or token in PRIMARY)

    def factor(self) -> Node:
        node, is_raised = self.primary(), False
        while self.token in ("^", "!"):
            if (is_raised and self.token == "^") or self.tokens[self.place : self.place + 3] == ["!"] * 3:
                self.refuse()  # x^2^3, x!!!
            if self.take() == "!":
                node = Node("factorial", (node,))
            elif node.kind == "var" and (primes := self.primes()):
                node = Node("var", name=node.name + primes)
            else:
                node, is_raised = Node("power", (node, self.script())), True
                self.raised = self.place
        return node

    def primes(self) -> str:
        r"""The primes of ``x^{\prime\prime}``, "" if another exponent follows."""
        if self.token == "\\prime":
            self.take()
            return "'"
        inside = list(takewhile("\\prime".__eq__, self.tokens[self.place + 1 :]))
        end = self.place + 1 + len(inside)
        if self.token != "{" or not inside or self.tokens[end : end + 1] != ["}"]:
            return ""
        self.place = end + 1
        return "'" * len(inside)

    def script(self) -> Node:
        """Read an exponent: a group, or one token of one character."""
        if self.token == "{":
            return self.bracketed()
        if self.token.isdigit() and len(self.token) > 1:
            self.refuse()
        if self.token[:1].isalnum() or self.token in GREEK or self.token == "\\pi":
            return self.primary(with_script=False)
        self.refuse()

    def primary(self, with_script: bool = True) -> Node:
        token = self.token
        if token[:1].isdigit() or token[:1] == ".":
            return self.number()
        if token in BRACKETS:
            return self.bracketed()
        if token == "|":
            return self.absolute()
        if token in FUNCTIONS:
            return self.function()
        if token == "\\pi":
            return Node("const", name=self.take())
        if token.isalpha() or token in GREEK or token in MARKS:
            return self.name(with_script)
        if token in ("\\frac", "\\binom", "\\sqrt"):
            return self.structure()
        self.refuse()

    def number(self) -> Node:
        token = self.take()
        if self.token == "_" or not (token[:1].isdigit() or token[-1].isdigit()):
            self.refuse()  # the subscript is a number base
        return Node("num", value=Fraction(token.rstrip(".")))

    def bracketed(self) -> Node:
        opening = self.take()
        self.deepen()
        bars, self.bars = self.bars, 0
        node = self.sum()
        self.take(BRACKETS[opening])
        self.depth, self.bars = self.depth - 1, bars
        return Node("rounded", (node,), ROUNDED[opening]) if opening in ROUNDED else node

    def absolute(self) -> Node:
        self.take("|")
        if self.bars:
            self.refuse()
        self.bars = 1
        node = self.sum()
        self.bars = 0
        self.take("|")
        return Node("abs", (node,))

    def structure(self) -> Node:
        command = self.take()
        if command == "\\sqrt":
            degree = self.bracketed() if self.token == "[" else Node("num", value=Fraction(2))
            return Node("root", (degree, self.group()))
        if command == "\\frac" and (derivative := self.derivative()):
            return derivative
        above, below = self.group(), self.group()
        if command == "\\binom":
            return Node("binomial", (above, below))
        return Node("product", (above, Node("inverse", (below,))))

    def derivative(self) -> Node | None:
        r"""The name that ``\frac{dy}{dt}`` stands for, None for a plain fraction."""
        start = self.place
        raw = [self.raw_group(), self.raw_group()]
        if _ABOVE.fullmatch(raw[0]) and _BELOW.fullmatch(raw[1]):
            return Node("var", name="".join(raw))
        self.place = start
        return None

    def group(self) -> Node:
        if self.token != "{":
            self.refuse()
        return self.bracketed()

    def raw_group(self) -> str:
        """The tokens of a group unchanged, or one token."""
        start, depth = self.place, 0
        while True:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if depth <= 0:
                return "".join(self.tokens[start : self.place])

    def name(self, with_script: bool) -> Node:
        name = self.take()
        if name in MARKS:
            name += self.raw_group().strip("{}")
        if with_script and self.token == "_":
            self.take()
            name += f"_{self.raw_group().strip('{}')}"
        if self.token.startswith("'"):
            name += self.take()
        call = self.tokens[self.place : self.place + 3]
        is_called = with_script and name not in ("e", "i") and len(call) == 3 and call[0] == "(" and call[2] == ")"
        if is_called and call[1].strip("\\").isalnum():
            self.place += 3
            return Node("var", name=f"{name}({call[1]})")
        if name in ("f", "g", "h") and self.token == "(":
            self.refuse()
        return Node("const" if name in ("e", "i") else "var", name=name)

    def function(self) -> Node:
        name = self.take()
        base: Node | None = None
        if name in ("\\log", "\\lg") and self.token == "_":
            self.take()
            base = self.script() if self.token == "{" or len(self.token) == 1 else self.number()
        exponent: Node | None = None
        if self.token == "^":
            self.take()
            exponent = self.script()
            inverse = name.replace("\\", "\\arc")
            if exponent.kind == "neg" and exponent.parts[0].value == 1 and inverse in FUNCTIONS:
                name, exponent = inverse, None
            elif exponent.kind == "neg":
                self.refuse()  # \ln^{-1}: inverse or power?
        self.deepen()
        argument = self.argument()
        self.depth -= 1
        node = Node("log", (base, argument)) if base else Node("function", (argument,), name)
        return node if exponent is None else Node("power", (node, exponent))

    def argument(self) -> Node:
        """Read one bracket, or the factors up to the next operator or function."""
        if self.token in BRACKETS or self.token == "|":
            return self.primary()
        factors = [self.factor()]
        while self.starts_factor() and self.token not in FUNCTIONS and self.token not in BRACKETS:
            factors.append(self.implicit_factor(after_literal=False))
        if self.token == "/":
            self.refuse()  # \sin x/2
        return _joined("product", factors)


def _joined(kind: str, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def _is_number(node: Node) -> bool:
    return all(part.kind == "num" or (part.kind == "inverse" and part.parts[0].kind == "num") for part in node.parts)
