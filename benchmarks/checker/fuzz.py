"""Coverage-guided fuzzing of the answer checker's extractor, normalizer and reader, for a bounded time.

    pip install "sparse-rl-lightning[fuzz]"
    python -m benchmarks.checker.fuzz [--seconds 120] [--corpus FOLDER]

Texts are what a fuzzer makes of bytes: half of them read as UTF-8, lone surrogates included, half as indices into the
words of LaTeX. Every text is searched for a box, normalized, read, and compared with a second one and with itself. It
ends with an error at the first text on which a function raises, takes more than a second of processor time, or does not
find a text equal to itself. math-verify is never asked.
``exact_answers/tests/test_math_fuzz.py`` asks for the same of random texts without instrumentation.
"""

from __future__ import annotations

import argparse
import sys
import time

import atheris

with atheris.instrument_imports(include=["sparse_rl_lightning.rewards"]):
    from exact_answers import MAX_BOX, answer_kind, extract_boxed
    from exact_answers.boxes import is_within_limits
    from exact_answers.compare import Comparison
    from exact_answers.structure import without_braces
    from exact_answers.text import plain_text, tidy

SECONDS_PER_INPUT = 1.0
WORDS = (
    r"\frac \sqrt \boxed{ \text{ \mathrm{ \left \right \begin{pmatrix} \end{pmatrix} \pi \sin \ln \log_ \binom \lfloor "
    r"\rfloor \cup \in \pm \leq < > = \infty \sum \int \lim \to \\ \{ \} { } ( ) [ ] | ^ _ + - * / ! , . ; : & ' $ % 0 "
    r"1 2 10 3.5 1,234 x y e i f cm or and \overline{ \over \choose \, \! \; ~ ^\circ C \circ \prime \langle \rangle "
    r"percent per cents meters second square \text{m} "
    r"sqrt( ^( ** pi sin `` '' \" ` _0 \begin{align} \end{align} apples km/h x_1= ,y= a+b= \text{Area} \triangle \max "
    r"\mathbb{R} \mid \angle AB P( \times10^{3} 1e5 \dot{x} ² × √ \exp \arcsin ^{-1} \% \text{} \$"
).split()


def text_of(data: bytes) -> str:
    """A text for some bytes."""
    if data[:1] < b"\x80":
        return data[1:].decode("utf-8", "surrogateescape")
    return "".join(WORDS[byte] if byte < len(WORDS) else " " for byte in data[1:400])


def check(data: bytes) -> None:
    """Everything that must hold of two texts."""
    half = len(data) // 2
    first, second = text_of(data[:half]), text_of(data[half:])
    start = time.process_time()
    boxed = extract_boxed(first)
    assert boxed is None or (boxed in first and 0 < len(boxed) <= MAX_BOX)
    answer_kind(first)
    verdict, swapped = Comparison().same(first, second), Comparison().same(second, first)
    assert verdict == swapped or needs_calculation(first, second), (first, second)
    same = Comparison().same(first, first)
    assert same in (None, is_within_limits(first) and plain_text(without_braces(tidy(first))) != ""), first
    assert time.process_time() - start < SECONDS_PER_INPUT, ("slow", first, second)


def needs_calculation(first: str, second: str) -> bool:
    """Whether one of them is a number, which must be given as one: a calculation is paid by its value, not it by it."""
    return "number" in (answer_kind(first), answer_kind(second)) or "parts" in (answer_kind(first), answer_kind(second))


def main() -> None:
    """Fuzz, and say how many texts were tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120, help="how long")
    parser.add_argument("--corpus", help="folder of texts to begin with, to which new ones are added")
    arguments = parser.parse_args()
    options = [f"-max_total_time={arguments.seconds}", "-max_len=400", "-timeout=20", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, *([arguments.corpus] if arguments.corpus else [])], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
