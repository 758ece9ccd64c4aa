"""Products of layers with LoRA adapters on CPUs: the layer's own in packed weights, and the adapters' side by side.

An adapter's two small products cost as much as the layer's large one when peft calls them, mostly in casts and copies:
here queries, keys and values, or gate and up, take three products together. Weights are not merged: 16 bits would lose
what an adapter adds, and the learner, which does not merge either, would see another policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse_rl_lightning.policies.patched import is_changed
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Copied, Projection, packed_kind


class Adapter(NamedTuple):
    """What a layer adds to its own product: ``scaling * up(down(x))``."""

    down: nn.Linear
    up: nn.Linear
    scaling: float


class Adapted(Projection):
    """Layers of peft with the same input, each with one LoRA adapter or with its adapters switched off.

    Which it is, is looked up at every refresh. Layers with anything else (several adapters, DoRA, merged weights,
    active dropout, other scalings) are called as they are.
    """

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, kind: type[Copied]) -> None:
        super().__init__(modules)
        self.dtype, self._kind = dtype, kind
        self._layers: Copied | None = None  # nothing is copied of layers that are called
        self.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, sum of outputs) in the compute type."""
        if self._layers is None:
            return super().__call__(x)
        x = x.to(self.dtype)
        out = self._layers(x)
        if self._down is not None and self._up is not None:
            out.add_(self._up(self._down(x)).mul_(self._scaling))
        return out

    def refresh(self) -> None:
        """Copy the current weights of layers and adapters, unless the layers are to be called."""
        self._down = self._up = None
        modules: Sequence[Any] = self.modules
        found = [adapter_of(module, self.dtype) for module in modules]
        off = [module.disable_adapters and not module.merged for module in modules]
        scalings = {one.scaling for one in found if one is not None}
        if not all(off) and (None in found or len(scalings) > 1):
            self._layers = None
            return
        if self._layers is None:
            self._layers = self._kind([module.base_layer for module in modules], self.dtype)
        else:
            self._layers.refresh()
        if not all(off):
            adapters = [one for one in found if one is not None]
            self._scaling = adapters[0].scaling
            self._down = self._kind([one.down for one in adapters], self.dtype)
            self._up = self._kind([_side_by_side([one.up for one in adapters])], self.dtype)


def adapted(modules: Sequence[nn.Module], dtype: torch.dtype) -> Adapted | None:
    """Products of these modules if they are peft's LoRA layers around plain ones, on a CPU."""
    lora = sys.modules.get("peft.tuners.lora.layer")  # without peft no model has adapters
    if lora is None or any(type(module) is not lora.Linear for module in modules):
        return None
    layers: list[Any] = list(modules)
    own = [layer.base_layer for layer in layers]
    if any(type(layer) is not nn.Linear or is_changed(layer) for layer in own) or any(map(is_changed, layers)):
        return None
    kind = packed_kind(dtype) if own[0].weight.device.type == "cpu" else None
    return None if kind is None else Adapted(layers, dtype, kind)


def adapter_of(layer: Any, dtype: torch.dtype) -> Adapter | None:
    """The one adapter of a layer that is in use, if it is plain and computes in this type; without dropout."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or layer.disable_adapters or layer.merged or active[0] in layer.lora_variant:
        return None
    (name,) = active
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = all(type(part) is nn.Linear and part.bias is None and not is_changed(part) for part in (down, up))
    draws = dropout.training and not isinstance(dropout, nn.Identity)
    computes = torch.is_autocast_enabled("cpu") or {layer.base_layer.weight.dtype, down.weight.dtype} == {dtype}
    return Adapter(down, up, float(layer.scaling[name])) if plain and computes and not draws else None


def _side_by_side(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One module whose input and output are those of all, one after the other."""
    weight: Tensor = torch.block_diag(*(part.weight.detach() for part in parts))  # type: ignore[no-untyped-call]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    return joined
