r"""The lenient convention of papers' graders, so that accuracies can be compared with theirs.

- An equation is its last side (``5\times3\times12=180``), unless two of its sides are numbers that differ.
- Arithmetic need not be carried out: ``2+3`` is 5, ``\binom{5}{2}`` is 10, ``\sqrt{4}`` is 2.
- A decimal with at least two decimal places and two significant digits is the gold answer if that rounds to it,
  unless the gold answer is an integer: ``0.33`` is one third.
- ``50\%`` is one half as well as 50, in the answer or in the gold answer.
- A sentence in the box is what it says: ``\text{The smallest }n\text{ is }50``; nothing if it denies or limits that.
- Parts named by words are the tuple or list in the same order: ``\text{length}=3,\text{width}=2`` is ``(3,2)``.
- Without any ``\boxed``, the end of the sentence after the last "the answer is" is the answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from exact_answers.boxes import MAX_BOX, answer_tail, extract_boxed, is_within_limits
from exact_answers.compare import Comparison, Reading, has_letters, read_atom
from exact_answers.exact_numbers import is_whole
from exact_answers.expressions import Node
from exact_answers.spellings.words import CONDITIONS, OTHERWISE, TEXT_CONTENT
from exact_answers.structure import has_relation, split_outside
from exact_answers.text import tidy
from exact_answers.values import evaluate, readable, same_expression

_SAID = re.compile(r"\bthe (?:final |correct )?answers? (?:is|are)\b:?\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)")
_SENTENCE = re.compile(r"((?:[A-Za-z$']+ ){1,12}?(?:is|are|equals)\b:? ?|(?:final )?answer ?: ?)(.+)", re.IGNORECASE)
_TURNED = re.compile(rf"\b(?:{OTHERWISE}|{CONDITIONS}|less|more|at least|at most)\b", re.IGNORECASE)
_DENIED = re.compile(r"(?<![a-z])(?:not|wrong|false|incorrect|never)(?![a-z])", re.IGNORECASE)
_EQUALS = frozenset({"="})
_NEARLY = frozenset({"\\approx", "\\simeq", "≈"})
_NEAR = 0.02  # relative difference of two sides of \approx
_PERCENT = re.compile(r"\\?%|\\text\s*\{\s*percent\s*\}|\s*\bpercent\b")
_ROUNDED = re.compile(r"[+-]?([0-9,]*)\.([0-9]{2,})(?:(?:[eE]|\\times|\\cdot|\*).*)?")


def extract_answer(completion: str, boxes_in_thoughts: bool = False) -> str | None:
    r"""The content of the last ``\boxed{}``, or without any, the text after "the answer is"."""
    tail = answer_tail(completion, boxes_in_thoughts)
    if "\\boxed" in tail:
        return extract_boxed(completion, boxes_in_thoughts)
    ends = [said.end() for said in _SAID.finditer(tail)]
    answer = _SENTENCE_END.split(tail[ends[-1] :], maxsplit=1)[0].strip(" *_") if ends else ""
    return answer if 0 < len(answer) <= MAX_BOX else None


class LenientComparison(Comparison):
    """A comparison by the rules of papers' graders, beyond what :class:`Comparison` pays."""

    pays_words_in_order = True

    def same(self, answer: str, gold: str) -> bool | None:
        """Whether they are the same, by the base class, for any of the readings of both."""
        verdicts = [super(LenientComparison, self).same(*pair) for pair in _readings(answer, gold)]
        return True if True in verdicts else None if None in verdicts else False

    def _wants_number(self, gold: Reading) -> bool:
        return False

    def _same_atom(self, first: str, second: str) -> bool | None:
        verdict = super()._same_atom(first, second)
        return True if verdict is False and _is_rounded(read_atom(first), read_atom(second)) else verdict


def _readings(answer: str, gold: str) -> list[tuple[str, str]]:
    """The pairs to compare: as given, the ends of a chain, and a percentage as its value."""
    if not (is_within_limits(answer) and is_within_limits(gold)):
        return [(answer, gold)]
    ends = [] if has_relation(tidy(gold)) else [*_ends(tidy(answer)), *_said(answer)]
    pairs = [(reading, gold) for reading in (answer, *ends)]
    one, two = _PERCENT.sub("", answer), _PERCENT.sub("", gold)
    if one != answer and two == gold:
        pairs += [(rf"\frac{{{reading}}}{{100}}", gold) for reading in (one, *ends)]
    elif one == answer and two != gold:
        pairs += [(reading, rf"\frac{{{two}}}{{100}}") for reading in (one, *ends)]
    return pairs


def _said(answer: str) -> list[str]:
    r"""What a sentence says: 50 for ``\text{The smallest }n\text{ is }50``; nothing if a word of it turns it."""
    sentence = " ".join(TEXT_CONTENT.sub(r" \1 ", answer).split()).rstrip(".")
    match = _SENTENCE.fullmatch(sentence)
    return [match[2]] if match and not _TURNED.search(match[1]) else []


def _ends(text: str) -> list[str]:
    r"""The last side of a chain of equations, and the one before ``\approx``; none if the chain is wrong."""
    if len(split_outside(text, frozenset(",;"))[0]) > 1 or _DENIED.search(text):
        return []
    sides, signs = split_outside(text, _EQUALS | _NEARLY)
    trees = [readable(side) for side in sides]
    for one, two, sign in zip(trees[:-1], trees[1:], signs, strict=True):
        if _differ(one, two, _NEAR if sign in _NEARLY else 0.0):
            return []
    exact = next((side for side, sign in zip(sides, signs, strict=False) if sign in _NEARLY), None)
    return [side for side in (sides[-1], exact) if side and len(sides) > 1]


def _differ(first: Node | None, second: Node | None, tolerance: float) -> bool:
    """Whether both are numbers and differ."""
    if first is None or second is None or has_letters(first) or has_letters(second):
        return False
    return same_expression(first, second, tolerance) is not True


def _is_rounded(answer: Reading, gold: Reading) -> bool:
    """Whether a decimal is the rounded value of a number that is not an integer."""
    decimal = _ROUNDED.fullmatch(answer.plain)
    if answer.number is None or decimal is None or gold.tree is None or has_letters(gold.tree):
        return False
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if int(f"{decimal[1]}{decimal[2]}".replace(",", "")) < 10 or abs(answer.number.exponent) > MAX_BOX:
        return False
    try:
        value = evaluate(gold.tree, lambda _: Fraction(0))
        scale = Fraction(10) ** answer.number.exponent
        if isinstance(value, Fraction):
            error = abs(value - answer.number.mantissa * scale)
            is_whole_gold = value.denominator == 1 and (gold.number is None or is_whole(gold.number))
            return not is_whole_gold and error <= scale / (2 * 10 ** len(decimal[2]))
        wanted, unit = answer.number.mantissa * scale, scale / 10 ** len(decimal[2])
        difference = abs(value * wanted.denominator - wanted.numerator) / wanted.denominator
        return bool(difference * (2 * unit.denominator) <= unit.numerator)
    except (ArithmeticError, TypeError, ValueError):
        return False
