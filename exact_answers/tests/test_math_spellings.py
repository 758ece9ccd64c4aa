r"""One answer in the spellings of real outputs, each beside near misses that must not be paid."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from exact_answers import extract_boxed, same_answer, verify
from exact_answers.values import readable, same_expression

MATRIX = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"
POWERS = r"2^6 3^5 5^4"

SAME = [
    # a gold answer that is a product or a power wants a value
    *((answer, POWERS) for answer in ("2^6 * 3^5 * 5^4", r"2^6 \cdot 3^5 \cdot 5^4", r"5^4\times 2^{6}\times 3^5")),
    *((answer, POWERS) for answer in ("9720000", r"2^{6}3^{5}5^{4}", r"2^6\,3^5\,5^4")),
    *((answer, "7^6") for answer in ("117649", "7^{6}", r"7\cdot7^5", "49^3")),
    *((answer, "10^5") for answer in ("100000", "100,000", r"2^5\cdot5^5", r"10\cdot 10^4", "2^5 5^5")),
    *((answer, r"2\times10^5") for answer in ("200000", r"2^6\cdot5^5", r"20\cdot10^4", "2e5")),
    ("2^4 3^3 5", r"5\cdot3^3\cdot2^4"),
    ("n!2^n", "2^n n!"),
    (r"(2n)!2", r"2\cdot(2n)!"),
    # marks of a formula around the answer
    *((answer, "5") for answer in (r"\[ 5 \]", r"\( 5 \)", "$5$", "$$5$$", "\\[\n5\n\\]", r"\(x=5\)")),
    (r"\(\frac{1}{2}\)", r"\frac12"),
    (r"\((1,2)\)", "(1,2)"),
    (r"\(2\) and \(3\)", "2,3"),
    # every backslash doubled
    (r"\\frac{3}{2}", r"\frac{3}{2}"),
    (r"\\dfrac{\\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}"),
    (r"\\left\\{1,2\\right\\}", r"\{1,2\}"),
    (r"5\\text{ cm}", "5"),
    (r"\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", MATRIX),
    # names
    *((answer, "1") for answer in (r"\frac{XY}{YZ}=1", "XY/YZ=1", r"\frac{\overline{XY}}{\overline{YZ}}=1", "XY:YZ=1")),
    *((rf"{name}=100", "100") for name in (r"\mathbb E[k]", r"\mathbb{E}[k]", "E[X+Y]", r"\Pr(A\cap B)", "P(A|B)")),
    *((rf"{name}=100", "100") for name in ("BC^2", "AB", r"\overline{AB}^2", "[ABC]", r"\mathbf{M}", r"\hat{p}")),
    (r"BC^2=2\sqrt3", r"2\sqrt3"),
    ("AB=CD=5", "5"),
    # powers of a negative number
    ("(-1/2)^k", "1/(-2)^k"),
    (r"\left(-\frac12\right)^n", r"\frac{1}{(-2)^n}"),
    (r"(-x)^{-k}", r"\frac{1}{(-x)^k}"),
    ("(-1)^{2k}x", "x"),
    (r"(-1)^{n+1}", r"(-1)^{n-1}"),
    # large binomial coefficients
    (r"\binom{4020}{2009}-1", r"\binom{4020}{2011}-1"),
    (r"\frac{\binom{4020}{2010}}{2}", r"\binom{4019}{2009}"),
    # for what it holds
    *((rf"2^n{said}", "2^n") for said in (r"\text{ for all } n\ge2", r", \text{ for all integers } n \geq 2")),
    *((rf"2^n{said}", "2^n") for said in (r"\text{ for every positive integer n}", r"\text{ for all } n\in\mathbb{N}")),
    (r"f(x)=2x \text{ for all } x", "2x"),
    (r"2^n\text{ for all } n\ge2", r"2^n\text{ for all }n\geq 2"),
    # lists and thousands
    *((answer, "70,110") for answer in ("110, 70", "70, 110", "110,70", r"\{70,110\}", r"70\text{ and }110")),
    *((answer, "48, 384") for answer in ("48,384", "384, 48", "$48$,$384$", r"48 \text{ and } 384", "48;384")),
    *((answer, "58,500") for answer in ("58500", r"58,\!500", r"58\,500", "58{,}500", "58 500", r"\$58,500")),
    *((answer, "70000") for answer in ("70 000", "70~000", r"70\ 000", "$70 000$", "70 000.0")),
    ("1 234 567", "1234567"),
    ("x_1=70, x_2=110", "110, 70"),
    ("x=1,234", "1234"),
    # units in any type
    (r"\frac{1}{3} \textbf{meters}", "1/3"),
    (r"5\textit{ cm}", r"5\text{ cm}"),
    (r"15,000 \, \text{kcal m}^{-2} \text{ yr}^{-1}", "15000"),
    (r"1,234\text{ cm}", "1234"),
    # matrices over several lines
    ("\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}", MATRIX),
    ("\\begin{pmatrix}\n1 & 2 \\\\[4pt]\n3 & 4 \\\\\n\\end{pmatrix}", MATRIX),
    ("\\begin{bmatrix}\n1 & 2 \\\n3 & 4\n\\end{bmatrix}", MATRIX),
    ("\\begin{pmatrix}\n1 & 2 \\cr\n3 & 4 \\\\ \\hline\n\\end{pmatrix}", MATRIX),
    (r"\begin{smallmatrix}1&2\\3&4\end{smallmatrix}", MATRIX),
    # braces around a number
    (r"\boxed{5}\text{ cm}", "5"),
    (r"-\boxed{5}", "-5"),
]

DIFFERENT = [
    *(
        (answer, POWERS)
        for answer in (r"2^6\cdot 3^5", r"2^6\cdot 3^5\cdot 5^3", "9720001", "2^63^55^4", "2^6+3^5+5^4")
    ),
    *((answer, "7^6") for answer in ("6^7", "76", "7^7", "117648", r"7\cdot6")),
    *((answer, "10^5") for answer in ("10^6", "105", r"2^5\cdot5^4", "50", r"10\cdot5")),
    *((answer, "117649") for answer in ("7^6", r"7\cdot7^5")),  # a number wants a number
    *((answer, "9720000") for answer in (POWERS, r"2^6\cdot3^5\cdot5^4")),
    ("2^3 1/2", "4"),
    ("2^3 1/2", r"\frac{17}{2}"),
    ("2^{3}4", "2^{34}"),
    ("n!2", "(2n)!"),
    ("5!2", "7!"),
    (r"5\(6\)", "56"),
    (r"\[1,2\]", "[1,2]"),
    (r"\(1,2\)", "(1,2)"),
    (r"5\\6", "56"),
    (r"1\\2", "12"),
    (r"\\frac{3}{2}", r"\frac{2}{3}"),
    (r"\begin{pmatrix}1\\frac{1}{2}\end{pmatrix}", r"\begin{pmatrix}1\\\frac12\end{pmatrix}"),
    *((answer, "1") for answer in (r"\frac{XY}{YZ}=2", r"\frac{x}{2}=1", r"\frac{1}{1}=1", "2x=1", r"\frac{XY}{2}=1")),
    *((answer, "5") for answer in ("BC^2=25", "BC^{-1}=5", "2BC=5", "x^2=5", "AB+BC=6", "AB=4=5", "0=AB=5", "AB=CD")),
    *((answer, "100") for answer in (r"\mathbb E[k]=99", r"100=\mathbb E[k]+1", r"2\mathbb E[k]=100", "E=mc^2")),
    ("(-1/2)^k", "1/2^k"),
    ("(-1/2)^k", "(-2)^k"),
    ("(-1/2)^k", "1/(-2)^{k+1}"),
    ("(-1)^k", "1"),
    (r"(-1)^kx", r"(-1)^k x+\sin(\pi x)"),  # x need not be whole
    (r"\binom{4020}{2010}-1", r"\binom{4020}{2010}"),
    (r"\binom{4020}{2009}", r"\binom{4020}{2010}"),
    (r"3^n\text{ for all } n\ge2", "2^n"),
    (r"2^n\text{ for all } n\ge3", r"2^n\text{ for all } n\ge2"),
    (r"2^n\text{ for no } n", "2^n"),
    (r"5\text{ for all but one, which is 6}", "5"),
    (r"5\text{ for all }x, 6\text{ for all }y", "5"),
    (r"5\text{ for all }x=6", "5"),
    (r"5\text{ for all but one}", "5"),
    (r"\text{ for all }n\ge2", "n"),
    *((answer, "32349") for answer in ("32, 349", r"32\text{ and }349", "$32$, $349$", "$32$,$349$", r"32,\quad 349")),
    *((answer, "48, 384") for answer in ("48384", "48, 385", "48", "(48,384)", "48, 384, 0")),
    *((answer, "70,110") for answer in ("70", "70, 111", "(70,110)", "[70,110]", "70.110")),
    ("500, 2", "2,005"),
    ("2, 0", "2,000"),  # no number of a list begins with 0
    ("58, 500", "58500"),
    ("x_1=70, x_2=110", "70110"),
    *(
        (answer, "70000")
        for answer in ("70 00", "70 0000", r"70\quad 000", "7 0000", r"70\%000", "70 000 1", "0 70 000")
    ),
    (r"5 \% 6", "56"),
    ("1 234", "1234"),
    ("33 100/200", "33100/200"),
    ("070 000", "70000"),
    (r"\frac{1}{3} \textbf{squared}", "1/3"),
    (r"\frac{1}{3}\textbf{x}", "1/3"),
    (r"5\textbf{ m}", r"5\text{ cm}"),
    (r"1,234\text{ cm}", r"1,234\text{ m}"),
    (r"1, 234\text{ cm}", "1234"),
    ("\\begin{pmatrix}\n1 & 2\n3 & 4\n\\end{pmatrix}", MATRIX),
    ("\\begin{pmatrix}\n1 & 3 \\\\\n2 & 4\n\\end{pmatrix}", MATRIX),
    ("\\begin{pmatrix}\n1 \\\n2 \\\n3 \\\n4\n\\end{pmatrix}", MATRIX),
    (r"\begin{pmatrix}1&2&3&4\end{pmatrix}", MATRIX),
]

BOXES = [
    (r"\\boxed{5}", "5"),
    (r"\\boxed{\\frac{3}{2}}", r"\\frac{3}{2}"),
    (r"\\boxed{\\{1,2\\}}", r"\\{1,2\\}"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    (r"\boxed{The answer is \boxed{5}}", "5"),
    (r"\boxed{\text{So the final answer is: }\boxed{x=5}.}", "x=5"),
    (r"\boxed{\text{Answer: }$\boxed{\frac{1}{2}}$}", r"\frac{1}{2}"),
    (r"\boxed{6\boxed{5}}", r"6\boxed{5}"),
    (r"\boxed{\text{not }\boxed{5}}", r"\text{not }\boxed{5}"),
    (r"\boxed{\text{The answer is not }\boxed{5}}", r"\text{The answer is not }\boxed{5}"),
    (r"\boxed{\text{The answer is }\boxed{5}\text{ or }6}", r"\text{The answer is }\boxed{5}\text{ or }6"),
    (r"\boxed{\text{The answer is }\boxed{}}", r"\text{The answer is }\boxed{}"),
]

TINY = "2^{-1000}"
DIFFER_BY_LITTLE = [
    *(
        (rf"{text}+{TINY}", text)
        for text in ("x", r"\pi", r"\sqrt2", r"\frac{\pi}{3}", r"\sin x", r"2^{500}\pi", "e^x")
    ),
    *((rf"{text}\cdot(1+{TINY})", text) for text in (r"\pi x", r"\sqrt{2}", r"2^{-700}\pi")),
    (r"1+2^{-420}", r"\sin^2 t+\cos^2 t"),
    (rf"\sqrt{{2+{TINY}}}", r"\sqrt2"),
    (rf"\sqrt2\cdot{TINY}", r"0\pi"),
    (r"(\sqrt2)^{-2000}\pi+e", "e"),
    (r"e^{-700}+\pi", r"\pi"),
    (rf"y=\pi x+{TINY}", r"y=\pi x"),
    (rf"y=(\pi+{TINY})x", r"y=\pi x"),
    (r"\pi+10^{-300}", r"\pi"),
    (rf"\pi+0.{'0' * 400}1", r"\pi"),
]


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_same(answer: str, gold: str) -> None:
    assert same_answer(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different(answer: str, gold: str) -> None:
    assert not same_answer(answer, gold)


@pytest.mark.parametrize(("completion", "content"), BOXES)
def test_boxes(completion: str, content: str) -> None:
    assert extract_boxed(completion) == content


@pytest.mark.parametrize(("first", "second"), DIFFER_BY_LITTLE)
def test_a_small_difference_is_a_difference(first: str, second: str) -> None:
    assert not same_answer(first, second)
    assert not same_answer(second, first)


def test_long_numbers_beside_roots_are_equal_still() -> None:
    """The second look, with the bits that the numbers ask for, finds equal what is."""
    for first, second in (
        (r"2^{1009}\sqrt{2}", r"2^{1008}\sqrt{8}"),
        (r"\pi+2^{-1000}", r"2^{-1000}+\pi"),
        (r"\binom{4020}{2010}\pi", r"\pi\binom{4020}{2010}"),
        (r"(\pi+2^{-900})-\pi", "2^{-900}"),
        (r"y=2^{-900}\pi x", r"2^{900}y=\pi x"),
    ):
        assert same_answer(first, second)


def test_what_would_take_too_many_bits_is_told_neither_way() -> None:
    trees = readable(r"2^{-9000}+\pi"), readable(r"\pi+2^{-9000}")
    assert None not in trees
    assert same_expression(*trees) is None
    many = readable(r"2^{-3000}" + r"+\sin1" * 70)
    start = time.process_time()
    assert same_expression(many, readable(r"\sin1" + r"+\sin1" * 69 + "+2^{-3000}")) is None
    assert time.process_time() - start < 2.0


def test_the_list_of_gaokao_is_no_number(data_dir: Path) -> None:
    """Golds with commas in the published files: the one with a space is a list, the others are thousands."""
    lines = (data_dir / "gaokao2023en.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"].replace("$", "") for line in lines]
    assert golds[8] == "48, 384"
    assert verify(r"\boxed{384, 48}", golds[8])
    assert not verify(r"\boxed{48384}", golds[8])
    thousands = [golds[n] for n in (202, 232, 236, 282, 320)]
    assert thousands == ["2,900", "2,600", "120,000", "35,000", "1,625"]
    assert all(verify(rf"\boxed{{{gold.replace(',', '')}}}", gold) for gold in thousands)
