"""What the checker can make of gold answers, found out before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sparse_rl_lightning.rewards.math.boxes import extract_boxed, is_within_limits
from sparse_rl_lightning.rewards.math.compare import read_atom
from sparse_rl_lightning.rewards.math.structure import Atom, parse_answer, without_braces
from sparse_rl_lightning.rewards.math.text import plain_text, tidy

AnswerKind: TypeAlias = Literal["number", "expression", "parts", "text", "uncheckable"]


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
