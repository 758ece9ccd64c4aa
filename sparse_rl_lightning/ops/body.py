"""What a layer does to hidden states beside products and attention.

rms_norm: the residual sum and the norm behind it, in one reading. silu_mul: the activation of a gated feed-forward
block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def reference_norm(hidden: Tensor, addend: Tensor | None, norm_weight: Tensor, epsilon: float, normed: Tensor) -> None:
    """The op ``rms_norm`` in PyTorch."""
    if epsilon < 0:
        raise UserError(f"epsilon is {epsilon}, expected 0 or more.")
    if addend is not None:
        hidden += addend
    normed.copy_(normalize(hidden, norm_weight, epsilon))


register("rms_norm", reference_norm)


def silu_mul(gate_and_up: Tensor) -> Tensor:
    """Multiply SiLU(x) = x / (1 + exp(-x)) of the first half of each row with the second half.

    Args:
        gate_and_up: Rows (B, 2 F): what goes through SiLU, then its factors.

    Returns:
        The products (B, F); SiLU is rounded to their type before.

    Raises:
        ValueError: If the number of columns is odd, or the tensor is not contiguous.
    """
    rows, columns = gate_and_up.shape
    if columns % 2:
        raise UserError(f"gate_and_up has {columns} columns, expected an even number.")
    gated = gate_and_up.new_empty(rows, columns // 2)
    call("silu_mul", gated, gate_and_up, gated)
    return gated


def reference_silu_mul(gate_and_up: Tensor, gated: Tensor) -> None:
    """The op ``silu_mul`` in PyTorch."""
    if gate_and_up.shape[1] != 2 * gated.shape[1]:
        raise UserError(f"gate_and_up has {gate_and_up.shape[1]} columns, expected {2 * gated.shape[1]}.")
    gate, up = gate_and_up.chunk(2, dim=-1)
    gated.copy_(F.silu(gate) * up)


register("silu_mul", reference_silu_mul)
