"""Matrix products of the decode step: the policy's own linear modules, or copies of their weights made for decoding.

Decoding multiplies a handful of rows with every weight. On CPUs plain ``F.linear`` is made for many rows; oneDNN with
weights packed once is faster in float32. Under autocast every product would cast its weights anew at every step. Both
copies are refreshed at the start of a rollout, during which weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_rl_lightning.policies.replaced import is_changed

PACKED_ROWS = 16  # rows that the packed layout is chosen for; it serves any number


class Projection:
    """Several modules that read the same input, called one after the other with their weights as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """From (R, in) to one (R, out) per module."""
        return [module(x) for module in self.modules]

    def refresh(self) -> None:
        """Take over what an optimiser has changed since."""


class _Copied(Projection):
    """One product with the modules' weights side by side, in the type that products are computed in."""

    def __init__(self, modules: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        super().__init__(modules)
        self._linear, self.dtype = modules, dtype
        ends = [0, *accumulate(module.out_features for module in modules)]
        self._spans = [slice(start, end) for start, end in pairwise(ends)]
        has_bias = any(module.bias is not None for module in modules)
        self._bias = torch.zeros(ends[-1], dtype=dtype, device=modules[0].weight.device) if has_bias else None
        self.refresh()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        out = self._product(x.to(self.dtype))
        return [out[..., span] for span in self._spans]

    def refresh(self) -> None:
        for module, span in zip(self._linear, self._spans, strict=True):
            if self._bias is not None and module.bias is not None:
                self._bias[span] = module.bias.detach()
        self._take([module.weight.detach() for module in self._linear])

    def _take(self, weights: list[Tensor]) -> None:
        raise NotImplementedError

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Packed(_Copied):
    """oneDNN's layout for few rows, on CPUs."""

    def _take(self, weights: list[Tensor]) -> None:
        joined = torch.cat([weight.to(self.dtype) for weight in weights])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(joined, PACKED_ROWS)

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return out


class Cast(_Copied):
    """Weights cast once per rollout instead of once per step, always at the same address (a CUDA graph reads them)."""

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
    """The fastest way to multiply one input with several modules.

    Args:
        modules: Linear modules; anything else (LoRA, quantised layers, modules with hooks or a replaced forward) is
            called as it is.
        dtype: What products are computed in, under autocast another type than the weights'.
    """
    linear = [module for module in modules if type(module) is nn.Linear and not is_changed(module)]
    if len(linear) < len(modules):
        return Projection(modules)
    weight = linear[0].weight
    if weight.device.type == "cpu" and _can_pack(dtype):
        return Packed(linear, dtype)
    return Cast(linear, dtype) if weight.dtype != dtype else Projection(modules)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
