"""Matrix products of the decode step: the policy's own linear modules, or on CPUs their weights packed for few rows.

Decoding multiplies a handful of rows with every weight. Plain ``F.linear`` is made for many rows there; oneDNN with
weights packed once is two to three times as fast in float32 (``benchmarks/rollout.py``). Packing copies the weights,
which stay as they are for the length of one rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Projection = Callable[[Tensor], Sequence[Tensor]]
"""From (R, in) to one (R, out) per module that was joined."""

PACKED_ROWS = 16  # rows that the packed layout is chosen for; it serves any number


def join(modules: Sequence[nn.Module], dtype: torch.dtype, pack: bool) -> Projection:
    """One callable for several modules that read the same input.

    Args:
        modules: Linear modules; anything else (LoRA, quantised layers) is called as it is.
        dtype: What products are computed in, under autocast another type than the weights'.
        pack: Pack the weights together where that is possible.
    """
    linear = [module for module in modules if can_be_packed(module, dtype)]
    if pack and len(linear) == len(modules):
        return _pack(linear, dtype)  # type: ignore[arg-type]  # can_be_packed lets only nn.Linear through
    return lambda x: [module(x) for module in modules]


def can_be_packed(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the module is nothing but a matrix product that oneDNN computes on this CPU."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    on_cpu = module.weight.device.type == "cpu" and torch._C._has_mkldnn
    return on_cpu and (dtype == torch.float32 or (dtype == torch.bfloat16 and _has_fast_bfloat16()))


def _has_fast_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(modules: Sequence[nn.Linear], dtype: torch.dtype) -> Projection:
    weights = [module.weight.detach().to(dtype) for module in modules]
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), PACKED_ROWS)
    bias = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat([_bias(module).to(dtype) for module in modules])
    product = torch.ops.mkldnn._linear_pointwise.default
    if len(modules) == 1:
        return lambda x: (product(x.to(dtype), packed, bias, "none", [], ""),)
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + len(weight))
    spans = [slice(start, end) for start, end in pairwise(ends)]

    def joined(x: Tensor) -> list[Tensor]:
        out = product(x.to(dtype), packed, bias, "none", [], "")
        return [out[:, span] for span in spans]

    return joined


def _bias(module: nn.Linear) -> Tensor:
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()
