"""Answers that are more than a number: what is the same, what is not, and what is refused rather than guessed."""

from __future__ import annotations

import inspect
import sys

import math_verify
import pytest

from exact_answers import MathChecker, answer_kind, audit_golds, same_answer
from exact_answers.compare import MAX_PAIRS, Comparison
from exact_answers.expressions import MAX_DEPTH, Unreadable, read_expression
from exact_answers.structure import Atom, Group, parse_answer
from exact_answers.values import readable, same_expression

SAME = [
    # roots, powers, constants
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    (r"\sqrt[4]{8}", r"2^{3/4}"),
    (r"8(\sqrt[10]{2^{7}})", r"8\cdot2^{0.7}"),
    ("1+2i", "2i+1"),
    (r"\frac{3+i}{1-i}", "1+2i"),
    (r"2^{1009}", r"2\cdot 2^{1008}"),
    (r"\frac{4 \cdot 999^{4}}{27}", r"4\cdot37\cdot999^3"),
    (r"2007 + \frac\pi 2", r"\frac{\pi+4014}{2}"),
    (r"\csc 10", r"\frac{1}{\sin 10}"),
    (r"\ln 2 + i\pi / 3", r"\ln 2 + \frac{i\pi}{3}"),
    (r"\log_{10} 250", r"\frac{\ln 250}{\ln 10}"),
    ("np.arcsin(10/13)", r"\arcsin{\frac{10}{13}}"),
    (r"\frac{1}{2a}(\exp{a*t} - \exp{-a*t})", r"\frac{e^{at}-e^{-at}}{2a}"),
    ("-1./3", r"-\frac13"),
    # letters
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{1}{2 n+2}", r"\frac{1}{2(n+1)}"),
    (r"\frac{a M^{1 / 3}}{G M^{2 / 3}+b}", r"\frac{a M^{1/3}}{G M^{2/3} + b}"),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{n!^2}"),
    (r"C_{400}^{40} \cdot C_{200}^{20}", r"C_{200}^{20}C_{400}^{40}"),
    (r"\lfloor n/2\rfloor", r"\left\lfloor\frac{n}{2}\right\rfloor"),
    (r"\lfloor n/2\rfloor+\lceil n/2\rceil", "n"),
    (r"\lceil x\rceil", r"-\lfloor -x\rfloor"),
    (r"(n-2)2^n+1", r"1+2^n(n-2)"),
    (r"\sqrt{a^2b}", r"a\sqrt{b}"),
    ("|x|", "|-x|"),
    (r"2\pi r", r"2\,\pi\,r"),
    (r"5+\mathrm{x}", "5+x"),
    (r"\lambda_{\text {red}} / \sqrt{2}", r"\frac{\lambda_{\text{red}}}{\sqrt2}"),
    # equations and inequalities
    ("y = 2x + 3", "2x-y+3=0"),
    ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z-4=0"),
    ("f(x)=2x", "2x"),
    ("f(x)=2 x", r"f(x) = x\cdot 2"),
    ("MR=SRMC", "SRMC=MR"),
    (r"\frac{d x}{d t}=k x-a", r"\frac{dx}{dt} = kx - a"),
    (r"x^{\prime}+\frac{r}{V} x-r c=0", r"x' + \frac{r}{V}x - rc = 0"),
    (r"m \ddot{\theta}(t)-g=0", r"g = m\ddot\theta(t)"),
    (r"C=\frac{def}{de+df+ef}", r"\frac{def}{df+ef+de}"),
    ("b > a > c", "c<a<b"),
    (r"x\ge 2", r"2 \leqslant x"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("x>2", r"(2,\infty)"),
    (r"k \geqslant 2", r"[2,+\infty)"),
    (r"y\le\frac12", r"(-\infty,0.5]"),
    (r"-2\leq x < 1", "[-2,1)"),
    (r"\{x|-2\leq x < 1\}", "[-2, 1)"),
    (r"\{x\mid x>0\}", "x>0"),
    # parts
    ("1,-2", "-2, 1"),
    ("1,2", r"\{2,1\}"),
    (r"$0.05$ and $0.6$", "0.05, 0.6"),
    (r"2\text{ or }3", "2,3"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"1+\sqrt5, 1-\sqrt5, -2"),
    (r"$2$ or $-2$ or $\frac{1}{2}$ or $-\frac{1}{2}$", r"\pm 2, \pm\frac12"),
    (r"$a=2$, $a=-6-4 \sqrt{2}$", r"-6-4\sqrt2, 2"),
    (r"(1,2),(3,4)", "(3,4),(1,2)"),
    (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"),
    (r"[2,+\infty)", r"[2,\infty)"),
    (r"\left(-\frac53,0\right]", r"(-\frac{5}{3}, 0]"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix} -\frac13 \\ \frac{4}{6} \\ \end{bmatrix}"),
    # units
    (r"12\pi\text{ cm}^2", r"12\pi"),
    (r"36\sqrt{7}cm^{3}", r"36\sqrt{7}"),
    (r"12\pi\text{ square centimeters}", r"12\pi\text{ cm}^2"),
    ("ab", r"b\cdot a"),
    (r"\sin^{-1} x", r"\arcsin x"),
    (r"{n \choose 2}", r"\binom n2"),
    (r"{1\over x}", r"\frac1x"),
    ("2π", r"2\pi"),
    ("√5", r"\sqrt{5}"),
    ("3×x", "3x"),
    # one thing in brackets, marks around it
    (r"\left(-\frac{2}{3}\right)", r"-\frac23"),
    (r"{1,2}", r"\{2,1\}"),
    (r"3\pmod{7}", r"3\pmod 7"),
    (r"3\pmod n", r"3\pmod{n}"),
    (r"\boldsymbol{x}", "x"),
    (r"\boxed{x}", "x"),
    (r"\left[\begin{array}{c}1\\2\end{array}\right]", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\langle 1,2\rangle", "(1,2)"),
    (r"\{\}", r"\varnothing"),
    (r"\text{A, C}", "C,A"),
    # what is named, and what is said of a variable
    ("AB = 5", "5"),
    (r"m\angle ABC = 60^\circ", "60"),
    (r"P(X=1)=\frac12", r"\frac12"),
    (r"\text{Area of the ring}=5\pi", r"5\pi"),
    (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
    ("(x, y) = (1, 2)", "(1,2)"),
    ("(x,y)=(1,2)", "y=2, x=1"),
    ("x=1,2", "2,1"),
    ("x_1=1, x_2=2", "1,2"),
    (r"x\in(-\infty,5]", r"x\le5"),
    (r"x<-1\text{ or }x>2", r"(2,\infty)\cup(-\infty,-1)"),
    (r"\{x \mid x<1 \text{ or } x>2\}", r"x>2, x<1"),
    (r"x<1, x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"\{x\in\mathbb{R}\mid x>2\}", r"(2,\infty)"),
    (r"\text{third side}=5", "5"),
    (r"f_1^{-1}(x)=2x", "2x"),
    (r"x\in\mathbb{R}", r"(-\infty,\infty)"),
    # words
    (r"\text{No solution}", "no solution"),
    *((word, word.lower()) for word in ("No", "YES", "True", "None", r"\text{Even}", "Monday", "No Solution")),
    ("1:58 am", r"1{:}58\text{ A.M.}"),
    # math-verify
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
    (r"\sum_{i=1}^{n} i", r"\sum_{k=1}^n k"),
    (r"\lim_{x\to0}\frac{\sin{x}}{x}", r"\lim_{t \rightarrow 0} \frac{\sin{t}}{t}"),
]

CALCULATIONS = [  # as a gold answer they are what they end in, as an answer they are not done
    (r"\sqrt[3]{-8}", "-2"),
    (r"\frac{100!}{99!}", "100"),
    (r"\sin^2 t+\cos^2 t", "1"),
    (r"\frac{4 \cdot 999^{4}}{27}", "147556443852"),
    ("2+3", "5"),
    ("x=2+3", "x=5"),
    ("(2+3,1)", "(5,1)"),
    ("2^{10}", "1024"),
    ("9**2", "81"),
    (r"\sum_{k=1}^{10} k", "55"),
    (r"\int_0^1 x^2 dx", r"\frac13"),
    (r"\lim_{n\to\infty}\frac{2n+1}{n}", "2"),
    (r"\lim_{x\to0^+}\frac{|x|}{x}", "1"),
]

DIFFERENT = [
    # words are not products, letters are not constants, digits are not exponents
    (r"\text{east}", "seat"),
    ("Quadrant I", "Quadrant II"),
    ("e", "2.718281828459045"),
    ("x", "|x|"),
    ("x^53", "x^{53}"),
    ("52_8", r"52\cdot 8"),
    # close is not equal
    ("1.41421356237", r"\sqrt2"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    (r"2^{1009}", r"2^{1009}+1"),
    (r"\frac{100!}{2^{50}}", r"\frac{100!}{2^{50}}+1"),
    (r"0.0000001\pi", r"0.0000002\pi"),
    ("0", r"0.0000001\pi"),
    (r"\lfloor\frac{2 n-1}{7}\rfloor", r"\lfloor\frac{2 n-1}{5}\rfloor"),
    (r"\lfloor\sqrt{n-2}\rfloor", r"\lfloor\sqrt{n-1}\rfloor"),
    (r"\lceil x\rceil", r"\lfloor x\rfloor"),
    ("0", r"x-\lfloor x\rfloor"),
    (r"\sqrt{x}", r"\sqrt{\lfloor x\rfloor}"),
    (r"\frac1{\lfloor x\rfloor}", r"\frac1x"),
    # equations
    ("1=2", "3=5"),
    ("41=42", "42"),
    ("x=5", "y=5"),
    ("x=5", "x=6"),
    ("x=x", "y=y"),
    ("f(2x)", "2f(x)"),
    (r"\frac{dx}{dt}=kx-a", r"\frac{dx}{dt}=kx+a"),
    (r"\frac{d x}{d t}=k x-a", r"\frac{x}{t}=kx-a"),
    ("x=1,y=2", "2,1"),
    ("a=2,a=3", "b=2,b=3"),
    ("b>a>c", "b<a<c"),
    (r"x\ge 2", "x>2"),
    ("x>2", r"[2,\infty)"),
    ("x>2", r"(-\infty,2)"),
    (r"-2\leq x < 1", "(-2,1]"),
    ("2>1", r"(1,\infty)"),
    (r"\{x|x=3k,k\in \mathbb{Z}\}", r"\{x|x=2k,k\in \mathbb{Z}\}"),
    (r"x>1\text{ or }x<2", r"(1,2)"),
    (r"x\in(0,1)", r"y\in(0,1)"),
    (r"x<1\text{ or }x>2", r"(-\infty,1]\cup(2,\infty)"),
    ("(x,y)=(1,2)", "(2,1)"),
    ("(x,y)=(1,2)", "x=2,y=1"),
    ("x=1,y=2,3", "1,2,3"),
    ("41+1=42", "42"),
    ("AB", "ab"),
    ("ABC", "abc"),
    ("east", r"\text{e}\cdot a"),
    *((word, word.lower()) for word in ("Abc", "xYz", "Rst", "nO", "xYzabc", r"\text{aBc}")),
    # what is named by a word that says otherwise
    *((rf"\text{{{words}}}=5", "5") for words in ("not ", "answer is not", "false", "half of the answer", "more than")),
    *((rf"\text{{{words}}}=5", "5") for words in ("Twice the area", "minus", "in millions", "no")),
    ("x^{-1}=2", "2"),
    (r"x<1, y>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"\{x\in\mathbb{Z}\mid x>2\}", r"(2,\infty)"),
    (r"3\pmod{7}", r"3\pmod 5"),
    # parts
    ("7,4", "(7,4)"),
    ("(7,4)", "(4,7)"),
    ("1,1,2", "1,2,2"),
    ("2,2", "2"),
    ("[2,3)", "(2,3]"),
    (r"(1,2)\cup(3,4)", r"(1,2)\cup(3,5)"),
    (r"\{x|x>0\}", r"\{x|x<0\}"),
    (r"1\pm2", r"1+2"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    # units and undefined values
    (r"12\pi\text{ cm}^2", r"12\pi\text{ cm}^3"),
    (r"5\text{ square cm}", r"5\text{ cm}"),
    ("5am", "5"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    (r"\frac{0}{0}", "0"),
    # math-verify
    (r"\sum_{k=1}^{10} k", "56"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+2)}{2}"),
    (r"\int_0^1 x^2 dx", r"\frac12"),
    (r"\lim_{x\to0}\frac{|x|}{x}", "1"),
    (r"\lim_{x\to0}\frac{\sin x}{x}", "0"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_same(first: str, second: str) -> None:
    assert same_answer(first, second)
    assert same_answer(second, first)


@pytest.mark.parametrize(("calculation", "number"), CALCULATIONS)
def test_a_number_is_not_paid_as_a_calculation(calculation: str, number: str) -> None:
    assert same_answer(number, calculation)
    assert not same_answer(calculation, number)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different(first: str, second: str) -> None:
    assert not same_answer(first, second)
    assert not same_answer(second, first)


@pytest.mark.parametrize(
    "text",
    [
        *["", "x^12", "x2", "a/bc", r"1\frac{1}{2}x", r"\sin x/2", r"\ln^{-1}x", "f(x+1)", "word", "x^2^3", "52_8"],
        *["1 2", "**", "(x", "x)", "(x]", "|x", r"\frac{1}", r"\sqrt", r"\unknown", r"\text{word}", "x=1", "²", "1,2"],
        *["(" * 40 + "1" + ")" * 40, "-", "x_", "x^", "!", r"\log_\lfloor x"],
    ],
)
def test_what_may_be_read_in_two_ways_is_not_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read_expression(text)


@pytest.mark.parametrize(
    "text", ["9^{9^{9}}", "9^{9^{9^{9}}}", "99999!", "99999!!", "10^{10^{10}}", "e^{e^{e^{e^{e}}}}", r"\frac{1}{x-x}"]
)
def test_what_is_huge_or_undefined_is_not_computed(text: str) -> None:
    node, one = readable(text), readable("1")
    assert node is not None
    assert one is not None
    assert same_expression(node, one) is None


def test_only_real_numbers_are_rounded() -> None:
    for text, value in ((r"\lfloor i^2+\frac{1}{2}\rfloor", "-1"), (r"\lceil i^2+\frac{1}{2}\rceil", "0")):
        trees = readable(text), readable(value), readable(r"\frac{\sqrt{2}}{2}")
        assert None not in trees
        assert same_expression(trees[0], trees[1])
        assert same_expression(trees[0], trees[2]) is False
    for text in (r"\lfloor i+\frac{1}{2}\rfloor", r"\lceil \sqrt{-2}\rceil"):
        assert same_expression(readable(text), readable("x")) is None


@pytest.mark.parametrize("function", [r"\ln", r"\sin^2", r"\log_2"])
def test_functions_and_factorials_are_not_nested_for_ever(function: str) -> None:
    assert readable(f"{function} " * MAX_DEPTH + "x") is not None
    assert readable(f"{function} " * (MAX_DEPTH + 1) + "x") is None
    assert readable("+".join([f"{function} x"] * (MAX_DEPTH + 1))) is not None  # beside each other
    assert readable("x!!") is not None
    assert readable("x!!!") is None


def test_a_comparison_that_fails_costs_its_answer_and_not_the_batch() -> None:
    checker, limit = MathChecker(), sys.getrecursionlimit()
    deep = "(" * (MAX_DEPTH - 1) + "x+7" + ")" * (MAX_DEPTH - 1)
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)  # less than the reader of this bracket takes
    try:
        assert checker.same(["5", deep, "5"], ["5", "y+x", "6"]) == [True, False, False]
    finally:
        sys.setrecursionlimit(limit)
    assert checker.take_counters()["errors"] == 1
    assert checker.same([deep], ["7+x"]) == [True]


def test_parts_of_an_answer() -> None:
    assert parse_answer("1,234") == Atom("1,234")
    assert parse_answer("12,34") == Group("list", (Atom("12"), Atom("34")))
    assert parse_answer("(1,234)") == Group("()", (Atom("1"), Atom("234")))
    assert parse_answer("a<b") == parse_answer("b>a") == Group("<", (Atom("a"), Atom("b")))
    assert parse_answer(r"\{x|x>0\}") == Group("<", (Atom("0"), Atom("x")))
    assert parse_answer(r"\{x|x>0,x<5\}") == Atom(r"\{x|x>0,x<5\}")  # of one rule only
    assert parse_answer("(x+1)(x-2)") == Atom("(x+1)(x-2)")


def test_a_few_parts_are_left_to_math_verify() -> None:
    for count, verdict in ((MAX_PAIRS, None), (MAX_PAIRS + 1, False)):
        answer, gold = (",".join(rf"\int_0^1 {name}^{n} d{name}" for n in range(count)) for name in "xy")
        assert Comparison().same(f"({answer})", f"({gold})") is verdict


def test_a_tolerance_is_relative_and_spares_whole_numbers() -> None:
    answers = ["41.8001", "41.81", "4180001", "1.00001e-9", "1.1e-9", r"0.333\text{ m}", "1.5708"]
    golds = ["41.8", "41.8", "4180000", "1e-9", "1e-9", "1/3", r"\frac{\pi}{2}"]
    checker = MathChecker()
    assert checker.same(answers, golds, [1e-4] * 7) == [True, False, False, True, False, False, True]
    assert checker.same(answers, golds) == [False] * 7


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("5", "number"), (r"4.5\times10^{33}", "number"), (r"5\text{ cm}", "number"), (r"\sqrt{2}", "expression"),
        ("1,2", "parts"), (r"x\ge 2", "parts"), ("52_8", "text"), (r"\text{east}", "text"), ("", "uncheckable"), 
        ("{}", "uncheckable"), ("<answer>5</answer>", "uncheckable"),
        ("$$", "uncheckable"), ("1" * 600, "uncheckable"), ("}{", "uncheckable"), ("{" * 30 + "}" * 30, "uncheckable"),
    ],
)  # fmt: skip
def test_kinds_of_golds(gold: str, kind: str) -> None:
    assert answer_kind(gold) == kind


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"We have $2x=10$, so $x=5$. The answer is $\boxed{5}$.", "5"), (r"Thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("Long. " * 300 + r"\boxed{7}", "7"), (r"x = \boxed{5}", "5"), (r"\boxed{12} cm", "12"),
        (r"$\boxed{2}$ is too small, so we take $\boxed{3}$.", "3"), (r"\boxed{2} and \boxed{3}", "2,3"),
        (r"\boxed{\boxed{5}}", "5"), ("2+3=5\n#### 5", "5"), ("#### 1,234", "1234"), ("The answer is 5.", "5"),
        ("So 2+3 = 5. The final answer is 5.5.", "5.5"), (r"The answer is $\frac{1}{2}$", "0.5"), ("Answer: 5", "5"),
        ("**Final answer:** 5", "5"),
    ],
)  # fmt: skip
def test_a_gold_with_text_around_its_answer_counts_as_that(gold: str, answer: str) -> None:
    completion = rf"\boxed{{{answer}}}"
    assert math_verify.verify(math_verify.parse(gold), math_verify.parse(completion))
    assert math_verify.verify(math_verify.parse(gold), math_verify.parse(r"\boxed{88}")) is False
    checker = MathChecker()
    for paid in checker.check_both([completion, r"\boxed{88}"], [gold, gold]).values():
        assert paid == [True, False]
    assert answer_kind(gold) in ("number", "expression", "parts")


def test_a_factorial_is_no_end_of_a_sentence() -> None:
    assert MathChecker().check([r"\boxed{120}", r"\boxed{5}"], ["#### 5!", "#### 5!"]) == [True, False]


def test_audit_counts_and_names_the_places() -> None:
    audit = audit_golds(["5", "", r"\sqrt2", "7", "}"])
    assert audit.kinds == {"number": 2, "uncheckable": 2, "expression": 1}
    assert audit.uncheckable == [1, 4]
