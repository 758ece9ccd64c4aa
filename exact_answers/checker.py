"""Comparison of completions with gold answers, one or many at a time, with counts of what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from exact_answers.boxes import extract_boxed, gold_answer, is_tagged, is_within_limits
from exact_answers.compare import Comparison, Pair, read_atom
from exact_answers.lenient import LenientComparison, extract_answer
from exact_answers.structure import Atom, parse_answer, without_braces
from exact_answers.symbolic.pool import SymbolicPool
from exact_answers.text import plain_text, tidy

COUNTERS = ("checks", "no_box", "fallbacks", "unparsed", "timeouts", "crashes", "errors")
"""The counts of a checker: completions, completions without a valid box, comparisons that needed math-verify, of
these the unparsed, the timed out and those in which its process died; and comparisons that raised."""

Convention: TypeAlias = Literal["strict", "lenient"]
"""What counts as the answer: what this package considers the same, or also what graders of papers pay."""
AnswerKind: TypeAlias = Literal["number", "expression", "parts", "text", "uncheckable"]
"""The kind of a gold answer, which decides how it is compared."""
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)

_FAILURES = {"unparsed": "unparsed", "timeout": "timeouts", "crash": "crashes"}


class MathChecker:
    r"""Compares the last ``\boxed{}`` of completions with gold answers; any failure counts as a wrong answer.

    Numbers, expressions, lists, intervals and matrices are compared in this process, within milliseconds. Sums,
    integrals and limits go to math-verify, in processes that start on first use.

    Args:
        num_workers: Number of processes for math-verify.
        timeout: Seconds after which a comparison by math-verify is stopped and counts as wrong.
        boxes_in_thoughts: Whether a box in ``<think>`` counts too.
    """

    def __init__(self, num_workers: int = 1, timeout: float = 3.0, boxes_in_thoughts: bool = False) -> None:
        self.pool = SymbolicPool(num_workers, timeout)
        self.boxes_in_thoughts = boxes_in_thoughts
        self._counts: Counter[str] = Counter()

    def check(
        self, completions: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None = None
    ) -> list[bool]:
        """Whether each completion, hostile ones too, has its bare gold answer in its last box.

        Tolerances are relative ones of numbers, default none.
        """
        boxed = [extract_boxed(completion, self.boxes_in_thoughts) for completion in completions]
        self._counts.update(checks=len(boxed), no_box=boxed.count(None))
        return self.same(["" if box is None else box for box in boxed], golds, tolerances)

    def check_both(
        self, completions: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None = None
    ) -> dict[Convention, list[bool]]:
        """Whether each completion has its gold answer, by both conventions; lenient pays all that strict pays."""
        strict = self.check(completions, golds, tolerances)
        wrong = [place for place, is_right in enumerate(strict) if not is_right]
        answers = [extract_answer(completions[place], self.boxes_in_thoughts) or "" for place in wrong]
        allowed = [tolerances[place] for place in wrong] if tolerances else None
        paid = self._same(answers, [golds[place] for place in wrong], allowed, LenientComparison)
        right = dict(zip(wrong, paid, strict=True))
        return {"strict": strict, "lenient": [right.get(place, True) for place in range(len(strict))]}

    def check_by(
        self,
        answers: Convention,
        completions: Sequence[str],
        golds: Sequence[str],
        tolerances: Sequence[float] | None = None,
    ) -> list[bool]:
        """Whether each completion has its gold answer, by one convention."""
        if answers == "strict":
            return self.check(completions, golds, tolerances)
        return self.check_both(completions, golds, tolerances)["lenient"]

    def same(
        self, answers: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None = None
    ) -> list[bool]:
        """Whether each bare answer is its gold answer."""
        return self._same(answers, golds, tolerances, Comparison)

    def _same(
        self, answers: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None, how: type[Comparison]
    ) -> list[bool]:
        triples = list(zip(answers, map(gold_answer, golds), tolerances or [0.0] * len(golds), strict=True))
        comparisons = [how(tolerance) for _, _, tolerance in triples]
        verdicts = [self._compare(c, answer, gold) for c, (answer, gold, _) in zip(comparisons, triples, strict=True)]
        open_cases = [index for index, verdict in enumerate(verdicts) if verdict is None]
        known = self._ask([pair for index in open_cases for pair in comparisons[index].missing])
        for index in open_cases:
            answer, gold, tolerance = triples[index]
            verdicts[index] = self._compare(how(tolerance, known), answer, gold)
        self._counts.update(fallbacks=len(open_cases))
        return [verdict is True for verdict in verdicts]

    def take_counters(self) -> dict[str, int]:
        """The counts since the last call, for every name of ``COUNTERS``."""
        counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTERS}

    def close(self) -> None:
        """End the processes; they start again on the next use."""
        self.pool.close()

    def _compare(self, comparison: Comparison, answer: str, gold: str) -> bool | None:
        """The verdict of the comparison; one that raises is a wrong answer and does not end the batch."""
        try:
            return comparison.same(answer, gold)
        except (RecursionError, TypeError, ArithmeticError, ValueError):
            self._counts["errors"] += 1
            return False

    def _ask(self, pairs: Sequence[Pair]) -> dict[Pair, bool]:
        unique = list(dict.fromkeys(pairs))
        outcomes = self.pool.compare(unique) if unique else []
        self._counts.update(_FAILURES[outcome] for outcome in outcomes if outcome in _FAILURES)
        return {pair: outcome == "same" for pair, outcome in zip(unique, outcomes, strict=True)}


@lru_cache(maxsize=1)
def default_checker() -> MathChecker:
    """The checker of :func:`verify` and :func:`same_answer`, one per process."""
    return MathChecker()


def verify(completion: str, gold: str, answers: Convention = "strict") -> bool:
    r"""Whether the last balanced ``\boxed{}`` of a completion, outside of its thoughts, is the gold answer.

    Args:
        completion: Text of the policy; hostile text of any length is fine.
        gold: Answer, or a text with one (``gold_answer``). An empty gold matches nothing.
        answers: Convention, ``strict`` or ``lenient``.
    """
    return default_checker().check_by(answers, [completion], [gold])[0]


def same_answer(answer: str, gold: str) -> bool:
    """Whether two bare answers are the same, by the conventions of this package."""
    return default_checker().same([answer], [gold])[0]


@dataclass
class GoldAudit:
    """The number of golds of each kind, and the golds that nothing can be compared with."""

    kinds: dict[AnswerKind, int]
    uncheckable: list[int]  # their indices


def audit_golds(golds: Sequence[str]) -> GoldAudit:
    """Classify every gold answer."""
    kinds = [answer_kind(gold) for gold in golds]
    return GoldAudit(dict(Counter(kinds)), [place for place, kind in enumerate(kinds) if kind == "uncheckable"])


def answer_kind(gold: str) -> AnswerKind:
    r"""How an answer is compared: as a number, an expression, several parts, or character by character as text.

    It is the bare one that ``gold_answer`` finds. It is uncheckable if it is empty, too long,
    nested too deeply, has tags around it, or is changed by a ``\boxed{}`` around it.
    """
    gold = gold_answer(gold)
    boxed = extract_boxed(f"\\boxed{{{gold}}}")
    is_bare = boxed == gold.strip() and not is_tagged(gold)
    if not is_within_limits(gold) or not plain_text(without_braces(tidy(gold))) or not is_bare:
        return "uncheckable"
    answer = parse_answer(tidy(gold))
    if not isinstance(answer, Atom):
        return "parts"
    reading = read_atom(answer.text)
    if reading.number is not None:
        return "number"
    return "text" if reading.tree is None else "expression"
