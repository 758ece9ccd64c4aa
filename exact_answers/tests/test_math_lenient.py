"""What graders of papers pay beyond our own conventions, and what is not paid by either."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
import test_math_answers
import test_math_basics
import test_math_spellings
from hostile import hostile_completions
from hypothesis import given, settings
from hypothesis import strategies as st
from test_math_time import SECONDS, worst_cases

from exact_answers import MathChecker, extract_answer, verify

LENIENT = [  # refused by strict
    # the last side of a chain
    (r"5\times3\times12=180", "180"),
    (r"x+y=2+3=5", "5"),
    ("60+120=x=180", "180"),
    (r"|z|=5", "5"),
    (r"\frac{1}{2}\cdot 6=3", "3"),
    (r"\log_2 A=\frac{1}{2}", "0.5"),
    (r"3\pi\approx9.42", r"3\pi"),
    (r"A=\frac{22}{7}\approx 3.143", r"\frac{22}{7}"),
    (r"\frac{22}{7} ≈ 3.143", "3.143"),
    # arithmetic that is not done
    ("2+3", "5"),
    (r"\binom{5}{2}", "10"),
    (r"\sqrt{4}", "2"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    ("7^6", "117649"),
    ("(16-3-4)*2", "18"),
    ("(2+3,1)", "(5,1)"),
    (r"\sum_{k=1}^{10} k", "55"),
    # decimals that round the gold answer
    ("0.33", r"\frac13"),
    ("0.333", "1/3"),
    ("-0.67", r"-\frac{2}{3}"),
    ("1.414", r"\sqrt2"),
    ("3.14", r"\pi"),
    ("x=3.1416", r"\pi"),
    ("0.0123", "0.012345"),
    (r"4.49\times10^{33}", r"4.4932\times10^{33}"),
    (r"37.70\text{ cm}", r"12\pi"),
    ("(0.33,0.67)", r"(\frac13,\frac23)"),
    # percent
    (r"50\%", r"\frac12"),
    (r"50\%", "0.5"),
    ("0.5", r"50\%"),
    (r"\frac{1}{2}", r"50\%"),
    (r"12.5\text{ percent}", "1/8"),
    (r"p=50\%", "0.5"),
]
REFUSED = [
    ("41=42", "42"),
    ("0=0=42", "42"),
    ("1=5", "5"),
    (r"5\times3\times12=181=180", "180"),
    (r"5\approx6", "6"),
    (r"5\approx6", "5"),
    ("5=x", "6"),
    ("x=4,y=5", "5"),
    ("42=", "42"),
    ("=42+", "42"),
    ("2+4", "5"),
    (r"\binom{5}{3}+1", "10"),
    (r"\sqrt{5}", "2"),
    ("2+x", "5"),
    ("0.3", "1/3"),  # one digit
    ("0.34", "1/3"),
    ("0.332", "1/3"),
    ("0.00", "0.001"),
    ("0.01", "0.012"),
    ("1.42", r"\sqrt2"),
    ("1.4", r"\sqrt2"),
    ("2.5", "2.46"),
    ("4.99", "5"),
    ("1.23e5", "123456"),  # a whole number is not rounded
    (r"4.49\times10^{32}", r"4.4932\times10^{33}"),
    (r"\frac13", "0.33"),  # nor is the gold answer one of the answer
    (r"1.41\text{ cm}", r"\sqrt2\text{ m}"),
    ("1.41", r"\sqrt{2x}"),
    ("3.14", r"\pi+i"),
    (r"50\%", "0.05"),
    (r"50\%", "5"),
    (r"0.5\%", "50"),
    (r"0.5\%", r"50\%"),
    ("0.05", r"50\%"),
    ("50", "0.5"),  # nobody says percent
    (r"\%", "0"),
    ("41", "42"),
    ("(1,2)", r"\{1,2\}"),
    ("52_8", "52_5"),
]
WITHOUT_A_BOX = [
    ("So the answer is 5.", "5"),
    ("The final answer is: **42**", "42"),
    ("Hence the answer is $3.5$. Done.", "$3.5$"),
    ("the answer is 4. No, the answer is 5.\nThank you", "5"),
    ("The answers are 2 and 3", "2 and 3"),
    (r"the answer is 4, so \boxed{5}", "5"),
    (r"The answer is \boxed{5", None),  # cut off
    (r"\boxed{} the answer is 5", None),
    ("The answer:", None),
    ("I do not know the answer, is it 5?", None),
    ("the answer is " + "5" * 600, None),
    ("the answer is", None),
    ("", None),
]


@pytest.mark.parametrize(("answer", "gold"), LENIENT)
def test_lenient_pays_what_strict_does_not(answer: str, gold: str) -> None:
    assert verify(rf"\boxed{{{answer}}}", gold, "lenient")
    assert not verify(rf"\boxed{{{answer}}}", gold)


@pytest.mark.parametrize(("answer", "gold"), REFUSED)
def test_neither_pays(answer: str, gold: str) -> None:
    assert not verify(rf"\boxed{{{answer}}}", gold, "lenient")


@pytest.mark.parametrize(("completion", "answer"), WITHOUT_A_BOX)
def test_an_answer_without_a_box(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


def test_what_is_said_is_compared_leniently_only() -> None:
    for said, gold, right in (("5", "5", True), ("not 5", "5", False), ("$2+3$", "5", True), ("5 or 6", "5", False)):
        assert verify(f"The answer is {said}.", gold, "lenient") is right
        assert not verify(f"The answer is {said}.", gold)


def test_lenient_contains_strict() -> None:
    """Over all tables, right answers and wrong ones, and hostile completions."""
    tables = (test_math_answers, test_math_spellings)
    pairs = [pair for table in tables for pair in (*table.SAME, *table.DIFFERENT)]
    pairs += [*test_math_answers.CALCULATIONS, *test_math_basics.RIGHT, *test_math_basics.WRONG, *LENIENT, *REFUSED]
    completions = [rf"\boxed{{{answer}}}" for pair in pairs for answer in (pair[0], pair[1])]
    golds = [gold for pair in pairs for gold in (pair[1], pair[0])]
    completions += [hostile.completion for hostile in hostile_completions() if "symbolic" not in hostile.name]
    golds += [hostile.gold for hostile in hostile_completions() if "symbolic" not in hostile.name]
    verdicts = MathChecker().check_both(completions, golds)
    assert verdicts["strict"][:200] == MathChecker().check(completions[:200], golds[:200])
    both = list(zip(verdicts["strict"], verdicts["lenient"], strict=True))
    assert (True, False) not in both
    assert both.count((True, True)) > 300
    assert both.count((False, True)) > len(LENIENT)


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*"123+-=,.()%x ", r"\frac12", r"\sqrt2", "0.5", r"\pi"]), max_size=8).map("".join))
def test_lenient_contains_strict_for_any_text(text: str) -> None:
    for gold in ("1", "0.5", r"\sqrt2", "x=1", "1,2", text):
        verdicts = MathChecker().check_both([rf"\boxed{{{text}}}"], [gold])
        assert verdicts["lenient"][0] or not verdicts["strict"][0]


@settings(max_examples=100)
@given(st.fractions(min_value=-50, max_value=50, max_denominator=999), st.integers(2, 6), st.integers(-2, 2))
def test_rounding_against_fractions(value: Fraction, digits: int, off: int) -> None:
    written = Fraction(round(value * 10**digits) + off, 10**digits)
    text = f"{float(written):.{digits}f}"
    rounds = abs(written - value) <= Fraction(1, 2 * 10**digits)
    counts = abs(written) * 10**digits >= 10 and value.denominator > 1
    assert verify(rf"\boxed{{{text}}}", str(value), "lenient") == ((rounds and counts) or written == value)


def test_hostile_completions_are_paid_leniently_only_where_they_are_right() -> None:
    cheap = [hostile for hostile in hostile_completions() if not hostile.name.startswith("symbolic")]
    start = time.process_time()
    paid = MathChecker().check_both([h.completion for h in cheap], [h.gold for h in cheap])["lenient"]
    assert time.process_time() - start < 60.0
    found = [(extract_answer(h.completion), h.gold) for h, right in zip(cheap, paid, strict=True) if right]
    assert found == [
        *(("5", "5"), ("42=42", "42"), ("0.5", r"50\%"), ("0.333333", "1/3"), ("3.14159265", r"\pi"), ("2+3", "5")),
        *(("x=2+3", "x=5"), ("(16-3-4)*2", "18"), (r"\sqrt{25}", "5"), ("5!", "120")),
    ]


@pytest.mark.parametrize("number", range(6))
def test_no_repetition_takes_time(number: int) -> None:
    checker, slow = MathChecker(), []
    for text in list(worst_cases())[number::60]:
        start = time.process_time()
        checker.check_both([rf"\boxed{{{text}}}", f"the answer is {text}"], ["5", r"\frac13"])
        if time.process_time() - start > 3 * SECONDS:
            slow.append((text[:30], time.process_time() - start))
    assert slow == []
