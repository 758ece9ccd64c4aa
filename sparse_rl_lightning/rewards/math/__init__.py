"""The answer checker, the package ``exact_answers``, as the library's own parts and configurations know it."""

import exact_answers
from exact_answers import (
    CONVENTIONS,
    MAX_BOX,
    MAX_NESTING,
    TAIL,
    AnswerKind,
    Convention,
    GoldAudit,
    answer_kind,
    audit_golds,
    extract_answer,
    extract_boxed,
    find_last_box,
    normalize_answer,
    same_answer,
    verify,
)
from sparse_rl_lightning.errors import UserError, check_number

__all__ = [
    "CONVENTIONS",
    "MAX_BOX",
    "MAX_NESTING",
    "TAIL",
    "AnswerKind",
    "Convention",
    "GoldAudit",
    "MathChecker",
    "answer_kind",
    "audit_golds",
    "extract_answer",
    "extract_boxed",
    "find_last_box",
    "normalize_answer",
    "same_answer",
    "tolerance_of",
    "verify",
]


def tolerance_of(value: object) -> float:
    """A row's tolerance, which is text in some files, as a number; 0 without one, which files write as NaN or blanks.

    Raises:
        ValueError: If it is none, or below 0.
    """
    text = str(value).strip()
    try:
        tolerance = 0.0 if text in ("None", "nan", "") else float(text)
    except ValueError:
        raise UserError(f"tolerance must be a number of at least 0, got {value!r:.80}.") from None
    check_number("tolerance", tolerance, least=0)
    return tolerance


class MathChecker(exact_answers.MathChecker):
    """:class:`exact_answers.MathChecker`, whose refusals the command line shows as a line."""

    def __init__(self, num_workers: int = 1, timeout: float = 3.0, boxes_in_thoughts: bool = False) -> None:
        try:
            super().__init__(num_workers, timeout, boxes_in_thoughts)
        except ValueError as error:
            raise UserError(str(error)) from None
        check_number("timeout", timeout, above=0)
