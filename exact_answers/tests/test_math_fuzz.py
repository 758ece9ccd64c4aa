"""Bounded fuzzing of the extractor, the normalizer and the reader, against oracles of their own where there is one."""

from __future__ import annotations

import time
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from exact_answers import MAX_BOX, extract_boxed, normalize_answer
from exact_answers.compare import Comparison
from exact_answers.expressions import Unreadable, read_expression
from exact_answers.structure import without_braces
from exact_answers.text import plain_text, tidy
from exact_answers.values import readable, same_expression

WORDS = [
    *("\\frac", "\\sqrt", "\\boxed", "\\text", "\\mathrm", "\\left", "\\right", "\\begin{pmatrix}", "\\end{pmatrix}"),
    *("\\pi", "\\sin", "\\ln", "\\log", "\\binom", "\\lfloor", "\\rfloor", "\\cup", "\\in", "\\pm", "\\leq", "\\infty"),
    *(
        "\\sum",
        "\\int",
        "\\\\",
        "\\{",
        "\\}",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "^",
        "_",
        "+",
        "-",
        "*",
        "/",
        "!",
        "=",
    ),
    *("<", ",", ".", ";", " ", "&", "'", "$", "%", "0", "1", "2", "10", "3.5", "1,234", "x", "y", "e", "i", "f", "cm"),
    *("\ud800", "²", "٤", "\x00", "\x01", "~", "np.", " or ", "10^{", "\\times10^{3}", "x=", "\\dot{x}", "\\prime"),
    *(
        "sqrt(",
        "^(",
        "**",
        "pi",
        "sin ",
        '"',
        "`",
        "``",
        "''",
        "_0",
        "^2_0",
        "\\angle ABC",
        "\\triangle ",
        "\\max",
        ":",
    ),
    *("\\begin{align}", "\\end{align}", "^\\circ", "°", " apples", " km/h", "x_1=", ",y=", "\\text{Area }", "a+b="),
    *("percent", "per", "cents", "meters", "square ", "\\text{ cm}", "or", "not ", "Ab"),
]
soups = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)
texts = soups | st.text(max_size=60) | st.text(alphabet="\\{}boxed 15", max_size=80)


def boxed_by_counting(text: str) -> str | None:
    """The last box by an independent rule for texts without backslashes but those of boxes: match every brace."""
    opened: list[int | None] = []
    spans: list[tuple[int, int]] = []
    place = 0
    while place < len(text):
        if text.startswith("\\boxed{", place):
            place += 6
            opened.append(place - 6)
        elif text[place] == "{":
            opened.append(None)
        elif text[place] == "}" and opened:
            start = opened.pop()
            if start is not None:
                spans.append((start, place))
        place += 1
    unclosed = [start for start in opened if start is not None]
    if not spans or (unclosed and max(unclosed) > spans[-1][0]):
        return None
    return text[spans[-1][0] + 7 : spans[-1][1]].strip() or None


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "5", " ", "x"]), max_size=16).map("".join))
@example("\\boxed{1}\\boxed{2}")
@example("\\boxed{\\boxed{1}}")
def test_extractor_against_counting(text: str) -> None:
    assert extract_boxed(text) == boxed_by_counting(text)


@settings(max_examples=400)
@given(texts)
def test_extractor_takes_anything(text: str) -> None:
    boxed = extract_boxed(text)
    assert boxed is None or (boxed in text and 0 < len(boxed) <= MAX_BOX)
    assert extract_boxed(rf"{text}\boxed{{5}}") == "5" or text.rstrip(" ").endswith("\\")


@settings(max_examples=400)
@given(texts, texts)
def test_any_two_texts_are_compared_quickly_and_without_an_error(first: str, second: str) -> None:
    start = time.process_time()
    Comparison().same(first, second)
    same = Comparison().same(first, first)
    assert time.process_time() - start < 1.0
    assert same == (plain_text(without_braces(tidy(first))) != "" and same is not None)


@settings(max_examples=300)
@given(soups, st.integers(0, 9))
def test_a_number_is_only_paid_as_a_number(text: str, gold: int) -> None:
    """Whatever the soup: where it is paid for a digit, its letters and signs were marks that are dropped."""
    if Comparison().same(text, str(gold)):
        assert readable(normalize_answer(text).partition("=")[2] or normalize_answer(text)) is not None


# ---------------------------------------------------------------- calculations with a known value

leaf = st.integers(0, 12).map(lambda n: (str(n), Fraction(n))) | st.integers(1, 99).map(
    lambda n: (f"{n / 10}", Fraction(n, 10))
)


def _combined(parts: tuple[str, tuple[str, Fraction], tuple[str, Fraction]]) -> tuple[str, Fraction]:
    kind, (a, x), (b, y) = parts
    if kind == "/" and y != 0:
        return rf"\frac{{{a}}}{{{b}}}", x / y
    if kind == "^":
        return rf"({a})^{{2}}", x**2
    if kind == "*":
        return rf"({a})\cdot({b})", x * y
    if kind == "(":
        return rf"\left({a}\right)({b})", x * y
    return (f"({a})-({b})", x - y) if kind == "-" else (f"{a}+({b})", x + y)


expressions = st.recursive(
    leaf, lambda inner: st.tuples(st.sampled_from("+-*/^("), inner, inner).map(_combined), max_leaves=8
)


@settings(max_examples=300)
@given(expressions, expressions)
def test_values_against_fractions(first: tuple[str, Fraction], second: tuple[str, Fraction]) -> None:
    (text, value), (other, other_value) = first, second
    assert Comparison().same(str(value), text)
    assert Comparison().same(str(value + 1), text) is False
    try:
        trees = read_expression(text), read_expression(other)
    except Unreadable:
        return  # 0.5 and the like stand alone
    assert same_expression(*trees) == (value == other_value)


@settings(max_examples=150)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=5), st.lists(st.integers(-9, 9), min_size=1, max_size=5))
def test_polynomials_are_equal_where_their_coefficients_are(first: list[int], second: list[int]) -> None:
    def expanded(coefficients: list[int]) -> str:
        return "+".join(rf"({c})x^{{{n}}}" for n, c in enumerate(coefficients))

    def nested(coefficients: list[int]) -> str:
        text = f"({coefficients[-1]})"
        for c in coefficients[-2::-1]:
            text = rf"\left({text}x+({c})\right)"
        return text

    def trimmed(coefficients: list[int]) -> list[int]:
        return trimmed(coefficients[:-1]) if coefficients and coefficients[-1] == 0 else coefficients

    trees = [
        read_expression(text.replace("\\left", "").replace("\\right", "")) for text in (expanded(first), nested(second))
    ]
    assert same_expression(*trees) == (trimmed(first) == trimmed(second))
