"""Faults of CUDA kernels, which neither raise nor wait, as one word in memory.

CPU kernels and references raise at once. A CUDA kernel skips what cannot be done and writes the word, unless
there is one; the rollout reads it whenever it reads from the device (``cuda_ext/include/heads.h``).
"""

from __future__ import annotations

from sparse_rl_lightning.ops.schemas import SCHEMAS

OPS = tuple(SCHEMAS)  # numbers of the ops begin at 1, in this order
FAULTS = (  # numbers of the faults begin at 1 too
    "there is no such slot",
    "a head of the slot lies outside the pool, or holds more entries than its room or the call allows",
    "the slot is full: compress it before the next token",
    "a budget is negative or exceeds the slot's capacity",
    "a position is negative, or outside the death record",
    "a number of pages or a page of a list is out of range",
    "a score is NaN: look for NaN in the model's weights",
    "no number is left for another event of the slot",
)


def fault(word: int) -> str:
    """Describe in one sentence the fault coded in ``word``: the op in its lowest four bits, the fault in the next four.

    The slot is in the bits above.
    """
    op, kind, slot = OPS[(word & 15) - 1], FAULTS[(word >> 4 & 15) - 1], word >> 8
    return (
        f"{op} left out slot {slot}: {kind}. What was drawn since the last look is worthless; this is an error in what "
        "the op was given, not in the model."
    )
