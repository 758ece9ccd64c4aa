"""The output head with logits in float32 from hidden states and weights as they are, whatever type these have.

The learner forms its logits in the same way with its own ``head_in_float32``. On a GPU torch multiplies 16 bits into
float32 without a copy of the weights, on a CPU oneDNN multiplies a float32 copy of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.replaced import is_changed
from sparse_rl_lightning.rollout.engine.decoders.products import Joined, Packed, Projection, join

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Unrounded(Projection):
    """A product with the module's own weight in 16 bits or float32, whose result is float32; autocast is left out."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__([module])
        self._weight, self._bias = module.weight, module.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, V) in float32 from (R, E)."""
        with torch.autocast(x.device.type, enabled=False):
            if self._weight.dtype not in SIXTEEN_BITS:
                return F.linear(x.to(self._weight.dtype), self._weight, self._bias)
            out = torch.mm(x.to(self._weight.dtype), self._weight.t(), out_dtype=torch.float32)
            return out if self._bias is None else out + self._bias


def made_head(head: nn.Module, dtype: torch.dtype, in_float32: bool) -> Projection:
    """The output head's product, in the type that the model computes in or in float32."""
    return head_in_float32(head) if in_float32 else join((head,), dtype)


def head_in_float32(head: nn.Module) -> Projection:
    """Choose the product for an output head with logits in float32, or in float64 if its weights are.

    Raises:
        ValueError: If the head is more than a product, or torch has no such product on its device.
    """
    if type(head) is not nn.Linear or is_changed(head):
        raise UserError(
            f"head_in_float32 needs an output head that is a plain nn.Linear, got {type(head).__name__}"
            f"{' with hooks or a forward of its own' if type(head) is nn.Linear else ''}. Leave the adapter or the "
            "hook off the head, or set head_in_float32 to false."
        )
    weight = head.weight
    if weight.device.type == "cpu" and weight.dtype != torch.float64:
        return (Packed if torch._C._has_mkldnn else Joined)([head], torch.float32)
    if weight.dtype in SIXTEEN_BITS and not _multiplies_into_float32(weight):
        raise UserError(
            f"head_in_float32: torch {torch.__version__} on {weight.device} has no product of {weight.dtype} with a "
            "float32 result. Use a CUDA GPU or a CPU, load the policy in float32, or set head_in_float32 to false."
        )
    return Unrounded(head)


def _multiplies_into_float32(weight: Tensor) -> bool:
    """Whether torch has this product on the weight's device: so far on CUDA, and not on CPUs."""
    unit = weight.detach().new_zeros(8, 8)
    try:
        torch.mm(unit, unit, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # NotImplementedError is one of the first
        return False
    return True
