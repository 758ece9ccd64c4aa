r"""Exact values of numbers in mathematical notation, without ever computing a large power.

Supported are integers, decimals, thousands commas, leading zeros, signs, ``a/b``, ``\frac{a}{b}``, mixed numbers
(``3\frac{1}{2}`` and ``3 1/2`` are seven halves), repeating decimals (``0.1\overline{6}``), ``1.5e-3``,
``1.5\times10^{-3}`` and ``10^{5}``. Digits are ASCII.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 512
"""Largest number of characters in a number; longer text is not a number."""

_DECIMAL = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_TEN = r"10\^(?:([0-9])|\{([+-]?[0-9]+)\})"
_SCIENTIFIC = re.compile(rf"([+-]?)({_DECIMAL})(?:[eE]([+-]?[0-9]+)|(?:\\times|\\cdot|×|\*){_TEN})?")
_POWER_OF_TEN = re.compile(rf"([+-]?){_TEN}")
_FRACTION = re.compile(rf"([+-]?)([0-9]*)\\frac\{{([+-]?)({_DECIMAL})\}}\{{([+-]?)({_DECIMAL})\}}")
_SLASH = re.compile(rf"([+-]?)(?:([0-9]+) )?()({_DECIMAL})/([+-]?)({_DECIMAL})")

_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\{([0-9]+)\}|\\dot\{([0-9])\})")


class Number(NamedTuple):
    """``mantissa`` times ten to the ``exponent``; the exponent may be huge and is never expanded."""

    mantissa: Fraction
    exponent: int = 0


def parse_number(text: str) -> Number | None:
    """The value of a text that is a number and nothing else, or None.

    Args:
        text: Text normalized by :func:`~exact_answers.normalize_answer`: spaces only between digits.
    """
    if len(text) > MAX_LENGTH:
        return None
    if match := _SCIENTIFIC.fullmatch(text):
        sign, decimal, *exponents = match.groups()
        return Number(_signed(sign) * _fraction(decimal), int(next(filter(None, exponents), 0)))
    if match := _POWER_OF_TEN.fullmatch(text):
        sign, *exponents = match.groups()
        return Number(Fraction(_signed(sign)), int(next(filter(None, exponents))))
    if match := _REPEATING.fullmatch(text):
        return _repeating(*match.groups(""))
    if match := _FRACTION.fullmatch(text) or _SLASH.fullmatch(text):
        return _quotient(*match.groups())
    return None


def same_number(first: Number, second: Number, tolerance: float = 0.0) -> bool:
    """Whether two numbers are exactly equal, or within a tolerance.

    Args:
        first: First number.
        second: Second number.
        tolerance: Largest relative difference that counts as equal if one of the two is not an integer.
    """
    if first.mantissa == 0 or second.mantissa == 0:
        return first.mantissa == second.mantissa
    shift = first.exponent - second.exponent
    if abs(shift) > 4 * MAX_LENGTH:  # more orders of magnitude than the digits of two mantissas can bridge
        return False
    ratio = first.mantissa * Fraction(10) ** shift / second.mantissa
    if ratio == 1 or not tolerance or (is_whole(first) and is_whole(second)):
        return ratio == 1
    return abs(ratio - 1) <= Fraction(tolerance)


def is_whole(number: Number) -> bool:
    """Whether a number is an integer written without an exponent."""
    return number.exponent == 0 and number.mantissa.denominator == 1


def _quotient(sign: str, whole: str | None, sign_above: str, above: str, sign_below: str, below: str) -> Number | None:
    denominator = _signed(sign_below) * _fraction(below)
    if denominator == 0 or (whole and (sign_above or sign_below)):
        return None
    return Number(_signed(sign) * (int(whole or 0) + _signed(sign_above) * _fraction(above) / denominator))


def _repeating(sign: str, whole: str, once: str, again: str, dotted: str) -> Number:
    r"""The fraction that ``0.1\overline{6}`` stands for."""
    again = again or dotted
    fixed = int(f"0{whole}{once}")
    repeated = Fraction(int(again), 10 ** len(again) - 1)
    return Number(_signed(sign) * (fixed + repeated) / 10 ** len(once))


def _signed(sign: str) -> int:
    return -1 if sign == "-" else 1


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").rstrip("."))
