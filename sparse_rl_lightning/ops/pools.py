"""KVPools: keys, values and positions of many heads in flat memory, the place of each head, and their types.

Keys and values may be stored in eight bits, float8_e4m3fn; everything is computed in another type. Such a number has
four bits of exponent and three of mantissa: 2^-9 to 448 and no infinity. Rounding to the nearest even has an error of
at most 1/16 of a number from 2^-6 on, and of at most 2^-10 below. There are no scales: a factor moves the range of a
floating type, not its precision, and keys and values of language models are well inside the range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sparse_rl_lightning.ops.schemas import SCHEMAS

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
COMPUTING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EVENT_TYPES = (torch.uint8, torch.int16, torch.int32)
"""Types of the log of deaths, narrow ones first; the largest number of each says never."""
MOST_EVENTS = tuple(torch.iinfo(dtype).max for dtype in EVENT_TYPES)
"""The most events that each can number."""
OPS = tuple(SCHEMAS)  # that a fault names; their numbers begin at 1, in this order
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


@dataclass(frozen=True)
class KVPools:
    """The memory that the ops work on, for one layer (S, H) or all layers (L, S, H); see ``ops/schemas.py``.

    A layer's pools are views of the whole: the same rows, other offsets.
    """

    keys: Tensor  # (R, D)
    values: Tensor  # (R, D)
    positions: Tensor  # (R) int32
    offsets: Tensor  # (L, S, H) or (S, H) int64, first row of each head
    capacities: Tensor  # the same shape, int32, rows of each head
    lengths: Tensor  # the same shape, int32, live entries
    errors: Tensor | None = None  # (1) int32, where CUDA kernels report errors

    @classmethod
    def ragged(cls, capacities: Tensor, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Empty pools, heads one after the other in the order of capacities (L, S, H) or (S, H), int32 on the CPU."""
        ends = capacities.flatten().cumsum(0)
        keys = torch.zeros(int(capacities.sum()), head_dim, dtype=dtype, device=device)
        offsets = (ends - capacities.flatten()).view(capacities.shape).to(device)
        return cls(
            keys=keys,
            values=torch.zeros_like(keys),
            positions=torch.zeros(len(keys), dtype=torch.int32, device=device),
            offsets=offsets,
            capacities=capacities.to(device),
            lengths=torch.zeros(capacities.shape, dtype=torch.int32, device=device),
            errors=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def layer(self, index: int | slice) -> Self:
        """One layer of (L, S, H) pools, or several as a slice."""
        return replace(
            self, offsets=self.offsets[index], capacities=self.capacities[index], lengths=self.lengths[index]
        )

    def raise_errors(self, word: int | None = None) -> None:
        """Raise the error that CUDA kernels have reported since the last time.

        ``word`` is the content of ``errors``; without it, it is read, which waits for the device.
        """
        if self.errors is not None and (word := int(self.errors) if word is None else word):
            self.errors.zero_()
            raise RuntimeError(fault(word))


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to the type of a pool; float8 saturates at +-448, and keeps NaN.

    Some versions of torch turn larger numbers into NaN instead.
    """
    if dtype != FLOAT8 or x.dtype == FLOAT8:
        return x.to(dtype)
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


def to_computed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor from a pool to a type that torch computes in: float8 exactly to ``dtype``, others unchanged."""
    return x.to(dtype) if x.dtype == FLOAT8 else x


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over elements of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather_heads(offsets: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The pool rows (..., N) of the first ``width`` entries of each head, and which are live, for the references.

    Free entries repeat the head's first row, so that free memory is never read.
    """
    live = live_entries(lengths, width)
    return offsets.unsqueeze(-1) + torch.where(live, torch.arange(width, device=offsets.device), 0), live


def live_entries(lengths: Tensor, width: int) -> Tensor:
    """The live ones among the first ``width`` entries of each head (...): (..., width) bool."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def fault(word: int) -> str:
    """Describe in one sentence the fault of a CUDA kernel: the op in the lowest four bits, the fault in the next four.

    The slot is in the bits above. CUDA kernels neither raise nor wait: one skips what cannot be done and writes the
    word, unless there is one, and the rollout reads it whenever it reads from the device. All others raise at once.
    """
    op, problem, slot = OPS[(word & 15) - 1], FAULTS[(word >> 4 & 15) - 1], word >> 8
    return (
        f"{op} left out slot {slot}: {problem}. What was drawn since the last look is worthless; this is an error in "
        "what the op was given, not in the model."
    )
