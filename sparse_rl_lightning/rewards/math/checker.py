"""Checking completions against gold answers, one or many at a time, and counting what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rewards.math.boxes import extract_boxed, is_within_limits
from sparse_rl_lightning.rewards.math.compare import Comparison, Pair, read_atom
from sparse_rl_lightning.rewards.math.lenient import LenientComparison, extract_answer
from sparse_rl_lightning.rewards.math.structure import Atom, parse_answer, without_braces
from sparse_rl_lightning.rewards.math.symbolic import SymbolicPool
from sparse_rl_lightning.rewards.math.text import plain_text, tidy

COUNTERS = ("checks", "no_box", "fallbacks", "unparsed", "timeouts", "crashes", "errors")
"""What a checker counts: completions, those without a box that counts, those that math-verify was asked about, and of
its answers those it did not understand, that took too long, and in which its process died; comparisons that raised."""

Convention: TypeAlias = Literal["strict", "lenient"]
"""What counts as the answer: what this package takes for the same, or also what graders of papers do."""
AnswerKind: TypeAlias = Literal["number", "expression", "parts", "text", "uncheckable"]
"""What a gold answer is to the checker."""
CONVENTIONS: tuple[Convention, ...] = ("strict", "lenient")

_FAILURES = {"unparsed": "unparsed", "timeout": "timeouts", "crash": "crashes"}


def known_convention(answers: str) -> Convention:
    """The convention of that name.

    Raises:
        ValueError: If there is none.
    """
    for convention in CONVENTIONS:
        if answers == convention:
            return convention
    raise UserError(f"answers must be one of {', '.join(CONVENTIONS)}, got answers={answers!r}.")


class MathChecker:
    r"""Compares the last ``\boxed{}`` of completions with bare gold answers; whatever goes wrong is a wrong answer.

    Numbers, expressions, lists, intervals and matrices are decided in this process, within milliseconds. Sums,
    integrals and limits go to math-verify, in processes that are started when they are first needed.

    Args:
        num_workers: Processes for math-verify.
        timeout: Seconds after which a comparison by math-verify is ended and counts as wrong.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, num_workers: int = 1, timeout: float = 3.0) -> None:
        self.pool = SymbolicPool(num_workers, timeout)
        self._counts: Counter[str] = Counter()

    def check(
        self, completions: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None = None
    ) -> list[bool]:
        """Whether each completion has its gold answer in its last box.

        Args:
            completions: B texts, hostile ones too.
            golds: B bare answers.
            tolerances: B relative tolerances of numbers, default none.
        """
        boxed = [extract_boxed(completion) for completion in completions]
        self._counts.update(checks=len(boxed), no_box=boxed.count(None))
        return self.same(["" if box is None else box for box in boxed], golds, tolerances)

    def check_both(
        self, completions: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None = None
    ) -> dict[Convention, list[bool]]:
        """Whether each completion has its gold answer, by either convention: lenient pays all that strict pays.

        Args:
            completions: B texts, hostile ones too.
            golds: B bare answers.
            tolerances: B relative tolerances of numbers, default none.
        """
        strict = self.check(completions, golds, tolerances)
        wrong = [place for place, is_right in enumerate(strict) if not is_right]
        lenient = list(strict)
        found = self._same(
            [extract_answer(completions[place]) or "" for place in wrong],
            [golds[place] for place in wrong],
            [tolerances[place] for place in wrong] if tolerances else None,
            LenientComparison,
        )
        for place, is_right in zip(wrong, found, strict=True):
            lenient[place] = is_right
        return {"strict": strict, "lenient": lenient}

    def check_by(
        self,
        answers: Convention,
        completions: Sequence[str],
        golds: Sequence[str],
        tolerances: Sequence[float] | None = None,
    ) -> list[bool]:
        """Whether each completion has its gold answer, by one convention; arguments as in :meth:`check`."""
        if answers == "strict":
            return self.check(completions, golds, tolerances)
        return self.check_both(completions, golds, tolerances)["lenient"]

    def same(
        self, answers: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None = None
    ) -> list[bool]:
        """Whether each bare answer is its gold answer; arguments as in :meth:`check`."""
        return self._same(answers, golds, tolerances, Comparison)

    def _same(
        self, answers: Sequence[str], golds: Sequence[str], tolerances: Sequence[float] | None, how: type[Comparison]
    ) -> list[bool]:
        triples = list(zip(answers, golds, tolerances or [0.0] * len(golds), strict=True))
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
        """What was counted since the last call, every name of ``COUNTERS``."""
        counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTERS}

    def close(self) -> None:
        """End the processes; they are started again when they are needed."""
        self.pool.close()

    def _compare(self, comparison: Comparison, answer: str, gold: str) -> bool | None:
        """As the comparison says; one that raises is a wrong answer and not the end of the batch."""
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
    r"""Whether the last balanced ``\boxed{}`` of a completion holds the gold answer.

    Args:
        completion: What the policy wrote; hostile text of any length is fine.
        gold: The bare answer, without a box. An empty gold matches nothing.
        answers: What counts, ``strict`` or ``lenient``.
    """
    return default_checker().check_by(answers, [completion], [gold])[0]


def same_answer(answer: str, gold: str) -> bool:
    """Whether two bare answers are the same, by the conventions of this package."""
    return default_checker().same([answer], [gold])[0]


@dataclass
class GoldAudit:
    """What was found: how many golds of each kind, and those that nothing can be compared with."""

    kinds: dict[AnswerKind, int] = field(default_factory=dict)
    uncheckable: list[int] = field(default_factory=list)  # their places


def audit_golds(golds: Sequence[str]) -> GoldAudit:
    """Look at every gold answer once.

    Args:
        golds: Bare answers.
    """
    audit = GoldAudit()
    for place, gold in enumerate(golds):
        kind = answer_kind(gold)
        audit.kinds[kind] = audit.kinds.get(kind, 0) + 1
        if kind == "uncheckable":
            audit.uncheckable.append(place)
    return audit


def answer_kind(gold: str) -> AnswerKind:
    r"""How an answer is compared: as a number, an expression, several parts, or letter by letter as text.

    Uncheckable is one that is empty, too long, nested too deep, or that does not come back out of a ``\boxed{}``.
    """
    boxed = extract_boxed(f"\\boxed{{{gold}}}")
    if not is_within_limits(gold) or not plain_text(without_braces(tidy(gold))) or boxed != gold.strip():
        return "uncheckable"
    answer = parse_answer(tidy(gold))
    if not isinstance(answer, Atom):
        return "parts"
    reading = read_atom(answer.text)
    if reading.number is not None:
        return "number"
    return "text" if reading.tree is None else "expression"
