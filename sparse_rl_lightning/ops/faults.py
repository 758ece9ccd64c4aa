"""What CUDA kernels could not do, as they write it into one word: they neither raise nor wait.

CPU kernels and references raise where they stand. A CUDA kernel leaves out what cannot be done, writes a word that
nobody has written yet, and the rollout looks at it when it looks at the device (``cuda_ext/include/heads.h``).
"""

from __future__ import annotations

from sparse_rl_lightning.ops.schemas import SCHEMAS

OPS = tuple(SCHEMAS)  # numbers of the ops begin at 1, in this order
FAULTS = (  # those of the faults too
    "there is no such slot",
    "a head of the slot lies outside the pool, or holds more entries than its room or the call allows",
    "the slot is full: compress it before the next token",
    "a budget is negative or exceeds the slot's capacity",
    "a position is negative, or outside the death record",
    "a number of pages or a page of a list is out of range",
)


def fault(word: int) -> str:
    """A sentence that names op, slot and what was wrong.

    Args:
        word: Op in the lowest four bits, fault in the next four, then the slot.
    """
    op, kind, slot = OPS[(word & 15) - 1], FAULTS[(word >> 4 & 15) - 1], word >> 8
    return (
        f"{op} left out slot {slot}: {kind}. What was drawn since the last look is worthless; this is an error in what "
        "the op was given, not in the model."
    )


def word_of(op: str, kind: int, slot: int) -> int:
    """The word that a kernel writes for the fault FAULTS[kind - 1] of an op."""
    return OPS.index(op) + 1 | kind << 4 | slot << 8
