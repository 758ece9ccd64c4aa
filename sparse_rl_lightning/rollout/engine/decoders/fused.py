"""Norms and feed-forward blocks of a decode step in one op each, where a model's modules are the families' own.

A module with hooks or a forward of its own, and float64, whose norms transformers computes in float32, are called as
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.policies.replaced import is_changed
from sparse_rl_lightning.rollout.engine.decoders.products import Copied, Projection

NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


class NormWeight:
    """The weight and the epsilon of a norm for an op: at least float32, at the same address for all rollouts."""

    def __init__(self, module: nn.Module) -> None:
        self._own: Tensor = module.weight.detach()  # type: ignore[operator]  # an nn.Module's attribute
        self.epsilon = float(module.variance_epsilon)  # type: ignore[arg-type]
        self.weight = self._own.to(accumulation_dtype(self._own.dtype))

    def refresh(self) -> None:
        """Update the copy after an optimizer step, if it is one."""
        if self.weight is not self._own:
            self.weight.copy_(self._own)

    @classmethod
    def of(cls, module: nn.Module | None, dtype: torch.dtype) -> NormWeight | None:
        """The weight of a norm of a family in ``dtype``; None for any other module, and in float64."""
        if module is None or type(module) not in NORMS or is_changed(module) or dtype == torch.float64:
            return None
        return cls(module) if module.weight.dtype == dtype else None


class AddNorm:
    """The residual sum and the norm behind it.

    Args:
        module: Norm of the model.
        reader: Product that reads the result; its compute type is the result's.
        dtype: Type of the hidden states.
    """

    def __init__(self, module: nn.Module, reader: Projection | None, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        if isinstance(reader, Copied) and dtype == torch.float32:
            self._dtype = reader.dtype
        self.own = NormWeight.of(module, dtype)

    def __call__(self, x: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum (R, E), for which ``x`` may be overwritten, and its norm."""
        if self.own is None or (addend is not None and addend.dtype != self._dtype):
            x = x if addend is None else x + addend
            # the next norm adds to the sum in place, which a hook of this one may keep
            return x.clone() if is_changed(self._module) else x, self._module(x)
        return x, ops.rms_norm(x, self.own.weight, self.own.epsilon, addend, self._dtype)


@dataclass(frozen=True)
class GatedMLP:
    """A feed-forward block with projections made for decoding."""

    gate_and_up: Projection
    activation: nn.Module
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, E) from (R, E)."""
        both = self.gate_and_up(x)
        if type(self.activation) in (SiLUActivation, nn.SiLU) and not is_changed(self.activation):
            return self.down(ops.silu_mul(both))
        gate, up = both.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


FeedForward = Callable[[Tensor], Tensor]
