r"""What strict and lenient answers are worth in points of Pass@1, on outputs of models and on golds written otherwise.

Outputs are read as the evaluation of QwenLM/Qwen2.5-Math writes them, whose grader the papers use: folders named after
benchmarks with files of JSON lines, each with ``idx``, the row of the benchmark, ``code``, a list of one completion,
and ``score``, what that grader said of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.common.pages import insert, mark
from benchmarks.common.tables import Table
from exact_answers import CONVENTIONS, MathChecker, extract_answer
from exact_answers.exact_numbers import parse_number
from sparse_rl_lightning.data import MathBenchmarks
from sparse_rl_lightning.data.published import PUBLISHED

BEGIN = mark("benchmarks.checker")
Case = tuple[str, str, float]  # completion, gold answer, tolerance
KINDS = {  # of what lenient pays and strict does not, asked in this order
    "said, not boxed": lambda text, answer, gold: "\\boxed" not in text,
    "percent both ways": lambda text, answer, gold: "%" in answer or "%" in gold,
    "last side of a chain": lambda text, answer, gold: re.search(r"=|\\approx|≈", answer),
    "rounded decimal": lambda text, answer, gold: re.match(r"[+-]?[0-9,]*\.[0-9]{2}", answer),
    "arithmetic not done": lambda text, answer, gold: True,
}


def _whole(write: Callable[[int], str]) -> Callable[[str], str | None]:
    """A spelling of golds that are whole numbers from 1 to 999."""
    return lambda gold: write(int(gold)) if gold.isdigit() and 0 < int(gold) < 1000 else None


def _fraction(write: Callable[[Fraction], str]) -> Callable[[str], str | None]:
    r"""A spelling of golds that are fractions and not whole."""

    def spell(gold: str) -> str | None:
        number = parse_number(gold.replace("\\dfrac", "\\frac"))
        is_plain = number is not None and number.exponent == 0 and number.mantissa.denominator > 1
        return write(number.mantissa) if number is not None and is_plain else None

    return spell


SPELLINGS: dict[str, tuple[str, Callable[[str], str | None]]] = {  # a whole completion, by the kind it belongs to
    "said": ("The answer is 5.", lambda gold: f"So the answer is {gold}."),
    "percent": (r"`50\%` for 1/2", _fraction(lambda value: rf"\boxed{{{float(100 * value):.12g}\%}}")),
    "chain": ("`4+1=5`", _whole(lambda n: rf"\boxed{{{n - 1}+1={n}}}")),
    "rounded": ("`0.333` for 1/3", _fraction(lambda value: rf"\boxed{{{float(value):.3f}}}")),
    "sum": ("`4+1`", _whole(lambda n: rf"\boxed{{{n - 1}+1}}")),
    "binomial": (r"`\binom{5}{1}`", _whole(lambda n: rf"\boxed{{\binom{{{n}}}{{1}}}}")),
    "root": (r"`\sqrt{25}`", _whole(lambda n: rf"\boxed{{\sqrt{{{n * n}}}}}")),
    "formula": (r"`\( 5 \)`", lambda gold: rf"\boxed{{\( {gold} \)}}"),
}


def outputs(folder: Path, name: str, rows: list[dict[str, Any]]) -> Iterator[tuple[Case, bool]]:
    """Completions of a benchmark's rows, each with what the grader of Qwen2.5-Math said."""
    by_index = {row["index"]: row for row in rows}
    for file in sorted(folder.rglob("*.jsonl")):
        if name not in file.parts[len(folder.parts) :]:
            continue
        for line in file.read_text(encoding="utf-8").splitlines():
            written = json.loads(line)
            row = by_index.get(written["idx"])
            if row is not None:
                case = written["code"][0], str(row["answer"]), float(row.get("tolerance") or 0.0)
                yield case, bool(written["score"][0])


def kind_of(text: str, gold: str) -> str:
    """Which convention of the lenient answers pays a completion."""
    answer = extract_answer(text) or ""
    return next(writing for writing, belongs in KINDS.items() if belongs(text, answer, gold))


def on_outputs(data: MathBenchmarks, folder: Path, checker: MathChecker) -> tuple[Table, Table]:
    """Accuracies by benchmark, and what each convention is worth over all of them."""
    accuracies = Table(
        "Outputs", ["benchmark", "outputs", "Qwen2.5-Math's grader", "strict", "lenient", "worth, points"]
    )
    gained: Counter[str] = Counter()
    apart: Counter[str] = Counter()
    total = 0
    for name in PUBLISHED:
        checked = list(outputs(folder, name, data.rows(name)))
        if not checked:
            continue
        cases = [case for case, _ in checked]
        verdicts = checker.check_both(*map(list, zip(*cases, strict=True)))  # type: ignore[arg-type]  # columns of rows
        shares = [100 * sum(v) / len(checked) for v in ([s for _, s in checked], *(verdicts[a] for a in CONVENTIONS))]
        points = shares[2] - shares[1]
        accuracies.add(name, f"{len(checked):,}", *(f"{share:.2f}" for share in shares), f"{points:.2f}")
        for (case, theirs), strict, lenient in zip(checked, verdicts["strict"], verdicts["lenient"], strict=True):
            gained.update([kind_of(*case[:2])] if lenient and not strict else [])
            apart.update(theirs=theirs and not lenient, ours=lenient and not theirs)
            apart.update(no_box=theirs and not lenient and "\\boxed" not in case[0])
        total += len(checked)
    accuracies.note = (
        f"Qwen2.5-Math's grader pays {apart['theirs']} outputs that lenient does not, {apart['no_box']} of them "
        f"without a box, where it takes the last number of the text; lenient pays {apart['ours']} the other way round."
    )
    worth = Table("Conventions", ["convention", "outputs it pays", "points of all"])
    for writing in KINDS:
        worth.add(writing, str(gained[writing]), f"{100 * gained[writing] / max(1, total):.3f}")
    return accuracies, worth


def on_golds(data: MathBenchmarks, checker: MathChecker) -> Table:
    """What a policy would lose that is always right and always writes so."""
    table = Table(
        "Golds", ["written as", "golds it fits", "strict pays, %", "lenient pays, %", "worth at most, points"]
    )
    golds = [str(row["answer"]) for name in PUBLISHED for row in data.rows(name)]
    for example, spell in SPELLINGS.values():
        tried = [(text, gold) for gold in golds if (text := spell(gold)) is not None]
        verdicts = checker.check_both([text for text, _ in tried], [gold for _, gold in tried])
        strict, lenient = (sum(verdicts[answers]) for answers in CONVENTIONS)
        shares = (f"{100 * right / len(tried):.1f}" for right in (strict, lenient))
        table.add(example, f"{len(tried):,}", *shares, f"{100 * (lenient - strict) / len(golds):.1f}")
    return table


def conventions(data: str, folder: Path, page: Path | None) -> str:
    """The tables, written into a page between its markers where there is one."""
    checker, benchmarks = MathChecker(timeout=10.0), MathBenchmarks(data)
    parts = (*on_outputs(benchmarks, folder, checker), on_golds(benchmarks, checker))
    text = "\n\n".join(table.untitled for table in parts)
    if page is not None:
        insert(page, text, BEGIN)
    return text
