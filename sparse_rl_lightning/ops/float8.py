"""Storage of keys and values in eight bits, float8_e4m3fn; everything is computed in another type.

A number has four bits of exponent and three of mantissa: 2^-9 to 448 and no infinity. Rounding to the nearest even
has an error of at most 1/16 of a number from 2^-6 on, and of at most 2^-10 below. There are no scales: a factor moves
the range of a floating type, not its precision, and keys and values of language models are well inside the range.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
COMPUTING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
