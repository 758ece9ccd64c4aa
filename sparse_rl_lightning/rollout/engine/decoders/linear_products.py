"""Matrix products of a decode step: several matrices with the same input are one product.

Decoding multiplies a few rows with every weight. On CPUs plain ``F.linear`` is made for many rows; oneDNN with
weights packed once is faster. Where it has no products of bfloat16, the processor's take several times as long as those
of float32: there the copies are float32. On a GPU a product costs a launch, so the matrices of queries, keys and
values, and those of gate and up, lie side by side. Under autocast every product would cast its weights again at every
step. All these are copies, refreshed at the start of a rollout, during which weights do not change. The learner's own
weights are not moved into one memory instead: optimizers and sharding that flatten weights would go on with the old
one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.modes import lacks_bfloat16
from sparse_rl_lightning.policies.patched import is_changed

PACKED_ROWS = 16  # number of rows that the packed layout of weights is chosen for; it works for any


class Projection:
    """Several modules with the same input, called one after the other with their current weights."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, sum of outputs) from (R, in), the modules' results side by side."""
        parts = [module(x) for module in self.modules]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def refresh(self) -> None:
        """Update copies of weights after an optimizer step."""


class Copied(Projection, ABC):
    """One product with a copy of the modules' weights side by side, in the compute type."""

    def __init__(self, modules: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        super().__init__(modules)
        self._linear, self.dtype = modules, dtype
        ends = [0, *accumulate(module.out_features for module in modules)]
        self._spans = [slice(start, end) for start, end in pairwise(ends)]
        has_bias = any(module.bias is not None for module in modules)
        self._bias = torch.zeros(ends[-1], dtype=dtype, device=modules[0].weight.device) if has_bias else None
        self.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, sum of outputs) in the compute type."""
        return self._product(x if x.dtype == self.dtype else x.to(self.dtype))

    def refresh(self) -> None:
        """Copy the current weights."""
        for module, span in zip(self._linear, self._spans, strict=True):
            if self._bias is not None and module.bias is not None:
                self._bias[span] = module.bias.detach()
        self._take([module.weight.detach() for module in self._linear])

    @abstractmethod
    def _take(self, weights: list[Tensor]) -> None:
        """Copy weights side by side."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """Multiply inputs of the compute type with the copy."""


class Packed(Copied):
    """Products in oneDNN's layout for few rows, on CPUs; where it has none of bfloat16, by those of float32.

    Inputs and weights are rounded to bfloat16 then and so are the results, whose sums are float32 in either case.
    """

    def __init__(self, modules: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self._multiplied = torch.float32 if dtype == torch.bfloat16 and lacks_bfloat16() else dtype
        super().__init__(modules, dtype)

    def _take(self, weights: list[Tensor]) -> None:
        rounded = [weight.to(self.dtype) for weight in weights]
        joined = rounded[0] if len(rounded) == 1 else torch.cat(rounded)  # packing copies it
        self._weight = torch.ops.mkldnn._reorder_linear_weight(joined.to(self._multiplied), PACKED_ROWS)
        self._added = None if self._bias is None else self._bias.to(self._multiplied)

    def _product(self, x: Tensor) -> Tensor:
        x = x.to(self._multiplied)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._added, "none", [], "")
        return out.to(self.dtype)


class Joined(Copied):
    """Plain products, whose weights are always at the same address (a CUDA graph reads them)."""

    _weight: Tensor | None = None

    def _take(self, weights: list[Tensor]) -> None:
        if self._weight is None:
            self._weight = torch.cat([weight.to(self.dtype) for weight in weights])
            return
        for weight, span in zip(weights, self._spans, strict=True):
            self._weight[span] = weight

    def _product(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self._weight, self._bias)


def join(modules: Sequence[nn.Module], dtype: torch.dtype) -> Projection:
    """Choose the fastest way to multiply one input with several modules.

    Args:
        modules: Linear modules; anything else (LoRA, quantized layers, modules with hooks or a replaced forward) is
            called as it is.
        dtype: Compute type of the products, under autocast another type than the weights'.
    """
    copied = _copied_class(modules, dtype)
    return Projection(modules) if copied is None else copied([m for m in modules if isinstance(m, nn.Linear)], dtype)


def copied_bytes(modules: Sequence[nn.Module], dtype: torch.dtype) -> int:
    """The bytes of the copy that :func:`join` makes of the weights of these modules."""
    if _copied_class(modules, dtype) is None:
        return 0
    return sum(parameter.numel() * dtype.itemsize for module in modules for parameter in module.parameters())


def _copied_class(modules: Sequence[nn.Module], dtype: torch.dtype) -> type[Copied] | None:
    """The product on copied weights for these modules; None if they are called as they are."""
    linear = [module for module in modules if type(module) is nn.Linear and not is_changed(module)]
    if len(linear) < len(modules):
        return None
    weight = linear[0].weight
    if weight.device.type == "cpu":
        is_packed = torch._C._has_mkldnn and dtype in (torch.float32, torch.bfloat16)
        return Packed if is_packed else Joined if weight.dtype != dtype else None
    return Joined if weight.dtype != dtype or len(modules) > 1 else None


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


def head_projection(head: nn.Module, dtype: torch.dtype, in_float32: bool) -> Projection:
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
