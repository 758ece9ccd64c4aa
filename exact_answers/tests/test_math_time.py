"""No answer of 512 characters keeps the trainer waiting: the worst cases of every pattern the checker looks with."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator

import pytest

from exact_answers import MAX_BOX, answer_kind, same_answer, units, verify
from exact_answers.compare import Comparison

SECONDS = 0.5  # of the processor; most take a millisecond

PIECES = {  # one or more for each pattern: what it repeats, so that it may be read in many ways
    "units": ("percent", "percents", "perpercent", "percentinch", "percentimeter", "/sq.cm^2", "meters", "secseconds"),
    "text units": (r"\text{m}", r"\text{m}^2", r"/\text{m/s}", r"\text{", r"\text{m m}", r"\text", r"\text{a"),
    "words": ("a", "aB", "Ab", "word ", "and ", " or ", r"\text{or}", ", and "),
    "names": ("A", r"\angle ABC", "x_{", "x_1", "f(x,", r"\overline{AB}", "P(", "(x,y", "x,", "x^{-1}", r"\abc"),
    "digits": ("1", "1,", "1,234", "1.", "1e", r"1\,", r"1\!", r"1\,234", r"1,\,234", "1 ", "10^{", r"\frac{1}{", "1/"),
    "marks": (r"\%", "$", "°", r"^\circ", r"^{\circ", r"^\circ C", "'", "''", r"^{\prime", r"\left", r"\left("),
    "fractions": (r"\frac", r"\frac1", r"\frac{1}", r"a\over", r"{a\over", r"{a\over b}", r"\choose", r"\sqrt 1"),
    "matrices": (r"\begin{matrix}", r"\begin{array}{c", r"\end{matrix}", r"\begin{pmatrix}1\\", "&"),
    "boxes": (r"\boxed", r"\boxed{", r"\boxed{}", r"\boxed ", "{}", "}{"),
    "tokens": (r"\frac{d}{d", r"\partial", "|", "!", "_", "^", "-", "+", "<", "=", r"\in ", r"\cup ", r"\pm", "np."),
    "lists": ("70 000", " 000", "000 ", "1, 000", "$ , ", "1$,$", "70,110", r"\text{ and }"),
    "doubled": (r"\\frac{1}{2}", r"\\(", r"\\[", r"\\[2pt]", "\\\\\n", "\\\n", r"\cr", r"\\boxed{", r"\(", r"\]"),
    "conditions": (r"\text{ for all }", r"\text{ for all real n}", r"\text{for all", "n,", r"n\ge2"),
    "segments": (r"\frac{AB}{CD}", "AB/", "AB:", r"\overline{AB}^2", "[ABC]", r"\mathbb E[k]", r"\mathbb{E}(", "AB="),
    "products": ("2^6 ", "2^{6}3", "1!2", r"(-2)^k", r"(-x)^{n}", r"\binom{9999}{4999}", r"\sqrt{2}+2^{-900}"),
    "announced": (r"\text{The answer is }\boxed{", "the final answer is ", "answer: ", r"\text{So the answer}"),
    "said": ("the ", "is ", r"\text{the }", r"n\text{ is }", "answer: ", "=", r"\max(a)", r"\angle ABCD", r"\abc x"),
    "code": ("sqrt(", "sqrt()", "^(", "x^(1)", "**", "x**2", "**-", "np.sqrt(", "binom(1,", "pi", "sin ", "inf", ")"),
    "around": ("*", "**", "__", "_", "`", "```", '"', "'", "“", "”", "``", "**a** ", "__5__,", r"\text{**a**}"),
    "displays": (r"\begin{align}", r"\end{align}", r"\begin{align}x&=1\\", "&=", "& ", r"\begin{cases}1\end{cases}"),
    "scripts": ("v^2_0", "v^{2}_", "v^{{", "a'_1", "a'", r"x^{a}_{\text{b}}", r"30^\circ\sin", "30°", r"\sin 1^\circ"),
    "nouns": ("5 apples ", "5 apples, ", " a", "5 km/h", " per hour", "5 sq. ", " of", "a/a", "5 a. a. "),
    "periods": ("0.", r"\overline{1", r"\dot{1}", r"0.\overline{", "1am", "a.m"),
}  # fmt: skip
STARTS = ("", "5", r"\text{", "(")
ENDS = ("", "x", "1", "}", "{", "!")


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """A collection looks at everything that all tests of this process have imported, and is not the checker's time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def worst_cases() -> Iterator[str]:
    for pieces in PIECES.values():
        for start, piece, end in itertools.product(STARTS, pieces, ENDS):
            yield start + piece * ((MAX_BOX - len(start) - len(end)) // len(piece)) + end


def test_seventy_percent_signs() -> None:
    start = time.process_time()
    assert not verify(rf"\boxed{{5{'percent' * 70}x}}", "5")
    assert time.process_time() - start < SECONDS


def test_other_capitals_take_no_time() -> None:
    """The gold answer is a text of many letters that is no word, and the answer differs in one capital."""
    gold = "nosolutionforallpositiverealnumbersx" * 10
    start = time.process_time()
    assert not same_answer(f"N{gold[1:]}!2", f"{gold}!2")
    assert time.process_time() - start < SECONDS


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PIECES)
def test_no_repetition_takes_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PIECES", {name: PIECES[name]})
    slow = []
    for text in worst_cases():
        start = time.process_time()
        Comparison().same(text, "5")
        Comparison().same(text, text.swapcase())
        answer_kind(text)
        if time.process_time() - start > SECONDS:
            slow.append((text[:30], time.process_time() - start))
    assert slow == []


def test_units_can_be_read_in_one_way_only() -> None:
    """Sardinas and Patterson: no text is two sequences of units, so that no repetition has 2^n readings."""
    words = [*units._SHORT, "mm", "cm", "dm", "km", "kg", "mg", "mph", "ml", "mL", "ft"]
    parts = itertools.product(("", "per", "/"), ("", "square", "cubic", "sq", "sq."), words)
    pieces = {unit for unit in map("".join, parts) if units.split_unit(f"5{unit}")[1]}
    assert len(pieces) > 1000
    rests, seen = left_over(pieces, pieces), set[str]()
    while not rests <= seen:
        assert rests.isdisjoint(pieces)
        seen |= rests
        rests = left_over(rests, pieces) | left_over(pieces, rests)


def left_over(longer: set[str], shorter: set[str]) -> set[str]:
    """What is left of texts behind other texts that they begin with."""
    starts = tuple(shorter)
    found = (text for text in longer if text.startswith(starts))
    return {text[len(start) :] for text in found for start in starts if text.startswith(start) and text != start}
