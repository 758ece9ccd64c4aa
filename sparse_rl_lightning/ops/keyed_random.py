"""Random numbers as a pure function of integer keys: the same in any batch, slot, order and on any device.

A key tuple goes through SplitMix64 (Steele, Lea, Flood 2014): each key picks one output of the stream seeded by the
keys before it. Only integer arithmetic modulo 2**64 is used, which is the same on every device, and there is no
state, so a rollout can be resumed, regrouped or refilled without changing a single number.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants, as int64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


VARIABLE = "PL_GLOBAL_SEED"
"""Where Lightning's ``seed_everything`` keeps the seed of the process, for the processes it starts too."""


def seed_of(seed: int | None) -> int:
    """The seed itself, or that of the process if it is None; 0 where ``seed_everything`` was never called.

    Raises:
        ValueError: If the process's seed is no number.
    """
    if seed is not None:
        return seed
    text = os.environ.get(VARIABLE) or "0"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{VARIABLE} must be a whole number, the seed of the process, got {VARIABLE}={text}.") from None


def hash_bits(*keys: Tensor | int) -> Tensor:
    """Compute 64 random bits per tuple of keys: int64 over its whole range.

    Keys are plain integers, or integer tensors that broadcast together. Put the largest tensor last: the keys
    before it are mixed at their smaller shape.
    """
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        state = _finalize(state + (torch.as_tensor(key, dtype=torch.int64) + 1) * _GAMMA)
    return state


def hash_uniform(*keys: Tensor | int) -> Tensor:
    """Compute a uniform float32 in (0, 1) per key tuple, never exactly 0 or 1.

    47 random bits are rounded to the nearest float32, so numbers near 0 keep their full relative precision (down to
    2**-48) while those near 1 are 2**-24 apart. Rare events must therefore depend on small numbers: draw an exponential
    as ``-log1p(-u)``, not as ``-log(u)``.
    """
    bits = hash_bits(*keys)
    high = _logical_shift(bits, 40).to(torch.float32)  # 24 bits
    low = (bits >> 17).bitwise_and_(2**23 - 1).to(torch.float32)
    # every term is exact in float32; the one rounding is in the sum, so all devices agree
    return high.mul_(2.0**-24).add_(low.add_(0.5).mul_(2.0**-47)).clamp_(max=1 - 2.0**-24)


def _finalize(z: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    z ^= _logical_shift(z, 30)
    z *= _MULTIPLIERS[0]
    z ^= _logical_shift(z, 27)
    z *= _MULTIPLIERS[1]
    return z.bitwise_xor_(_logical_shift(z, 31))


def _logical_shift(z: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; int64's own shift repeats the sign."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)
