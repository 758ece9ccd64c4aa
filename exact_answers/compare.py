"""Comparison of two bare answers, part by part; pairs that only math-verify can decide are collected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from exact_answers.boxes import is_within_limits
from exact_answers.exact_numbers import Number, parse_number, same_number
from exact_answers.expressions import TIMES, Node
from exact_answers.spellings.parts import named_in_order
from exact_answers.spellings.readings import readings
from exact_answers.structure import (
    Answer,
    Atom,
    Group,
    as_interval,
    as_list,
    has_relation,
    parse_answer,
    split_condition,
    variable_of,
    without_braces,
    without_variable,
)
from exact_answers.symbolic.pool import needs_math_verify
from exact_answers.text import plain_text, tidy
from exact_answers.units import split_unit
from exact_answers.values import nodes, product_of_letters, readable, same_equation, same_expression

MAX_PAIRS = 4
"""Largest number of pairs of expressions that one answer may send to math-verify."""

_WORDS = re.compile(r"(?=.{5})(?:[A-Z][a-z]|[a-z]{2})[a-z]*(?:[A-Z][a-z]+)*")
_TEXT_WORDS = re.compile(rf"[A-Z]?[a-z]{{2,4}}|{_WORDS.pattern}")
_BRACED_NUMBER = re.compile(r"^([+-]?)\{([0-9.,]+)\}$")
_TRUTHS = frozenset({"yes", "no", "true", "false", "none"})

Pair: TypeAlias = tuple[str, str]
"""An expression of the answer and one of the gold answer."""


class Reading(NamedTuple):
    """The parsed forms of a single expression."""

    plain: str  # normalized text
    number: Number | None
    unit: str
    tree: Node | None  # None if it cannot be read


class Comparison:
    """Compares one answer with one gold answer.

    Numbers may differ by a relative ``tolerance`` if one is not an integer. ``known`` are verdicts of math-verify.
    """

    pays_words_in_order = False

    def __init__(self, tolerance: float = 0.0, known: Mapping[Pair, bool] | None = None) -> None:
        self.tolerance = tolerance
        self.known = known or {}
        self.missing: list[Pair] = []

    def same(self, answer: str, gold: str) -> bool | None:
        """Whether they are the same; None if math-verify must decide the pairs in ``missing``."""
        if not (is_within_limits(answer) and is_within_limits(gold)):
            return False
        verdict: bool | None = False
        for pair in readings(answer, gold):
            verdict = self._same_texts(*pair)
            if verdict is not False:
                break
        return False if len(self.missing) > MAX_PAIRS else verdict

    def _same_texts(self, answer: str, gold: str) -> bool | None:
        first, second = without_braces(tidy(answer)), without_braces(tidy(gold))
        if not (plain_text(first) and plain_text(second)):
            return False
        (value, condition), (other, same_condition) = split_condition(first), split_condition(second)
        if not (condition and same_condition):
            first, second = value, other  # either may leave it out
        written = first, second
        if has_relation(first) != has_relation(second):
            first, second = without_variable(first), without_variable(second)
        if plain_text(first) == plain_text(second):
            return True
        verdict = self._same(parse_answer(first), parse_answer(second))
        if verdict is not False or "=" not in answer + gold:
            return verdict
        values = named_in_order(parse_answer(written[0]), parse_answer(written[1]), self.pays_words_in_order)
        return verdict if values is None else self._same(*values)

    def _same(self, first: Answer, second: Answer) -> bool | None:
        if isinstance(first, Atom) and isinstance(second, Atom):
            return self._same_atom(first.text, second.text)
        first, second = as_list(first), as_list(second)  # 70,110 compared to 110, 70
        if isinstance(first, Atom) or isinstance(second, Atom):
            return False
        first, second = _alike(first, second)
        if first.kind != second.kind or len(first.items) != len(second.items):
            return False
        if not first.is_ordered:
            return self._same_in_any_order(list(first.items), list(second.items))
        verdict = _all([self._same(a, b) for a, b in zip(first.items, second.items, strict=True)])
        return self._same_equation(first, second) if first.kind == "=" and not verdict else verdict

    def _same_in_any_order(self, first: list[Answer], second: list[Answer]) -> bool | None:
        verdicts: list[bool | None] = []
        for item in first:
            found = [self._same(item, other) for other in second]
            best = found.index(True) if True in found else found.index(None) if None in found else -1
            if best < 0:
                return False
            verdicts.append(found[best])
            del second[best]
        return _all(verdicts)

    def _same_equation(self, first: Group, second: Group) -> bool | None:
        if all(self._same(a, b) for a, b in zip(first.items, second.items[::-1], strict=True)):
            return True
        trees = [read_atom(item.text).tree for item in (*first.items, *second.items) if isinstance(item, Atom)]
        if len(trees) != 4 or None in trees:
            return False
        one, two, three, four = (tree for tree in trees if tree is not None)
        if {three.kind, four.kind} == {"var", "num"}:
            return False  # x=5 requires x=5
        return same_equation((one, two), (three, four)) or False

    def _same_atom(self, first: str, second: str) -> bool | None:
        one, two = read_atom(first), read_atom(second)
        if one.unit and two.unit and one.unit != two.unit:
            return False
        if one.number is not None and two.number is not None:
            return same_number(one.number, two.number, self.tolerance)
        if one.plain == two.plain or _same_words(one.plain, two.plain, "\\text" in first + second):
            return one.plain != ""
        if self._wants_number(two):
            return False
        tree = one.tree or (two.tree and product_of_letters(first))
        other = two.tree or (one.tree and product_of_letters(second))
        if tree is not None and other is not None:
            return same_expression(tree, other, self.tolerance)
        if not needs_math_verify(first, second):
            return False
        pair = first, second
        if pair not in self.known:
            self.missing.append(pair)
        return self.known.get(pair)

    def _wants_number(self, gold: Reading) -> bool:
        """Whether a gold answer is a number, and not written as a power or a product such as ``10^5``.

        A calculation with that result then does not match it.
        """
        return gold.number is not None and not any(sign in gold.plain for sign in ("^", *TIMES))


@lru_cache(maxsize=4096)
def read_atom(text: str) -> Reading:
    """The parsed forms of a tidied expression, with its unit split off after a number or a constant."""
    value, unit = split_unit(text)
    number, tree = _read(value)
    if unit and number is None and (tree is None or has_letters(tree)):
        value, unit = text, ""  # not a quantity with a unit, but a product or a phrase
        number, tree = _read(text)
    return Reading(plain_text(value), number, unit, tree)


def _alike(first: Group, second: Group) -> tuple[Group, Group]:
    """Both answers as intervals if one is an interval and the other an inequality, or two kinds of inequality.

    Inequalities in a list may be meant as a union.
    """
    if first.kind == second.kind:
        return first, second
    names = variable_of(first), variable_of(second)
    if None in names or names[0] == names[1]:
        first, second = as_interval(first) or first, as_interval(second) or second
    if {first.kind, second.kind} == {"list", "union"} and _is_union(first) and _is_union(second):
        first = Group(second.kind, first.items)
    return first, second


def _is_union(group: Group) -> bool:
    """Whether a group is a union of intervals, or inequalities of one variable that may be meant as one."""
    names = {variable_of(item) for item in group.items if isinstance(item, Group)}
    kinds = {item.kind if isinstance(item, Group) else "" for item in group.items}
    is_one = len(names) == 1 and "" not in kinds
    return is_one and (None not in names or (group.kind == "union" and kinds <= {"()", "(]", "[)", "[]"}))


def _same_words(first: str, second: str, is_text: bool) -> bool:
    """Whether two words differ only in capitals; ``AB`` and ``ab`` are not words, ``Abc`` only as text."""
    if first.casefold() != second.casefold():
        return False
    if first.casefold() in _TRUTHS:
        return all(word in (word.lower(), word.capitalize(), word.upper()) for word in (first, second))
    words = _TEXT_WORDS if is_text else _WORDS
    return bool(words.fullmatch(first) and words.fullmatch(second))


def _read(text: str) -> tuple[Number | None, Node | None]:
    if text.endswith("}"):
        text = _BRACED_NUMBER.sub(r"\1\2", text)
    number = parse_number(text)
    if number is None:
        return None, readable(text)
    if abs(number.exponent) > 2000:
        return number, None
    return number, Node("num", value=number.mantissa * Fraction(10) ** number.exponent)


def has_letters(tree: Node) -> bool:
    """Whether an expression has a letter that stands for a number."""
    return any(node.kind == "var" for node in nodes(tree))


def _all(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True
