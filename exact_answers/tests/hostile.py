"""Completions written to crash, hang, fool or fill the memory of an answer checker; none of them is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Hostile(NamedTuple):
    """A completion and the gold answer that it must not be paid for."""

    name: str
    completion: str
    gold: str


def box(content: str) -> str:
    return rf"The answer is $\boxed{{{content}}}$."


def hostile_completions() -> list[Hostile]:
    """All of them, each under its own name."""
    families = (
        huge_values,
        long_texts,
        deep_nesting,
        braces,
        unicode_texts,
        code,
        boxes,
        leaks,
        half_answers,
        symbolic,
    )
    return [
        Hostile(f"{family.__name__}-{number}", completion, gold)
        for family in families
        for number, (completion, gold) in enumerate(family())
    ]


def huge_values() -> Iterator[tuple[str, str]]:
    """Towers of powers, factorials, exponents."""
    for text in (
        *("9^{9^{9}}", "9^{9^{9^{9}}}", "9^{9^{9^{9^{9^{9}}}}}", "10^{10^{10^{10}}}", "2^{2^{2^{2^{2^{2^{2}}}}}}"),
        *("99999999!", "99999999!!", "(10^{9})!", "((((9!)!)!)!)!", r"\binom{10^{9}}{10^{8}}", "(-9)^{9^{9^{9}}}"),
        *(
            "1e999999999",
            "1e-999999999",
            "1e" + "9" * 500,
            "10^{999999999}",
            "10^{-999999999}",
            "10^{" + "9" * 400 + "}",
        ),
        *(r"e^{e^{e^{e^{e}}}}", r"\exp(\exp(\exp(\exp(99))))", r"\sinh(10^{30})", r"\cosh(99!)", r"\tan(9^{9^{9}})"),
        *("0^{-1}", r"\frac{1}{0}", r"\frac{0}{0}", r"\ln 0", r"\log_1 5", r"\sqrt[0]{5}", r"\frac{1}{x-x}", "0^0"),
        *("9**9**9", "9**99999999", "99999999**99999999", "9^9^9", r"\lfloor 9^{9^{9}}\rfloor", "x^{10^{10}}"),
        *(r"\sqrt{" * 15 + "9^{9^{9}}" + "}" * 15, "!".join(["x"] * 200), r"\Gamma(10^{10})", "0.5!" * 60),
    ):
        yield box(text), "5"


def long_texts() -> Iterator[tuple[str, str]]:
    """A million of anything."""
    million = 1_000_000
    for text in (
        *("9" * million, "1," * (million // 2), "1 " * (million // 2), "1+" * (million // 2) + "1", "-" * million),
        *(
            "x" * million,
            "(" * million,
            r"\frac" * (million // 5),
            r"\sqrt" * (million // 5),
            "^" * million,
            "0" * million,
        ),
        *("1." + "3" * million, "." * million, "1/" * (million // 2) + "1", "_{1" * (million // 3), "$" * million),
    ):
        yield box(text), "5"
        yield text, "5"
    for text in ("9" * 500, "1," * 250, "1+" * 250 + "1", "-" * 500, "x" * 500, "(" * 500, "|" * 500, r"\pm 1," * 80):
        yield box(text), "5"
    for text in (
        r"\sin(" * 80 + "x",
        r"\sin " * 90 + "x",
        "!" * 400,
        "x_" * 200,
        "x'" * 200,
        r"\frac" * 100,
        "<" * 400,
    ):
        yield box(text), "5"
    for text in ("x" + "!" * 500, r"\ln" * 160 + " x", r"\sin^2" * 80 + " x"):
        yield box(text), "x+1"
    yield box(r"\sin x+" * 70 + "1"), "5"
    yield box(",".join(rf"\sqrt{{{n}}}" for n in range(40))), ",".join(rf"\sqrt{{{n}}}" for n in range(1, 41))


def deep_nesting() -> Iterator[tuple[str, str]]:
    """Brackets in brackets."""
    for opening, closing in (("{", "}"), ("(", ")"), ("[", "]"), (r"\{", r"\}"), (r"\frac{1}{", "}"), (r"\sqrt{", "}")):
        for depth in (15, 30, 150, 20_000):
            yield box(opening * depth + "1" + closing * depth), "5"
    yield r"\boxed{" * 100_000, "5"
    yield r"\boxed{" * 50_000 + "}" * 50_000, "5"
    yield r"\boxed{" * 10 + "6" + "}" * 10, "5"  # boxes around the whole count as one


def braces() -> Iterator[tuple[str, str]]:
    """Boxes that are not closed, not opened, or not boxes."""
    for text in (
        *(
            r"\boxed{5",
            r"\boxed{{5}",
            r"\boxed{5\}",
            r"boxed{5}",
            r"\boxed5",
            r"\boxed(5)",
            r"\boxed[5]",
            r"\\ boxed{5}",
        ),
        *(
            r"\boxed{}",
            r"\boxed{ }",
            r"\boxed{{}}",
            r"\boxed{$$}",
            r"\boxed{\text{}}",
            r"\boxed{5} \boxed{",
            r"\fbox{5}",
        ),
        *(r"\boxed{5}\boxed{}", r"\boxed{5}\boxed{6}", r"}\boxed{5", "5", "The answer is 5.", ""),
    ):
        yield text, "5"
    yield r"\boxed{5}" + "x" * 8_000, "5"  # too far from the end


def unicode_texts() -> Iterator[tuple[str, str]]:
    """Digits that are not ASCII, invisible characters, half characters."""
    for text in (
        *(
            "\uff14\uff12",
            "٤٢",
            "४२",
            "\U0001d7dc\U0001d7da",
            "⁴²",
            "4²",
            "₄₂",
            "4\u200b2",
            "4\u200d2",
            "4\u00ad2",
            "\u202e24",
            "4\u03012",
        ),
        *(
            "\ud800",
            "4\ud8002",
            "\udfff42",
            "4\x002",
            "\x1b[2J42",
            "④②",
            "Ⅳ",
            "四十二",
            "4\ufeff2",
            "42\u0660",
            "½",
            "42⃣",
        ),
    ):
        yield box(text), "42"


def code() -> Iterator[tuple[str, str]]:
    """Python, LaTeX and shell that want to be executed."""
    for text in (
        *("__import__('os').system('touch OWNED')", "open('OWNED','w')", "exec('x=1')", "eval('5')", "lambda:5"),
        *("().__class__.__bases__[0].__subclasses__()", "sys.exit(0)", "raise SystemExit", "os._exit(1)", "quit()"),
        *(r"\input{/etc/passwd}", r"\write18{touch OWNED}", r"\immediate\write18{ls}", r"\def\x{\x\x}\x", r"\csname x"),
        *(
            "; rm -rf OWNED;",
            "$(touch OWNED)",
            "`touch OWNED`",
            "' or '1'='1",
            "<script>1</script>",
            "{{5*0}}",
            "%s%s%n",
        ),
        *("Symbol('x')", "S('5')", "sympify('5')", "Integer(5)", "int('5')", "5 if True else 6", "print(5)", "5;5"),
    ):
        yield box(text), "5"


def boxes() -> Iterator[tuple[str, str]]:
    """Many answers, of which one is right."""
    yield box("5") + box("6"), "5"
    yield box("5") * 100 + box("6"), "5"
    yield "".join(box(str(number)) for number in range(100)), "5"
    yield box(",".join(map(str, range(60)))), "5"
    yield box("5,6"), "5"
    yield box(r"5\text{ or }6"), "5"
    yield box("4 or 5"), "5"
    yield box(r"\{5\}\{6\}"), "5"
    yield box("5") + box("$$"), "5"
    yield box(r"6\boxed{5}"), "5"
    yield box("x=5,x=6"), "5"
    yield box(r"5\pm1"), "6"


def leaks() -> Iterator[tuple[str, str]]:
    """What checkers are known to pay: text cut short, bases and equal signs ignored, rounding, sets for tuples."""
    yield from (
        (box("41=42"), "42"), (box("42=42"), "42"), (box("0=0=42"), "42"), (box("52_5"), "52_8"), (box("52"), "52_8"),
        (box("1"), r"\{x|-2\leq x<1\}"), (box("a+"), "a+b+c"), (box(r"\sin^2"), r"\sin^2 t"), (box("b>"), "b > a > c"),
        (box(r"5+\mathrm{y}"), r"5+\mathrm{x}"), (box("5+"), r"5+\mathrm{x}"), (box("0.0000001"), "0.0000002"),
        (box("(1,2)"), r"\{1,2\}"), (box("0.5"), r"50\%"), (box("2"), r"\hbar\omega(v+1/2)"),
        (box("1/5"), r"\frac75+\frac15 i."),
        (box("cos"), r"\cos x"), (box("42"), "42_{16}"), (box("y'+ry"), r"y^{\prime}+ry-rx(t)=0"),
        (box("t"), r"t(0,4]"),
        (box(r"\frac{dx}{dt}=kx+a"), r"\frac{d x}{d t}=k x-a"), (box("0.333333"), "1/3"), (box("3.14159265"), r"\pi"),
        (box("123"), ""), ("no box", ""), (box(""), ""), (box("x"), "y"), (box("seat"), r"\text{east}"),
        (box("A"), "B"),
        (box("2"), r"2\text{ or }3"), (box("5"), r"5\mathrm{x}"), (box(r"5\text{ cm}^2"), r"5\text{ cm}^3"),
        (box("4.5"), r"4.5\times10^{33}"), (box("4.5e3"), "4.5*e*3"), (box("-5"), "|-5|"), (box("1 234"), "1234"),
        (box("2+3"), "5"), (box("x=2+3"), "x=5"), (box("(16-3-4)*2"), "18"), (box(r"\sqrt{25}"), "5"),
        (box("5!"), "120"), (box(r"\lfloor i^2+\frac{1}{2}\rfloor"), r"\frac{\sqrt2}{2}"),
    )  # fmt: skip


def half_answers() -> Iterator[tuple[str, str]]:
    """Nearly right."""
    for gold in ("(1,2,3)", r"\{1,2,3\}", "[1,2)", r"(1,2)\cup(3,4)", r"\begin{pmatrix}1\\2\end{pmatrix}", "x^2-2x+1"):
        yield box(gold[:-1]), gold
        yield box(gold.replace("1", "-1")), gold
        yield box(gold.replace("2", "2.000001")), gold


def symbolic() -> Iterator[tuple[str, str]]:
    """What only math-verify would look at."""
    for text in (
        *(r"\sum_{k=1}^{10^{9}} \sin k", r"\int_0^1 \sin(\sin(\sin(x^5)))e^{x^x}dx", r"\prod_{k=1}^{10^7} k", r"\sum"),
        *(r"\int" * 100, r"\sum_{k=1}^{3} 9^{9^{9^9}}", r"\lim_{x\to 0}" * 20, r"\int_0^1 __import__('os')", r"\sum 5"),
    ):
        yield box(text), "n^2+1"
