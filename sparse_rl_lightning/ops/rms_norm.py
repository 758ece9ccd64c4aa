"""rms_norm: the residual sum and the norm behind it, in one reading of the hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import accumulation_dtype


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    epsilon: float,
    addend: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Divide each row by the root of its mean square, after adding to it in place.

    Numbers are rounded where transformers rounds: sum, quotient and product with the weight to the type of ``hidden``.

    Args:
        hidden: Hidden states (B, E); with an addend they become the sum.
        weight: Factors (E) of the result, float32 (float64 with float64 hidden states).
        epsilon: Number added to the mean square, at least 0.
        addend: Output (B, E) of the last block, in ``dtype``.
        dtype: Type of the result, by default that of ``hidden``; another one only with float32 hidden states.

    Returns:
        The normalized rows (B, E).

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout, or ``dtype`` does not fit.
    """
    dtype = hidden.dtype if dtype is None else dtype
    if dtype != hidden.dtype != torch.float32:
        raise UserError(f"dtype is {dtype} and hidden is {hidden.dtype}: give float32 hidden states, or the same type.")
    normed = torch.empty_like(hidden, dtype=dtype)
    call("rms_norm", hidden, hidden, addend, weight, epsilon, normed)
    return normed


def normalize(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square norm over the last dimension, computed in float32 (float64 for float64) and rounded twice."""
    wide = x.to(accumulation_dtype(x.dtype))
    factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return ((wide * factor).to(x.dtype).to(wide.dtype) * weight).to(x.dtype)


def reference(hidden: Tensor, addend: Tensor | None, norm_weight: Tensor, epsilon: float, normed: Tensor) -> None:
    """The op ``rms_norm`` in PyTorch."""
    if epsilon < 0:
        raise UserError(f"epsilon is {epsilon}, expected 0 or more.")
    if addend is not None:
        hidden += addend
    normed.copy_(normalize(hidden, norm_weight, epsilon))


register("rms_norm", reference)
