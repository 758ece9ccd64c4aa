"""Products of bfloat16 on a processor that has no instructions for them: those of float32, rounded.

Torch's own take ten times as long there, in the learner's passes. Rollouts multiply with copies of weights
(``rollout/engine/decoders/linear_products.py``), which are float32 then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MULTIPLIES = {
    ATTENTION, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}  # fmt: skip
"""What multiplies matrices in a policy's passes, in torch's own operations."""


class WideProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base
    """Mode in which a CPU multiplies bfloat16 as float32 and rounds the results; sums are float32 in either case."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call one of torch's operations."""
        named = kwargs or {}
        if func not in MULTIPLIES or args[0].dtype != torch.bfloat16 or args[0].device.type != "cpu":
            return func(*args, **named)
        results = func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})
        if isinstance(results, Tensor):
            return results.to(torch.bfloat16)
        rounded = tuple(result.to(torch.bfloat16) for result in results)
        return (rounded[0], *results[1:]) if func is ATTENTION else rounded  # logarithms of sums stay


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


@contextmanager
def wide_products() -> Iterator[None]:
    """Context of a pass, forward or backward: :class:`WideProducts` where the processor lacks the instructions."""
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # builds without oneDNN have none
    emulates = has_instructions is not None and not has_instructions()
    with WideProducts() if emulates else nullcontext():  # type: ignore[no-untyped-call]  # torch's
        yield
