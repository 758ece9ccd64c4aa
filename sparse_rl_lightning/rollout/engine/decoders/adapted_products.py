"""Products of layers with LoRA adapters: the layers' own, and those of all their adapters side by side.

An adapter's two small products cost as much as the layer's large one when peft calls them, mostly in casts and copies,
on a GPU in launches: here queries, keys and values, or gate and up, share the two. Weights are not merged: 16 bits
would lose what an adapter adds, and the learner, which does not merge either, would see another policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.policies.patched import is_changed
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Projection, copied_bytes, join


class Adapter(NamedTuple):
    """What a layer adds to its own product: ``scaling * up(down(x))``, with a scaling of 0 if it is switched off."""

    down: nn.Linear
    up: nn.Linear
    scaling: float


class SideBySide:
    """The adapters of layers with the same input, as two products, whose memory CUDA graphs may read for good.

    Args:
        adapters: Adapter of each layer.
        dtype: Type that they compute in.
    """

    def __init__(self, adapters: Sequence[Adapter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        joined = nn.Linear(1, 1, bias=False, device="meta")  # from what all downs give to what all ups give
        joined.weight = nn.Parameter(_block_diagonal(adapters).to(dtype), requires_grad=False)
        self._joined, self._sizes = joined, [adapter.up.out_features for adapter in adapters]
        self._down, self._up = join([adapter.down for adapter in adapters], dtype), join([joined], dtype)
        self._scaling = joined.weight.new_zeros(sum(self._sizes), dtype=accumulation_dtype(dtype))
        self.refresh(adapters)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Add what the adapters make of an input (R, in) to the layers' own results (R, sum of outputs), in place."""
        return out.addcmul_(self._up(self._down(x.to(self.dtype))), self._scaling)

    def refresh(self, adapters: Sequence[Adapter]) -> None:
        """Copy the current weights and scalings of the same adapters."""
        self._joined.weight.copy_(_block_diagonal(adapters))
        for adapter, scaling in zip(adapters, torch.split(self._scaling, self._sizes), strict=True):
            scaling.fill_(adapter.scaling)
        self._down.refresh()
        self._up.refresh()


class Adapted(Projection):
    """Layers of peft with the same input, each with one plain LoRA adapter, which may be switched off and rescaled.

    All else that changes an adapter changes the model's signature, and products are made anew.
    """

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype) -> None:
        super().__init__(modules)
        self.dtype, adapters = dtype, plain_adapters(modules)
        # on a GPU they stay apart: to lie side by side, the weights of a plain model are copied, which takes half as
        # much memory as the model. Frozen ones are there to save memory.
        layers = [module.base_layer for module in modules]
        is_joined = layers[0].weight.device.type == "cpu"
        self._base = [join(layers, dtype)] if is_joined else [join([layer], dtype) for layer in layers]
        self._adapters = SideBySide(adapters, adapter_dtype(adapters, dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, sum of outputs) in the compute type."""
        x = x.to(self.dtype)
        parts = [product(x) for product in self._base]
        return self._adapters.add(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), x)

    def refresh(self) -> None:
        """Copy the current weights of layers and adapters."""
        for product in self._base:
            product.refresh()
        self._adapters.refresh(plain_adapters(self.modules))


def adapted(modules: Sequence[nn.Module], dtype: torch.dtype) -> Adapted | None:
    """Products of these modules if they are peft's LoRA layers and need not be called.

    They are called with several adapters, DoRA, biases, merged weights or active dropout.
    """
    return Adapted(modules, dtype) if plain_adapters(modules) else None


def adapted_bytes(modules: Sequence[nn.Module], dtype: torch.dtype) -> int:
    """The bytes of what :func:`adapted` copies of these modules on a GPU; 0 if they are other ones or are called."""
    adapters, layers = plain_adapters(modules), cast("Any", modules)
    if not adapters:
        return 0
    base = sum(copied_bytes([layer.base_layer], dtype) for layer in layers)
    downs, ups, to = [a.down for a in adapters], [a.up for a in adapters], adapter_dtype(adapters, dtype)
    outputs, rank = sum(up.out_features for up in ups), sum(up.in_features for up in ups)
    return base + copied_bytes(downs, to) + outputs * (rank * to.itemsize + accumulation_dtype(to).itemsize)


def plain_adapters(modules: Sequence[nn.Module]) -> list[Adapter]:
    """The adapter of each module, if all are peft's LoRA layers that need not be called; else none."""
    lora = sys.modules.get("peft.tuners.lora.layer")  # without peft no model has adapters
    layers = [module for module in modules if lora is not None and type(module) is lora.Linear]
    adapters = [adapter for adapter in map(adapter_of, layers) if adapter is not None]
    return adapters if len(adapters) == len(modules) else []


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a layer of peft, if there is one, and it is plain: without dropout, and neither has hooks."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    hooked = is_changed(layer) or is_changed(layer.base_layer)
    if hooked or len(active) != 1 or layer.merged or active[0] in layer.lora_variant:
        return None
    (name,) = active
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = all(type(module) is nn.Linear and module.bias is None and not is_changed(module) for module in (down, up))
    draws = dropout.training and not isinstance(dropout, nn.Identity)
    scaling = 0.0 if layer.disable_adapters else float(layer.scaling[name])
    return Adapter(down, up, scaling) if plain and not draws else None


def adapter_dtype(adapters: Sequence[Adapter], dtype: torch.dtype) -> torch.dtype:
    """The type that adapters of layers compute in as peft calls them: that of autocast, else that of their weights."""
    # of either device: weights may be of shapes alone
    is_autocast = any(torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda"))
    return dtype if is_autocast else adapters[0].down.weight.dtype


def _block_diagonal(adapters: Sequence[Adapter]) -> Tensor:
    weight: Tensor = torch.block_diag(*(adapter.up.weight.detach() for adapter in adapters))  # type: ignore[no-untyped-call]
    return weight
