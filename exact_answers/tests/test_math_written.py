r"""Spellings of right answers by models, kind by kind, each beside siblings that are wrong and stay refused."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exact_answers import MathChecker, normalize_answer, same_answer, verify

STRICT: dict[str, list[tuple[str, str]]] = {
    "left side: expression": [
        (r"\frac{V}{\pi}=75", "75"),
        ("a+d+e+f=2k", "2k"),
        ("m+n=73", "73"),
        ("100m+n=103", "103"),
        (r"\alpha+\beta=\frac{\pi}{2}", r"\frac{\pi}{2}"),
        ("x_1+x_2=7", "7"),
        ("xy=12", "12"),
        (r"\tan\theta=\frac{3}{4}", r"\frac34"),
        (r"\cos\angle ABC=\frac13", r"\frac13"),
        (r"\sin(A+B)=1", "1"),
        ("AB+BC=14", "14"),
        (r"AB\cdot CD=12", "12"),
        ("|AB|+|CD|=9", "9"),
        (r"\angle A+\angle B=90^\circ", "90"),
        (r"\frac{S}{\sqrt3}=4", "4"),
        ("f(2)+f(3)=8", "8"),
        (r"a^2+b^2+c^2=14\text{ cm}^2", "14"),
        (r"\gcd(a,b)=6", "6"),
        (r"\max(x,y)=6", "6"),
        (r"N \bmod 1000=25", "25"),
    ],
    "left side: words": [
        (r"\text{Smallest }n=50", "50"),
        (r"\text{Area of }\triangle ABC=24", "24"),
        (r"n_{\text{min}}=50", "50"),
        (r"\text{Minimum value of }f=3", "3"),
        (r"S_{\triangle ABC}=24", "24"),
        (r"\triangle ABC=24", "24"),
        (r"\#S=12", "12"),
        (r"\min f=3", "3"),
        (r"\operatorname{Var}(X)=4", "4"),
        (r"\text{Area}_{ABC}=24", "24"),
        ("|S|=12", "12"),
    ],
    "ratio": [
        (r"\frac{a}{b}=\frac{2}{3}", r"\frac23"),
        ("a:b=2:3", "2:3"),
        ("a:b:c=1:2:3", "1:2:3"),
        (r"\text{ratio}=2:3", "2:3"),
        ("x/y=1/2", "1/2"),
        (r"\frac{[ABC]}{[DEF]}=\frac49", r"\frac49"),
        (r"\frac{AD}{DB}+\frac{AE}{EC}=2", "2"),
    ],
    "display": [
        (r"\begin{equation}5\end{equation}", "5"),
        (r"\begin{aligned}x&=5\end{aligned}", "5"),
        (r"\begin{align*}(1,2)\end{align*}", "(1,2)"),
        (r"\[ x=5 \]", "5"),
        (r"\displaystyle\frac12", r"\frac12"),
        (r"\[\{1,2\}\]", r"\{1,2\}"),
        (r"\begin{cases}x=1\\y=2\end{cases}", "(1,2)"),
        ("```5```", "5"),
        (r"$$\frac{1}{2}$$", "1/2"),
        (r"\begin{equation*}\frac{3}{4}.\end{equation*}", r"\frac34"),
        (r"\begin{gathered}7\end{gathered}", "7"),
        ("```latex\n5\n```", "5"),
        (r"\begin{split}y&=2x\end{split}", "y=2x"),
        (r"\begin{math}5\end{math}", "5"),
    ],
    "named parts": [
        ("a=2,b=3", "(2,3)"),
        ("x=1, y=2", "1,2"),
        ("x_1=1, y_1=2", "(1,2)"),
        (r"A=1,\ B=2,\ C=3", "(1,2,3)"),
        (r"x=1\text{ and }y=2", "(1,2)"),
        ("(1,2)", "x=1,y=2"),
        (r"a=\frac12; b=\sqrt{2}", r"(\frac12,\sqrt2)"),
        ("a_1=3,a_2=5", "(3,5)"),
        ("(x,y)=(1,2)", "1,2"),
        ("m=3,n=4,p=5", "3,4,5"),
        (r"\begin{aligned}x&=1\\y&=2\end{aligned}", "(1,2)"),
    ],
    "counted nouns, units": [
        ("12 apples", "12"),
        ("5 students", "5"),
        ("3 ways", "3"),
        ("60 km/h", "60"),
        ("60 miles per hour", "60"),
        ("7 zebras", "7"),
        (r"\frac{1}{2} hours", "1/2"),
        ("12 red apples", "12"),
        ("24 square units", "24"),
        ("24 sq. units", "24"),
        ("5 people", "5"),
        ("12 dollars", "12"),
        (r"10\pi cm", r"10\pi"),
        (r"10\pi square inches", r"10\pi"),
        ("5 kilometers per hour", r"5\text{ km/h}"),
        (r"60\text{ miles per hour}", r"60\text{ mph}"),
        ("12 cm²", "12"),
        ("8 different ways", "8"),
        ("1,234 books", "1234"),
        ("2.5 liters of water", "2.5"),
        ("5 apples", r"5\text{ apples}"),
        ("12", "12 apples"),
        ("3 meters/second", r"3\text{ m/s}"),
        (r"\sqrt{2} meters", r"\sqrt2"),
        ("5 Kilograms", "5"),
        ("9 chips", "9"),
        ("45 mph", "45"),
        ("100 US dollars", "100"),
    ],
    "functions as code": [
        ("sqrt(2)", r"\sqrt2"),
        ("2*sqrt(3)", r"2\sqrt3"),
        ("sqrt(3)/2", r"\frac{\sqrt3}{2}"),
        ("pi/3", r"\frac{\pi}{3}"),
        ("2*pi", r"2\pi"),
        ("sin(x)", r"\sin x"),
        ("exp(x)", "e^x"),
        ("log(2)", r"\log 2"),
        ("x**2+1", "x^2+1"),
        ("arctan(1/2)", r"\arctan\frac12"),
        ("abs(x)", "|x|"),
        ("floor(n/2)", r"\lfloor n/2\rfloor"),
        ("(-inf, 2)", r"(-\infty,2)"),
        ("binom(n,2)", r"\binom n2"),
        ("sqrt((a+b)/2)", r"\sqrt{\frac{a+b}{2}}"),
        (r"\frac{sqrt(5)}{2}", r"\frac{\sqrt5}{2}"),
        ("2sqrt(x+1)", r"2\sqrt{x+1}"),
        ("math.sqrt(2)", r"\sqrt2"),
        (r"\operatorname{arcsin}(x)", r"\arcsin x"),
        (r"\mathrm{sin}(x)", r"\sin x"),
        ("2**n", "2^n"),
        ("x=sqrt(2)", r"\sqrt2"),
        ("sin x", r"\sin x"),
        (r"sin\left(\frac{x}{2}\right)", r"\sin\frac{x}{2}"),
        (r"sqrt\left(x+1\right)", r"\sqrt{x+1}"),
        ("cos(pi*x)", r"\cos(\pi x)"),
        ("ln(2)", r"\ln 2"),
        (r"\sqrt(2)", r"\sqrt2"),
        ("e**x", "e^x"),
        ("sqrt{2}", r"\sqrt2"),
        ("frac{1}{2}", r"\frac12"),
    ],
    "quoted, markdown": [
        ('"yes"', "yes"),
        ("'east'", "east"),
        ("``east''", "east"),
        (r"\text{“no”}", "no"),
        ("“C”", "C"),
        (r'\text{"even"}', "even"),
        ("**73**", "73"),
        ("__73__", "73"),
        ("*73*", "73"),
        ("`73`", "73"),
        ("**2**, **3**", "2,3"),
        (r"**\frac{1}{2}**", r"\frac12"),
        ("**x = 5**", "5"),
        (r"\textbf{73}", "73"),
        ("$**73**$", "73"),
        ("\u2018east\u2019", "east"),
        ("**5** apples", "5"),
        (r"\text{**No**}", "No"),
        ("**C**", r"\text{(C)}"),
    ],
    "scripts": [
        ("v^2_0", "v_0^2"),
        (r"\frac{v^2_0}{2g}", r"\frac{v_0^2}{2g}"),
        ("x^{2}_{1}+x^{2}_{2}", "x_1^2+x_2^2"),
        (r"\omega^2_0", r"\omega_0^2"),
        ("C^2_n", "C_n^2"),
        (r"v^{2}_{\text{max}}", r"v_{\text{max}}^2"),
        ("a'_1", "a_1'"),
        (r"\log^2_3 x", r"\log_3^2 x"),
    ],
    "degrees in functions": [
        (r"2\cos 80^\circ", r"2\sin 10^\circ"),
        (r"\frac{1}{\cos 80^\circ}", r"\frac{1}{\sin 10^{\circ}}"),
        (r"\sin 150°", r"\sin 30^\circ"),
        (r"\sin(x+90^\circ)", r"\cos x"),
        (r"\sin\frac{\pi}{6}", r"\sin 30^\circ"),
        (r"4\sin 18^\circ", r"\sqrt5-1"),
        (r"\sin 10^\circ", r"\sin 10^\circ"),
        (r"\sin\left(10^\circ\right)", r"\cos 80^{\circ}"),
        (r"\csc(10^\circ)", r"\sec 80^\circ"),
        (r"\sin 10\degree", r"\cos 80\degree"),
    ],
}
LENIENT: dict[str, list[tuple[str, str]]] = {
    "named parts": [
        (r"\text{apples}=3,\text{oranges}=5", "3,5"),
    ],
    "functions as code": [
        ("sqrt(4)", "2"),
    ],
    "degrees in functions": [
        (r"\sin 30^\circ", r"\frac12"),
        (r"\tan^2 60^\circ", "3"),
    ],
    "sentences": [
        (r"\text{The smallest }n\text{ is }50", "50"),
        ("The answer is 50", "50"),
        (r"\text{Answer: }50", "50"),
        ("n is 50", "50"),
    ],
}
REFUSED: dict[str, list[tuple[str, str]]] = {
    "left side": [
        (r"\frac{V}{\pi}=76", "75"),
        ("a+d+e+f=3k", "2k"),
        ("m+n=74", "73"),
        ("x^2+y^2=26", "25"),
        (r"\tan\theta=\frac{4}{3}", r"\frac34"),
        ("41+1=43", "42"),
        ("x+y=5-x", "5"),
        ("x+y+5=0", "5"),
        (r"\text{not }x=5", "5"),
        ("wrong=5", "5"),
        ("not=5", "5"),
        ("5", "x+y=5"),
        ("2x+3", "x+y=2x+3"),
        ("a+b=5=6", "5"),
        ("a+b<5", "5"),
        ("a+b=5,6", "5"),
        ("a+b=5+1", "5"),
        ("a+b=", "5"),
        ("=5+a", "5"),
        (r"\text{Smallest }n=51", "50"),
        (r"\text{Smallest }n\neq50", "50"),
        (r"\sin x=0.6", "0.5"),
        (r"a+b=5\text{ cm}", r"5\text{ m}"),
        (r"x+y=50\%", "5"),
        ("41=42", "42"),
        ("x+1=x+2", "x+3"),
        ("a+b=5", "x=5"),
        (r"\text{Smallest }n=5", "f(x)=5"),
    ],
    "ratio": [
        ("a:b=3:2", "2:3"),
        (r"\frac{a}{b}=\frac{3}{2}", r"\frac23"),
        ("a:b:c=1:3:2", "1:2:3"),
        ("a:b=2:3", "3"),
        ("1:2", r"\frac12"),
        ("2:3=4:7", "4:6"),
    ],
    "display": [
        (r"\begin{equation}6\end{equation}", "5"),
        (r"\begin{cases}x=2\\y=1\end{cases}", "(1,2)"),
        (r"\begin{cases}x&x>0\\-x&x<0\end{cases}", "x"),
        (r"\begin{aligned}1\\2\end{aligned}", "12"),
        (r"\begin{aligned}5\\6\end{aligned}", "5"),
        ("```5``` or ```6```", "5"),
        (r"\begin{pmatrix}5\end{pmatrix}\begin{pmatrix}6\end{pmatrix}", "5"),
        (r"\begin{equation}5", "5"),
        (r"\[1,2\]", "[1,2]"),
    ],
    "named parts": [
        ("x=2,y=1", "(1,2)"),
        ("x=2,y=1", "1,2"),
        ("x=1,y=2", "(1,2,3)"),
        ("x=1,y=2", "(2,1)"),
        ("x=1,y=2", "[1,2]"),
        ("x=1,y=2,z=3", "1,2"),
        ("x=1,2", "(1,2)"),
        ("x=1,x=2", "(1,2)"),
        ("a=1=2,b=2", "(1,2)"),
        ("x<1,y=2", "(1,2)"),
        ("(2,1)", "x=1,y=2"),
        (r"\text{not }a=1,b=2", "(1,2)"),
        ("x=1,y=3", "1,2"),
        ("x=1,y=2", r"\{2,1\}"),
        ("x=1,y=2", "12"),
        ("1=1,2=2", "(1,2)"),
    ],
    "named parts out of order": [
        ("y=1,x=2", "(1,2)"),
        ("b=1,a=2", "1,2"),
        ("x_2=1,x_1=2", "(1,2)"),
    ],
    "units": [
        ("13 apples", "12"),
        ("5 cm", r"5\text{ m}"),
        ("5 apples", r"5\text{ oranges}"),
        ("5 million", "5"),
        ("5 dozen apples", "5"),
        ("5 dozen", "5"),
        ("5 hundred", "5"),
        ("5 squared", "5"),
        ("5 is wrong", "5"),
        ("5 is not the answer", "5"),
        ("5 not 6", "5"),
        ("5 abc", "5"),
        ("5 abcde", "5"),
        ("5 x", "5"),
        ("5 minus one", "5"),
        ("5 thirds", "5"),
        ("5 or more", "5"),
        ("5 more than that", "5"),
        ("5 times x", "5"),
        ("5 apples and 6 oranges", "5"),
        ("apples 5", "6"),
        ("5 km", "5000"),
        ("60 km/h", r"60\text{ m/s}"),
        ("12 cm²", r"12\text{ cm}"),
        ("1/2 hours", "2"),
        ("5 factorial", "5"),
        ("5 percent of x", "5"),
        ("5 plus some more", "5"),
        ("5 pairs", "5"),
        ("5 less than ten", "5"),
        ("5 eighths", "5"),
        ("5 i", "5"),
        ("5 pi", "5"),
        ("5 modulo seven", "5"),
        ("5 base eight", "5"),
        ("5 if even", "5"),
        ("5 except zero", "5"),
        ("5 without units wrong", "5"),
        ("between 5 and 6", "5"),
        ("5 halves", "5"),
        ("5 doubled", "5"),
        ("no 5 apples", "5"),
        ("5 sinx", "5"),
        ("5 sqrt", "5"),
        ("5 theta", "5"),
        ("5 unless prime", "5"),
        ("5 false", "5"),
        ("5 cents", r"5\text{ dollars}"),
        ("5 negative", "5"),
    ],
    "code": [
        ("sqrt(3)", r"\sqrt2"),
        ("sqrt(2)/3", r"\sqrt{2/3}"),
        ("sin(x)", r"\cos x"),
        ("sqrt(2", "2"),
        ("sqrt()", "1"),
        ("pi", "p"),
        ("pi*i", "p"),
        ("x**3", "x^2"),
        ("exp(x)", "ex"),
        ("abs(x)", "x"),
        ("log2(8)", "8"),
        ("__import__('os')", "1"),
        ("sqrt(2)3", r"\sqrt{23}"),
        ("eval(5)", "5"),
        ("int(5)", "5"),
        ("print(5)", "5"),
        ("floor(n/2)", r"\lceil n/2\rceil"),
        ("x*(2)*2", "x^2"),
        ("spin", r"\sin"),
        ("binom(2,n)", r"\binom n2"),
        ("asin", r"\arcsin"),
    ],
    "quoted": [
        ('"yes"', "no"),
        ("'east'", "west"),
        ("**73**", "74"),
        ("**5** or **6**", "5"),
        ("2**3", "23"),
        ("2**3**4", "234"),
        ("5*6*", "56"),
        ("*5*6", "56"),
        ("f'", "f"),
        ("x__5__", "x5"),
        ('"5" is wrong', "5"),
        ("**not 5**", "5"),
        ("''", "1"),
        ("****", "1"),
        ("** **", "1"),
        ("**5**6", "56"),
        ("'5", "6"),
        ('5"', "5"),
    ],
    "scripts": [
        ("v^2_0", "v_2^0"),
        ("v^3_0", "v_0^2"),
        ("v^2_1", "v_0^2"),
        ("10^2_3", "10_3^2x"),
        ("x^{2}_{1}", "x^{21}"),
        ("C^2_n", "C_2^n"),
        ("v^20", "v_0^2"),
        ("5^2_0", "25"),
    ],
    "degrees": [
        (r"2\cos 70^\circ", r"2\sin 10^\circ"),
        (r"\sin 30^\circ", r"\frac{\sqrt3}{2}"),
        (r"\sin 30", r"\frac12"),
        (r"\cos 80", r"\sin 10^\circ"),
        (r"\sin 10^\circ+1", r"\cos 80^\circ"),
        (r"\sin^{10}x", r"\cos^{80}x"),
        (r"\sin\frac{\pi}{6}", r"\sin 31^\circ"),
    ],
    "sentence": [
        ("The answer is not 50", "50"),
        (r"\text{The smallest }n\text{ is not }50", "50"),
        ("It is false that n is 50", "50"),
        ("The answer is 50 or 51", "50"),
        ("The answer is 51", "50"),
        ("n is 50 plus 1", "50"),
        ("n is less than 50", "50"),
        ("The wrong answer is 50", "50"),
        ("twice the answer is 50", "50"),
        ("n is 50 if x is 3", "50"),
    ],
}
UNSOLVED: dict[str, list[tuple[str, str]]] = {
    "unsolved": [
        (r"\text{Twice }n=50", "50"),
        (r"\text{Half of }\triangle ABC=24", "24"),
        (r"\text{If }n=50", "50"),
        ("x^2=5", "5"),
        ("2x=10", "10"),
        (r"\frac{x}{2}=5", "5"),
        (r"\log_2 x=3", "3"),
        (r"\lfloor x\rfloor=3", "3"),
        ("x^2+y^2=25", "25"),
        (r"\frac{x^{2}}{2} - \frac{y^{2}}{4}=1", "1"),
        (r"x^2-4y=8", "8"),
        ("|x|=5", "5"),
        ("x^{-1}=2", "2"),
        ("2BC=5", "5"),
        ("x+3=5", "5"),
        ("x+y=0", "0"),
        (r"\frac{XY}{2}=1", "1"),
        ("a+b=2+3=5", "5"),
        ("x=4+1=5", "5"),
        ("x+y=a+b=5", "5"),
        ("a+b=4+1", "5"),
        (r"2\mathbb E[k]=100", "100"),
    ],
}
NEVER: dict[str, list[tuple[str, str]]] = {
    "named parts": [
        ("k=5,b=2", "(5,2)"),
    ],
    "functions as code": [
        ("Rational(1,2)*x", r"\frac{x}{2}"),
    ],
}


def rows(tables: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return list(itertools.chain.from_iterable(tables.values()))


def verdicts(written: str, gold: str) -> tuple[bool, bool]:
    both = MathChecker().check_both([rf"\boxed{{{written}}}"], [gold])
    return both["strict"][0], both["lenient"][0]


@pytest.mark.parametrize(("written", "gold"), rows(STRICT))
def test_both_conventions_pay(written: str, gold: str) -> None:
    assert verdicts(written, gold) == (True, True)


@pytest.mark.parametrize(("written", "gold"), [*rows(LENIENT), *rows(UNSOLVED)])
def test_only_the_lenient_convention_pays(written: str, gold: str) -> None:
    assert verdicts(written, gold) == (False, True)


@pytest.mark.parametrize(("written", "gold"), [*rows(REFUSED), *rows(NEVER)])
def test_neither_convention_pays(written: str, gold: str) -> None:
    assert verdicts(written, gold) == (False, False)


def test_no_spelling_of_one_answer_is_paid_for_another() -> None:
    """All spellings of all kinds against each other's gold answers: paid only where the gold answers are the same."""
    found = rows(STRICT)
    golds = list(dict.fromkeys(gold for _, gold in found))
    tried = [(written, own, gold) for written, own in found for gold in random.Random(0).sample(golds, 40)]
    paid = MathChecker().check([rf"\boxed{{{written}}}" for written, _, _ in tried], [gold for _, _, gold in tried])
    wrong = [row for row, is_paid in zip(tried, paid, strict=True) if is_paid and not is_same(row[1], row[2])]
    assert wrong == []
    assert sum(paid) > 80


def is_same(first: str, second: str) -> bool:
    """Whether two gold answers are the same, a tuple and a list of the same parts too."""
    parts = [gold.strip("()\\{}") for gold in (first, second)]
    return same_answer(first, second) or same_answer(second, first) or parts[0] == parts[1]


QUANTITIES = (
    "a+b",
    r"\frac{V}{\pi}",
    r"\text{Smallest }n",
    "m^2+n^2",
    r"\tan\theta",
    "AB+CD",
    "|S|",
    "x:y",
)
numbers = st.integers(-99, 99)


@given(st.sampled_from(QUANTITIES), numbers, numbers)
def test_what_a_quantity_is_said_to_be(left: str, value: int, gold: int) -> None:
    assert verify(rf"\boxed{{{left}={value}}}", str(gold)) == (value == gold and value != 0)
    assert not verify(rf"\boxed{{{left}={value}={gold}}}", str(gold))
    assert not verify(rf"\boxed{{{gold}}}", f"{left}={gold}")
    assert not verify(rf"\boxed{{{left}\neq{value}}}", str(value))


@given(st.permutations("abcd"), st.lists(numbers, min_size=4, max_size=4), st.booleans(), st.integers(2, 4))
def test_named_parts_keep_their_order(names: list[str], values: list[int], is_tuple: bool, count: int) -> None:
    """The names are the pair's places, as the alphabet has them; the values are those of the gold answer's places."""
    names, values = names[:count], values[:count]
    gold = ",".join(map(str, values))
    written = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    is_right = verify(rf"\boxed{{{written}}}", f"({gold})" if is_tuple else gold)
    assert is_right == (names == sorted(names))
    other = ", ".join(
        f"{name}={value}" for name, value in zip(sorted(names), [*values[1:], values[0] + 1], strict=True)
    )
    assert not verify(rf"\boxed{{{other}}}", f"({gold})")


@given(st.sampled_from(["apples", "km/h", "different ways", "people", "square units"]), numbers, numbers)
def test_counted_things_are_counted(noun: str, value: int, gold: int) -> None:
    assert verify(rf"\boxed{{{value} {noun}}}", str(gold)) == (value == gold)
    assert verify(rf"\boxed{{{value}}}", f"{gold} {noun}") == (value == gold)
    assert not verify(rf"\boxed{{{value} {noun}}}", rf"{value}\text{{ oranges}}")
    for word in ("not", "wrong", "million", "dozen", "squared", "thirds", "unless"):
        assert not verify(rf"\boxed{{{value} {word} {noun}}}", str(value))


@given(
    st.sampled_from(["**{}**", "`{}`", '"{}"', "“{}”", "```\n{}\n```", r"\begin{{aligned}}{}\end{{aligned}}"]),
    numbers,
    numbers,
)
def test_marks_around_an_answer(marks: str, value: int, gold: int) -> None:
    assert verify(rf"\boxed{{{marks.format(value)}}}", str(gold)) == (value == gold)
    assert not verify(rf"\boxed{{{marks.format(value)} or {marks.format(value + 1)}}}", str(value))


@given(st.integers(1, 179), st.integers(1, 179))
def test_degrees_are_angles_within_functions(first: int, second: int) -> None:
    """Two sines are the same where the angles are, or their supplements."""
    is_same_sine = first in (second, 180 - second)
    assert verify(rf"\boxed{{7\sin {first}^\circ}}", rf"7\sin {second}^{{\circ}}") == is_same_sine
    if 0 < 90 - second:
        assert verify(rf"\boxed{{\cos({90 - second}^\circ)+x}}", rf"x+\sin {first}°") == (
            first in (second, 180 - second)
        )


def test_spellings_of_code_are_normalized_and_not_run() -> None:
    assert normalize_answer("sqrt(2)*x**2") == r"\sqrt{2}*x^2"
    assert normalize_answer("np.arcsin(10/13)") == r"\arcsin(10/13)"
    assert normalize_answer("*5*6*") == "*5*6*"  # not marks around 5*6
    for code in ("__import__('os').getpid()", "eval('5')", "print(5)", "(lambda: 5)()", "9**9**9", "sqrt(9**9**9**9)"):
        assert verdicts(code, "5") == (False, False)
