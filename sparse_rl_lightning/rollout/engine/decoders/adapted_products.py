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

from sparse_rl_lightning.policies.patched import is_changed
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Projection, copied_bytes, join


class Adapter(NamedTuple):
    """What a layer adds to its own product: ``scaling * up(down(x))``, with a scaling of 0 if it is switched off."""

    down: nn.Linear
    up: nn.Linear
    scaling: float


class SideBySide:
    """The adapters of layers with the same input, as two products, whose memory CUDA graphs may read for good.

    Scalings are folded into copies of the second weights.

    Args:
        modules: Layers of peft with plain adapters.
        dtype: Compute type of the model.
        with_bias: Whether to add the layers' biases.
    """

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, with_bias: bool) -> None:
        self._modules, adapters = modules, plain_adapters(modules)
        self.dtype = dtype = adapter_dtype(adapters, dtype)
        weight = _block_diagonal(adapters).to(dtype)  # from what all downs give to what all ups give
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        joined.weight = nn.Parameter(weight, requires_grad=False)
        if with_bias and any(module.base_layer.bias is not None for module in modules):
            joined.bias = nn.Parameter(_biases(modules).to(dtype), requires_grad=False)
        self._joined = joined
        self._down, self._up = join([adapter.down for adapter in adapters], dtype), join([joined], dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """What they add (R, sum of outputs), for an input (R, in)."""
        return self._up(self._down(x.to(self.dtype)))

    def refresh(self) -> None:
        """Copy the current weights and scalings of the same adapters."""
        self._joined.weight.copy_(_block_diagonal(plain_adapters(self._modules)))
        if self._joined.bias is not None:
            self._joined.bias.copy_(_biases(self._modules))
        self._down.refresh()
        self._up.refresh()


class Apart:
    """Products of layers that are added to what is there, each to its columns, in a launch of its own.

    To lie side by side, the weights of a plain model are copied, which takes half as much memory as the model. Frozen
    ones are there to save memory: they stay where they are, but for a copy in the compute type if theirs is another.
    """

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self._layers = layers
        self._copies = {layer: layer.weight.detach().to(dtype) for layer in layers if layer.weight.dtype != dtype}

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the products of an input (R, in) to (R, sum of outputs), in place."""
        columns = torch.split(out, [layer.out_features for layer in self._layers], dim=1)
        with torch.autocast(x.device.type, enabled=False):
            for layer, result in zip(self._layers, columns, strict=True):
                result.addmm_(x, self._copies.get(layer, layer.weight).t())
        return out

    def refresh(self) -> None:
        """Copy the current weights of another type."""
        for layer, weight in self._copies.items():
            weight.copy_(layer.weight.detach())


class Adapted(Projection):
    """Layers of peft with the same input, each with one plain LoRA adapter, which may be switched off and rescaled.

    All else that changes an adapter changes the model's signature, and products are made anew.
    """

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype) -> None:
        super().__init__(modules)
        self.dtype, layers = dtype, [module.base_layer for module in modules]
        is_apart = layers[0].weight.device.type != "cpu" and _are_plain(layers)
        self._base = Apart(layers, dtype) if is_apart else join(layers, dtype)
        self._adapters = SideBySide(modules, dtype, with_bias=is_apart)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, sum of outputs) in the compute type."""
        x = x.to(self.dtype)
        added = self._adapters(x)
        return self._base.add(added.to(self.dtype), x) if isinstance(self._base, Apart) else self._base(x).add_(added)

    def refresh(self) -> None:
        """Copy the current weights of layers and adapters."""
        self._base.refresh()
        self._adapters.refresh()


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
    base_layers: list[nn.Linear] = [layer.base_layer for layer in layers]
    if not _are_plain(base_layers):  # they are called
        base_layers = []
    base = sum(layer.weight.numel() * dtype.itemsize for layer in base_layers if layer.weight.dtype != dtype)
    has_bias = any(layer.bias is not None for layer in base_layers)
    downs, ups, to = [a.down for a in adapters], [a.up for a in adapters], adapter_dtype(adapters, dtype)
    outputs, rank = sum(up.out_features for up in ups), sum(up.in_features for up in ups)
    return base + copied_bytes(downs, to) + outputs * (rank + has_bias) * to.itemsize


def _are_plain(layers: Sequence[nn.Module]) -> bool:
    """Whether layers are products of their weights and nothing else, such as quantized ones."""
    return all(type(layer) is nn.Linear for layer in layers)


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
    scaled = [adapter.up.weight.detach() * adapter.scaling for adapter in adapters]
    weight: Tensor = torch.block_diag(*scaled)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return weight


def _biases(modules: Sequence[Any]) -> Tensor:
    layers = [module.base_layer for module in modules]
    biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat(biases).detach()
