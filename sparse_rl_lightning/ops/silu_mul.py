"""silu_mul: the activation of a gated feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.library import call, register


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


def reference(gate_and_up: Tensor, gated: Tensor) -> None:
    """The op ``silu_mul`` in PyTorch."""
    if gate_and_up.shape[1] != 2 * gated.shape[1]:
        raise UserError(f"gate_and_up has {gate_and_up.shape[1]} columns, expected {2 * gated.shape[1]}.")
    gate, up = gate_and_up.chunk(2, dim=-1)
    gated.copy_(F.silu(gate) * up)


register("silu_mul", reference)
