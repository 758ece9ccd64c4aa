from __future__ import annotations

import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exact_answers import (
    MAX_BOX,
    MAX_NESTING,
    TAIL,
    extract_boxed,
    normalize_answer,
    same_answer,
    verify,
)
from exact_answers.exact_numbers import Number, parse_number, same_number

RIGHT = [
    # numbers written in other ways
    ("42", "42"),
    ("025", "25"),
    ("25", "025"),
    ("27", "27.0"),
    (".5", "0.50"),
    ("42.", "42"),
    ("+7", "7"),
    ("-0", "0"),
    ("−3", "-3"),  # U+2212
    ("1,234,567", "1234567"),
    ("1{,}234", "1234"),
    (r"1\,234", "1,234"),
    (r"1,\!234", "1234"),
    ("1/2", r"\frac{1}{2}"),
    (r"\frac12", "0.5"),
    (r"\frac 5 9", r"\frac59"),
    (r"\frac{270}7", "270/7"),
    (r"\dfrac{3}{4}", r"\tfrac{6}{8}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{1}{-2}", "-0.5"),
    (r"-\frac{-1}{2}", "1/2"),
    (r"\frac{0.5}{1.5}", "1/3"),
    (r"3\frac{1}{2}", "7/2"),
    ("3 1/2", "3.5"),
    (r"-1\frac{1}{2}", "-3/2"),
    (r"4.5\times10^{33}", "4.5e33"),
    (r"4.5 \times 10^{33}", "45e32"),
    (r"4.5\cdot 10^{-3}", "0.0045"),
    (r"3.3 \times 10^{-10}", "3.3E-10"),
    ("10^{-3}", "1e-3"),
    ("10^5", "100,000"),
    (r"1\times 10^{999999999999}", r"10\times10^{999999999998}"),
    ("1" + "0" * 150, "1e150"),
    ("0e99999", "0"),
    # marks and units
    (r"50\%", "50"),
    ("17.5%", r"17.5\%"),
    (r"\$18.90", "18.9"),
    ("$12$", "12"),
    (r"30^\circ", "30"),
    (r"30^{\circ}", r"30\text{ degrees}"),
    (r"5.4 \text{ cents}", "5.4"),
    ("40", r"40\text{ feet}"),
    (r"7\text{ hours}", r"7\text{ hours}."),
    ("7", r"7\text{ hours}."),
    (r"15\mathrm{~cm}^2", r"15\mbox{ cm}^2"),
    (r"15\text{ cm}^{2}", "15"),
    (r"22.1\text{ cm}^2", "22.1cm^{2}"),
    (r"6.43 \times 10^{16} \text{ cm}^{-3}", r"6.43\times10^{16}"),
    (r"3 \mathrm{m}/\mathrm{s}^2", "3"),
    ("5 meters", "5"),
    ("5 meters per second", r"5\text{ m/s}"),
    (r"12\text{ square units}", "12 square units"),
    (r"5\text{ apples}", r"5\text{ apple}"),
    (r"5\text{ eggs}", r"5\text{ egg}"),
    (r"1950^\circ C", "1950"),
    (r"1950^{\circ} \mathrm{C}", "1950°C"),
    (r"0.003^{\prime \prime}", "0.003"),
    (r"300\text{ K}", "300"),
    *((answer, "5") for answer in (r"5\text{ N}\cdot\text{m}", r"5\text{ kg}\cdot\text{m/s}", r"5\text{ months}")),
    (r"5\text{ N}\cdot\text{m}", r"5\text{ Nm}"),
    (r"10\text{ cm squared}", "10"),
    (r"10\text{ cm squared}", r"10\text{ cm}^2"),
    (r"5\text{ meters per second squared}", r"5\text{ m/s}^2"),
    (r"5\text{ Km}", r"5\text{ km}"),
    (r"5\text{ USD}", r"5\text{ dollars}"),
    ("5 newton seconds", r"5\text{ N}\cdot\text{s}"),
    ("5 grams per centimeter", r"5\text{ g/cm}"),
    (r"\text{\$}12.0", "12"),
    # repeating decimals, brackets
    (r"0.\overline{3}", r"\frac13"),
    (r"2.1\overline{6}", "13/6"),
    (r"-0.\dot{4}", "-4/9"),
    (r"0.\overline{9}", "1"),
    ("(5)", "5"),
    ("{-5}", "-5"),
    # one variable
    ("x=5", "5"),
    ("5", "x = 5"),
    ("x=5", "x = 5"),
    ("y=-2x", "-2x"),
    # text
    (r"2\sqrt{5}", r"2 \sqrt 5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"\{1,2\}", r"\left\{ 1, 2 \right\}"),
    ("52_8", "52_{8}"),
    (r"\text{Evelyn}", "Evelyn"),
    ("C", r"\text{(C)}"),
    (r"\text{(E)},", "E"),
    (r"x \le 3", r"x\leq 3"),
    (r"\begin{pmatrix} -7 \\ 16 \end{pmatrix}", r"\begin{pmatrix}-7\\16\end{pmatrix}"),
    ("a^{2}+b", "a^2 + b"),
]

WRONG = [
    ("41", "42"),
    ("-42", "42"),
    ("41=42", "42"),
    ("42=42", "42"),
    ("1=5", "5"),
    ("0.0000001", "0.0000002"),
    ("0.333", "1/3"),
    ("1.0000000001", "1"),
    ("0.5", r"50\%"),
    ("52_8", "52_5"),
    ("52_8", "52"),
    ("(1,2)", r"\{1,2\}"),
    ("[1,2)", "(1,2)"),
    ("1", r"\{x|-2\leq x<1\}"),
    ("2", "1,2"),
    ("12", "1 2"),
    ("1 234", "1234"),
    ("1,23", "123"),
    ("0,123", "123"),
    ("12,34,567", "1234567"),
    ("5+", r"5+\mathrm{x}"),
    (r"5+\mathrm{y}", r"5+\mathrm{x}"),
    (r"5\mathrm{x}", "5"),
    (r"5\mathrm{x}^2", "5"),
    (r"2\mathrm{i}", "2"),
    ("a+", "a+b+c"),
    (r"\sin^2", r"\sin^2 t"),
    ("x=5", "y=5"),
    ("x=5,y=6", "5,y=6"),
    (r"3\text{ million}", "3"),
    (r"3\text{ million dollars}", "3"),
    (r"2\text{ or }3", "2"),
    (r"2\text{ or 3}", "2"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    ("30^\\circ C", "30^\\circ F"),
    *((rf"5\text{{ {unit}}}", rf"5\text{{ {unit.lower()}}}") for unit in ("MW", "Mm", "MHz")),
    (r"5\text{ m}\cdot\text{s}", r"5\text{ ms}"),
    ("5 newton seconds", r"5\text{ N}"),
    (r"10\text{ cm squared}", r"10\text{ cm}"),
    *(
        (rf"5\text{{ {word}}}", "5")
        for word in ("eighths", "ninths", "fifteenths", "twelfth", "seventh", "pairs", "pair")
    ),
    *(
        (rf"5\text{{ {word}}}", "5")
        for word in ("gross", "at least", "at most", "negative", "score", "dozens", "cubed")
    ),
    # what is not a unit, marks and spaces that do not join digits
    *((rf"5\text{{ {word}}}", "5") for word in ("squared", "plus six", "is wrong", "factorial", "half", "hundred")),
    ("5\x006", "5 6"),
    ("5\x00", "5"),
    (r"5\%6", "56"),
    ("5$6", "56"),
    (r"5^\circ6", "56"),
    (r"5\text{ }6", "56"),
    (r"1\,2", "12"),
    (r"12\,34", "1234"),
    (r"0.\overline{3}", "0.3"),
    (r"0.1\overline{6}", "0.16"),
    ("(4)", "5"),
    ("1/0", "1/0.0"),
    (r"\frac{1}{0}", "0"),
    ("\uff14\uff12", "42"),  # full-width digits
    ("٤٢", "42"),  # Arabic digits
    ("4²", "42"),
    ("4\u200b2", "42"),
    ("1e5", "1e6"),
    ("10^53", "10^{53}"),
    (r"4.5\times10^{33}", "4.5e34"),
    ("10^{999999999}", "10^{999999998}"),
    ("9**9**9", "387420489"),
    ("2x", "-2x"),
    ("TRUE", "tRUE"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_right(answer: str, gold: str) -> None:
    assert verify(rf"So the answer is $\boxed{{{answer}}}$.", gold)


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_wrong(answer: str, gold: str) -> None:
    assert not verify(rf"So the answer is $\boxed{{{answer}}}$.", gold)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a\boxed{b}c}", r"a\boxed{b}c"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"an open { before \boxed{3}", "3"),
        (r"a stray } before \boxed{3} and after }", "3"),
        (r"\boxed{forgot to close, so \boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"\boxed{5} then \boxed{6", None),
        (r"\boxed{5} then \boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{5", None),
        (r"\boxed{\{5}", r"\{5"),
        (r"\boxed{5\}", None),
        (r"\\boxed{5}", "5"),  # escaped once too often
        (r"\\\\boxed{5}", "5"),
        (r"\\ boxed{5}", None),  # a line break and plain text
        (r"\boxed{5} then \\boxed{6", None),
        ("boxed{5}", None),
        (r"\boxed5", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, boxed: str | None) -> None:
    assert extract_boxed(text) == boxed


def test_only_the_tail_is_searched() -> None:
    box = r"\boxed{5}"
    assert extract_boxed(box + "x" * (TAIL - len(box))) == "5"
    assert extract_boxed(box + "x" * (TAIL - len(box) + 1)) is None


def test_a_box_has_limits() -> None:
    assert extract_boxed(rf"\boxed{{{'1' * MAX_BOX}}}") == "1" * MAX_BOX
    assert extract_boxed(rf"\boxed{{{'1' * (MAX_BOX + 1)}}}") is None
    assert extract_boxed(rf"\boxed{{{'{' * MAX_NESTING}1{'}' * MAX_NESTING}}}") is not None
    assert extract_boxed(rf"\boxed{{{'{' * (MAX_NESTING + 1)}1{'}' * (MAX_NESTING + 1)}}}") is None


@pytest.mark.parametrize("gold", ["", " ", "$$", r"\,"])
def test_an_empty_gold_pays_nothing(gold: str) -> None:
    assert not verify(rf"\boxed{{{gold}}}", gold)
    assert not verify(r"\boxed{\text{}}", gold)
    assert not verify("nothing", gold)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 150_000,
        "\\boxed{" * 75_000 + "}" * 75_000,
        "{" * 1_000_000,
        "}" * 1_000_000,
        "\\text{" * 170_000,
        "\\text" * 200_000,
        "\\frac" * 200_000,
        "\\frac{" * 170_000,
        "\\" * 1_000_000,
        " " * 1_000_000,
        "\\boxed" + " " * 1_000_000,
        "\\boxed{" + "9" * 1_000_000 + "}",
        "1," * 500_000,
        "_{1" * 300_000,
        "1 " * 500_000,
        "\\boxed{9^{9^{9^{9^{9}}}}}",
        "\\boxed{1e" + "9" * 500 + "}",
        "\\boxed{1e999999999}",
        "\\boxed{10^{-999999999}}",
        "\\boxed{" + "9" * 250 + "/" + "7" * 250 + "}",
        "\\boxed{\ud800}",
    ],
)
def test_hostile_text_takes_no_time(text: str) -> None:
    start = time.process_time()
    assert not verify(text, "1")
    assert time.process_time() - start < 10  # takes milliseconds
    normalize_answer(text)
    assert time.process_time() - start < 100  # of one megabyte: a quadratic step would take hours


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-1,000.5", Fraction(-2001, 2)), (r"2\frac{1}{4}", Fraction(9, 4)), ("2.5e2", 250), ("10^3", 1000)],
)
def test_value_of_a_number(text: str, value: Fraction) -> None:
    number = parse_number(text)
    assert number is not None
    assert number.mantissa * Fraction(10) ** number.exponent == value


@pytest.mark.parametrize(
    "text", ["", "-", ".", "1/0", "--1", "1e", "10^", "x", "1" * 513, r"1\frac{-1}{2}", "²", "1_000"]
)
def test_no_number(text: str) -> None:
    assert parse_number(text) is None


@settings(max_examples=60)
@given(st.fractions(), st.fractions(), st.integers(-2000, 2000), st.integers(-2000, 2000))
def test_same_number_is_equality_of_values(a: Fraction, b: Fraction, m: int, n: int) -> None:
    expected = a * Fraction(10) ** m == b * Fraction(10) ** n
    assert same_number(Number(a, m), Number(b, n)) == expected
    assert same_number(Number(a, m), Number(a * 10, m - 1))


@settings(max_examples=60)
@given(st.fractions(max_denominator=10**6))
def test_every_fraction_equals_its_latex(value: Fraction) -> None:
    latex = rf"\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    sign = "-" if value < 0 else ""
    assert verify(rf"\boxed{{{sign}{latex}}}", str(value))
    assert not verify(rf"\boxed{{{sign}{latex}}}", str(value + 1))


@settings(max_examples=60)
@given(st.text(alphabet="\\{}^_ .,/$%0123456789abtexfrac", max_size=40))
def test_every_answer_equals_itself(text: str) -> None:
    assert same_answer(text, text) == (normalize_answer(text) != "")


@pytest.mark.parametrize(("first", "second"), RIGHT + WRONG)
def test_order_does_not_matter(first: str, second: str) -> None:
    assert same_answer(first, second) == same_answer(second, first)


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@pytest.mark.parametrize(
    ("file", "column", "total", "empty"),
    [
        ("gsm8k_train.jsonl", "answer", 7473, 0),
        ("gsm8k_test.jsonl", "answer", 1319, 0),
        ("math500.jsonl", "answer", 500, 0),
        ("gaokao2023en.jsonl", "answer", 385, 2),
        ("aime24.jsonl", "answer", 30, 0),
        ("amc23.jsonl", "answer", 40, 0),
        ("simplelr_level3to5.sample.jsonl", "label", 408, 2),
    ],
)
def test_every_real_gold_equals_itself(data_dir: Path, file: str, column: str, total: int, empty: int) -> None:
    golds = [str(row[column]).rpartition("####")[2].strip() for row in _rows(data_dir / file)]
    failed = [gold for gold in golds if not verify(rf"Therefore \boxed{{{gold.strip('$')}}}.", gold)]
    assert len(golds) == total
    assert failed == [""] * empty


def test_a_changed_digit_is_never_right(data_dir: Path) -> None:
    golds = [str(row["answer"]) for row in _rows(data_dir / "math500.jsonl")]
    changed = [(gold, re.sub("[0-9]", lambda d: str((int(d[0]) + 1) % 10), gold, count=1)) for gold in golds]
    wrong = [(gold, near) for gold, near in changed if gold != near and verify(rf"\boxed{{{near}}}", gold)]
    assert wrong == []
    assert sum(gold != near for gold, near in changed) > 400
