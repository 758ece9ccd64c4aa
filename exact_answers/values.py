"""Equality of two expressions: computed exactly if possible, at a few points for their letters.

Sums, products and integer powers of fractions stay fractions. Roots, functions and constants are computed to
``PRECISION`` bits. Two expressions that agree at every point to nearly all of these bits are the same; two that are
not differ at the first point already. If a number with many bits is involved, whose differences ``PRECISION`` bits
may not show, the first point is computed again with three times as many. Values that would be huge are refused
before they are computed, and so is a second evaluation that would take long.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeAlias

from exact_answers.expressions import Node, Unreadable, read_expression

PRECISION = 600
"""Bits of a value that is not a fraction."""
MAX_BITS = 20_000
"""Bits of a numerator, a denominator or an exponent of two."""
INTEGERS = frozenset("ijklmnpqIJKLMNPQ")
"""First letters of names that stand for integers by custom, where values are rounded."""
NUM_POINTS = 3
NUM_WHOLE_EXPONENTS = 12  # points for exponents of a negative base, whose powers repeat
NUM_WHOLE_POINTS = 64  # points if values are rounded, so that different expressions agree at most points
MAX_CHOICE = 10_000
"""Largest n of a binomial coefficient."""

Value: TypeAlias = Any  # a Fraction, or a number of mpmath
Point: TypeAlias = Callable[[str], Fraction]  # the number for each letter

_PLAIN: dict[str, Callable[[Value], Value]] = {"neg": operator.neg, "abs": abs, "inverse": lambda value: 1 / value}
_SLOW = 8  # largest number of factorials of non-integers in one expression
_SHORT = 180  # bits whose differences show in PRECISION bits
_MAX_PRECISION = 13_000
_MAX_WORK = 1000.0  # roots and functions of one expression at 1000 bits; time is quadratic in the bits


@lru_cache(maxsize=4096)
def readable(text: str) -> Node | None:
    """The tree of an expression, None if it cannot be read."""
    try:
        return read_expression(text)
    except Unreadable:
        return None


def product_of_letters(text: str) -> Node | None:
    """The product that ``ab`` may stand for; None for longer text, other characters, or letters of constants."""
    return Node("product", tuple(Node("var", name=c) for c in text)) if re.fullmatch("[a-df-hj-z]{2,4}", text) else None


def same_expression(first: Node, second: Node, tolerance: float = 0.0) -> bool | None:
    """Whether two expressions are equal for all values of their letters; None if that cannot be decided.

    ``tolerance`` is the largest relative difference of two constants.
    """
    tolerance = 0.0 if "var" in _kinds(first, second) else tolerance
    try:
        for number, point in enumerate(_points(first, second)):
            evaluation = _Evaluation(point)
            if not evaluation.same(first, second, tolerance):
                return False
            finer = _finer(evaluation) if number == 0 and not tolerance else []
            if finer and not finer[0].same(first, second):
                return False
    except (ArithmeticError, TypeError, ValueError):  # including Unreadable
        return None
    return True


def same_equation(first: tuple[Node, Node], second: tuple[Node, Node]) -> bool | None:
    """Whether two equations, given by their sides, are the same: one's difference is the other's times a constant."""
    one, two = (Node("sum", (left, Node("neg", (right,)))) for left, right in (first, second))
    if "var" not in _kinds(one) & _kinds(two):
        return None  # no shared letter, as in 1=2
    try:
        evaluations = [_Evaluation(point) for point in _points(one, two)]
        ratios = (evaluation.ratio(one, two) for evaluation in evaluations)
        factor = next(ratios)
        if factor == 0 or not all(evaluations[0].close(factor, other) for other in ratios):
            return False
        finer = _finer(*evaluations[:2])
        return not finer or finer[0].close(*(evaluation.ratio(one, two) for evaluation in finer))
    except (ArithmeticError, TypeError, ValueError):
        return None


def nodes(*trees: Node) -> Iterator[Node]:
    """All nodes of some trees."""
    for tree in trees:
        yield tree
        yield from nodes(*tree.parts)


def _kinds(*trees: Node) -> set[str]:
    return {node.kind for node in nodes(*trees)}


def _points(first: Node, second: Node) -> Iterator[Point]:
    r"""Numbers for all letters, the same in every process: between 1/2 and 5/2, one point if there are no letters.

    They are integers for all letters if values are rounded, and for letters in the exponent of a negative number. With
    absolute values, the last point has negative numbers. Where values are rounded, letters that do not name integers
    by custom take fractions at the last points, at which ``\lceil x\rceil`` is not ``\lfloor x\rfloor``.
    """
    kinds, whole = _kinds(first, second), _whole_exponents(first, second)
    is_rounded = "rounded" in kinds
    count = NUM_WHOLE_POINTS + NUM_POINTS if is_rounded else NUM_WHOLE_EXPONENTS if whole else NUM_POINTS
    for number in range(count + ("abs" in kinds) if "var" in kinds else 1):

        def value(name: str, number: int = number) -> Fraction:
            digest = sha256(f"{number} {name}".encode("utf-8", "backslashreplace")).digest()
            bits = int.from_bytes(digest[:5], "big")
            size = Fraction(1, 2) + Fraction(bits, 2**39)
            is_whole = is_rounded and (number < NUM_WHOLE_POINTS or name[0] in INTEGERS)
            if is_whole or name in whole:  # 3 to 50 in turn, from different starts, then larger ones
                start = int.from_bytes(sha256(name.encode("utf-8", "backslashreplace")).digest()[:4], "big")
                size = Fraction(3 + (start + number) % 48 if number < 48 else 50 + bits % 950)
            return -size if number == count else size

        yield value


def _whole_exponents(*trees: Node) -> set[str]:
    """Letters in exponents of negative numbers: ``(-1/2)^k`` is real only for integer k."""
    signed = [node.parts[1] for node in nodes(*trees) if node.kind == "power" and _is_negative(node.parts[0])]
    return {node.name for node in nodes(*signed) if node.kind == "var"}


def _is_negative(node: Node) -> bool:
    """Whether an expression is negative for positive letters, judged by its signs."""
    if node.kind in ("neg", "inverse"):
        return (node.kind == "neg") != _is_negative(node.parts[0])
    return node.kind == "product" and sum(map(_is_negative, node.parts)) % 2 == 1


def evaluate(node: Node, point: Point) -> Value:
    """The value of an expression at a point; ArithmeticError if it is undefined there, ValueError if too large."""
    return _Evaluation(point).value(node)


class _Evaluation:
    def __init__(self, point: Point, precision: int = PRECISION) -> None:
        self.point, self.precision = point, precision
        self.slow, self.work = _SLOW, 0.0
        self.bits = 0  # bits of the longest fraction and of the largest and smallest number so far
        self.is_exact = True
        self.mp = _context(precision)

    def same(self, first: Node, second: Node, tolerance: float = 0.0) -> bool:
        return self.close(self.value(first), self.value(second), tolerance)

    def close(self, first: Value, second: Value, tolerance: float = 0.0) -> bool:
        """Whether two values are equal: fractions exactly, others to two thirds of the bits."""
        if isinstance(first, Fraction) and isinstance(second, Fraction) and not tolerance:
            return first == second
        first, second = self.number(first), self.number(second)
        allowed = max(abs(first), abs(second)) * (tolerance or self.mp.mpf(2) ** (-2 * self.precision // 3))
        # zero compared to the rounding error of a cancellation has no relative size
        vanishing = self.mp.mpf(2) ** (-5 * self.precision // 6)
        return bool(abs(first - second) <= allowed or max(abs(first), abs(second)) < vanishing)

    def value(self, node: Node) -> Value:
        if node.kind == "num":
            return self.checked(node.value)
        if node.kind == "var":
            return self.point(node.name)
        if node.kind == "const":
            return self.mp.mpc(0, 1) if node.name == "i" else +(self.mp.e if node.name == "e" else self.mp.pi)
        values = [self.value(part) for part in node.parts]
        operation = _PLAIN.get(node.kind) or getattr(self, node.kind)
        return self.checked(operation(node.name, *values) if node.name else operation(*values))

    def checked(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        else:
            if not self.mp.isfinite(value):
                raise Unreadable("no finite number")
            bits = 0 if value == 0 else abs(self.mp.mag(value))
            self.is_exact = False
        if bits > MAX_BITS:
            raise Unreadable("too large")
        self.bits = max(self.bits, bits)
        return value

    def worked(self) -> None:
        """Count a root or a function, which is slow with many bits."""
        self.work += (self.precision / 1000) ** 2
        if self.work > _MAX_WORK:
            raise Unreadable("too long")

    def ratio(self, first: Node, second: Node) -> Value:
        return self.product(self.value(first), 1 / self.value(second))

    def sum(self, *terms: Value) -> Value:
        return self.folded(operator.add, terms)

    def product(self, *factors: Value) -> Value:
        return self.folded(operator.mul, factors)

    def folded(self, operation: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
        total, *others = values
        for value in others:
            if not (isinstance(total, Fraction) and isinstance(value, Fraction)):
                total, value = self.number(total), self.number(value)
            total = self.checked(operation(total, value))
        return total

    def power(self, base: Value, exponent: Value) -> Value:
        if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if base in (1, -1, 0) or bits * abs(exponent) <= MAX_BITS:
                if base == 0 and exponent <= 0:
                    raise ZeroDivisionError
                return base ** (int(exponent) % 2 if base == -1 else int(exponent))
        base, exponent = self.number(base), self.number(exponent)
        if base == 0:
            return self.mp.mpf(0) if self.mp.re(exponent) > 0 else 1 / base
        if self.mp.mag(exponent) > 40 or abs(exponent * self.mp.log(base)) > MAX_BITS:
            raise Unreadable("too large")
        self.worked()
        return self.mp.power(base, exponent)

    def root(self, degree: Value, value: Value) -> Value:
        if isinstance(value, Fraction) and value < 0 and isinstance(degree, Fraction) and degree % 2 == 1:
            return -self.root(degree, -value)
        exact = _exact_root(value, degree)
        return exact if exact is not None else self.power(value, 1 / degree)

    def function(self, name: str, value: Value) -> Value:
        value = self.number(value)
        limit = MAX_BITS / 2 if name in ("\\exp", "\\sinh", "\\cosh", "\\tanh") else 2.0**64
        if abs(value) > limit and name not in ("\\ln", "\\log", "\\lg"):
            raise Unreadable("too large")
        self.worked()
        own = {"\\lg": "log10", "\\ln": "log", "\\arcsin": "asin", "\\arccos": "acos", "\\arctan": "atan"}
        return getattr(self.mp, own.get(name, name[1:]))(value)

    def log(self, base: Value, value: Value) -> Value:
        return self.function("\\ln", value) / self.function("\\ln", base)

    def rounded(self, name: str, value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(math.ceil(value) if name == "ceil" else math.floor(value))
        if self.mp.im(value) != 0:
            raise Unreadable("no real number")
        real = self.mp.re(value)  # also of i^2, which is stored as a complex number
        if abs(real - self.mp.nint(real)) < 2.0**-200:
            raise Unreadable("too near to a whole number to be rounded")
        return Fraction(int(self.mp.floor(real)) + (name == "ceil"))

    def factorial(self, value: Value) -> Value:
        if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 1500:
            return Fraction(math.factorial(int(value)))
        self.slow -= 1
        value = self.number(value)
        if self.slow < 0 or abs(value) > 1500 or self.precision > PRECISION:
            raise Unreadable("too large")
        return self.mp.gamma(value + 1)

    def binomial(self, above: Value, below: Value) -> Value:
        if all(isinstance(v, Fraction) and v.denominator == 1 and 0 <= v <= MAX_CHOICE for v in (above, below)):
            return Fraction(_choices(int(above), int(below)))
        rest = self.factorial(self.sum(above, -below))
        return self.number(self.factorial(above)) / self.number(self.product(self.factorial(below), rest))

    def number(self, value: Value) -> Value:
        """A fraction as a number of mpmath."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _finer(*evaluations: _Evaluation) -> list[_Evaluation]:
    """The same points with enough bits for all numbers involved; empty if there were enough."""
    bits = max(evaluation.bits for evaluation in evaluations)
    if bits <= _SHORT or all(evaluation.is_exact for evaluation in evaluations):
        return []
    precision = PRECISION + 3 * bits
    if precision > _MAX_PRECISION:
        raise Unreadable("too many bits to be told from what differs in the last")
    return [_Evaluation(evaluation.point, -(-precision // 512) * 512) for evaluation in evaluations]


def _exact_root(value: Value, degree: Value) -> Fraction | None:
    """The root of a fraction if it is a fraction."""
    if degree != 2 or not isinstance(value, Fraction) or value < 0:
        return None
    above, below = math.isqrt(value.numerator), math.isqrt(value.denominator)
    return Fraction(above, below) if above**2 == value.numerator and below**2 == value.denominator else None


@lru_cache(maxsize=64)
def _choices(above: int, below: int) -> int:
    return math.comb(above, below)


@lru_cache(maxsize=32)
def _context(precision: int) -> Any:
    """A context of mpmath with its own precision, independent of all other users of mpmath."""
    from mpmath.ctx_mp import MPContext

    context = MPContext()
    context.prec = precision
    return context
