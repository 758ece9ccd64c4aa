"""Decoder: the forward pass of a Llama-like model over the policy's own modules, with the rollout's attention.

transformers' own forward pass spends most of a decode step on bookkeeping on the CPU, and its matrix products use a
library made for many rows. The four families supported here differ only in optional norms and biases, so their
layers are walked by hand: every norm, embedding, rotary embedding and activation is the model's own module.

Decoding multiplies a few rows with every weight. On CPUs plain ``F.linear`` is made for many rows; oneDNN with
weights packed once is faster in float32. Under autocast every product would cast its weights again at every step. Both
copies are refreshed at the start of a rollout, during which weights do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.replaced import is_changed, is_replaced, refusal

PACKED_ROWS = 16  # number of rows that the packed layout of weights is chosen for; it works for any
ROW_MULTIPLE = 8  # float32 products give a row the same bits in any batch when the number of rows is a multiple of 8


class Attend(Protocol):
    """The attention of one layer, which also writes keys and values into the cache."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Layer index.
            query: Queries (R, Hq, D), not yet rotated.
            key: Keys (R, H, D), not yet rotated.
            value: Values (R, H, D).
            cos: Cosines (R, D) for the positions of queries and keys, at least float32.
            sin: Sines (R, D).
            hidden: Hidden states (R, E) from which query, key and value were projected.

        Returns:
            The result (R, Hq, D).
        """
        ...


@dataclass(frozen=True)
class _Layer:
    """The modules of one layer; ``query_norm`` and ``key_norm`` are Qwen3's."""

    norm: nn.Module
    project_in: Projection  # query, key, value
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    project_out: Projection
    mlp_norm: nn.Module
    mlp: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _GatedMLP:
    """A feed-forward block with projections made for decoding."""

    gate_and_up: Projection
    activation: nn.Module
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x)
        return self.down(self.activation(gate) * up)[0]


class Decoder:
    """A causal language model as a function of packed tokens: embedding, layers, final norm, output head.

    Args:
        model: Model of a family in :data:`~sparse_rl_lightning.policies.geometry.FAMILIES`.
        geometry: Sizes and compute type of the model.

    Raises:
        ValueError: If a module that is walked by hand has a replaced ``forward``, or a weight is NaN.
    """

    def __init__(self, model: PreTrainedModel, geometry: CacheGeometry) -> None:
        decoder: Any = model.get_decoder()
        self.model, self.geometry = model, geometry
        self._signature = _signature(model)
        self._projections: list[Projection] = []
        _check_walked(decoder)
        _check_weights(model)
        self.embedding: nn.Module = decoder.embed_tokens
        self.final_norm: nn.Module = decoder.norm
        self.inv_freq: Tensor = decoder.rotary_emb.inv_freq.to(torch.float32)

        def joined(*modules: nn.Module) -> Projection:
            self._projections.append(join(modules, geometry.dtype))
            return self._projections[-1]

        self.head = joined(model.get_output_embeddings())
        self.layers = [
            _Layer(
                norm=layer.input_layernorm,
                project_in=joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                query_norm=getattr(layer.self_attn, "q_norm", None),
                key_norm=getattr(layer.self_attn, "k_norm", None),
                project_out=joined(layer.self_attn.o_proj),
                mlp_norm=layer.post_attention_layernorm,
                mlp=layer.mlp
                if is_changed(layer.mlp)
                else _GatedMLP(
                    gate_and_up=joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                    activation=layer.mlp.act_fn,
                    down=joined(layer.mlp.down_proj),
                ),
            )
            for layer in decoder.layers
        ]

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute hidden states after the final norm.

        Args:
            ids: Tokens (R,), R a multiple of :data:`ROW_MULTIPLE`.
            positions: True positions (R,) of the tokens.
            attend: Attention, called once per layer.

        Returns:
            The hidden states (R, E).
        """
        g = self.geometry
        x: Tensor = self.embedding(ids)
        cos, sin = self._rotation(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer.norm(x)
            query, key, value = layer.project_in(hidden)
            query, key, value = (t.view(len(x), -1, g.head_dim) for t in (query, key, value))
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = layer.query_norm(query), layer.key_norm(key)
            attended = attend(index, query, key, value, cos, sin, hidden)
            x = x + layer.project_out(attended.flatten(1))[0]
            x = x + layer.mlp(layer.mlp_norm(x))
        out: Tensor = self.final_norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) as the head gives them; padded so that a row's bits do not depend on the number of rows."""
        n = hidden.shape[0]
        if n % ROW_MULTIPLE:
            hidden = torch.cat([hidden, hidden.new_zeros(-n % ROW_MULTIPLE, hidden.shape[1])])
        return self.head(hidden)[0][:n]

    def refresh(self) -> None:
        """Update the copies of weights after an optimizer step.

        Raises:
            ValueError: If a weight is NaN.
        """
        _check_weights(self.model)
        for projection in self._projections:
            projection.refresh()
        self.__dict__.pop("output_weights", None)

    @cached_property
    def output_weights(self) -> list[Tensor]:
        """The part of the output projection for each head, (L) of (Hq, D, E), at least float32, adapters included."""
        g = self.geometry
        unit = torch.eye(g.num_heads * g.head_dim, dtype=g.dtype, device=g.device)
        none, shape = torch.zeros_like(unit[:1]), (g.num_heads, g.head_dim, -1)
        products = [layer.project_out(unit)[0] - layer.project_out(none)[0] for layer in self.layers]
        return [product.view(shape).to(accumulation_dtype(g.dtype)) for product in products]

    def serves(self, model: PreTrainedModel, geometry: CacheGeometry) -> bool:
        """Whether the model is unchanged: the same modules, hooks and forwards, weights at the same addresses."""
        own = self.geometry
        same = model is self.model and (geometry.dtype, geometry.kv_dtype) == (own.dtype, own.kv_dtype)
        return same and self._signature == _signature(model)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (R, D), rounded to the type of the hidden states as in transformers."""
        angles = positions[:, None].to(torch.float32) * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        scaling, wide = self.geometry.attention_scaling, accumulation_dtype(self.geometry.query_dtype)
        return (angles.cos() * scaling).to(dtype).to(wide), (angles.sin() * scaling).to(dtype).to(wide)


def _signature(model: PreTrainedModel) -> tuple[object, ...]:
    """A signature that changes if modules or forwards are replaced or wrapped, hooks come or go, or weights move."""
    modules = (
        (id(m), id(vars(m).get("forward")), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
    )
    return (*modules, *(parameter.data_ptr() for parameter in model.parameters()))


def _check_walked(decoder: Any) -> None:
    """Check the modules that are walked by hand (decoder, rotary embedding, layers, attention): they are not called.

    Raises:
        ValueError: If one has a replaced forward; hooks, which mostly just observe, are a warning.
    """
    parts = (module for layer in decoder.layers for module in (layer, layer.self_attn))
    walked: list[nn.Module] = [decoder, decoder.rotary_emb, *parts]
    for module in walked:
        if is_replaced(module):
            raise UserError(refusal(module))
    for module in walked:
        if module._forward_hooks or module._forward_pre_hooks:
            warnings.warn(
                f"Forward hooks of {type(module).__name__} are not called in rollouts, which walk the layers "
                "themselves. Hooks of feed-forward blocks, linear layers, norms and embeddings are.",
                stacklevel=2,
            )
            return


def _check_weights(model: PreTrainedModel) -> None:
    """Refuse NaN by name: attention may turn NaN queries and keys into finite but meaningless numbers.

    Raises:
        ValueError: If a weight is NaN.
    """
    weights = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point() and p.itemsize > 1}
    sums = torch.stack([weight.sum().isnan() for weight in weights.values()])  # one wait for the device
    broken = [name for name, is_nan in zip(weights, sums.tolist(), strict=True) if is_nan]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(
            f"The model's weights hold NaN: {broken[0]}{more} of {len(weights)}. Training has diverged or a file is "
            "damaged: go back to an earlier checkpoint."
        )


# -------------------------------------------------------------------- matrix products


class Projection:
    """Several modules with the same input, called one after the other with their current weights."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Compute one (R, out) per module from (R, in)."""
        return [module(x) for module in self.modules]

    def refresh(self) -> None:
        """Update copies of weights after an optimizer step."""


class _Copied(Projection):
    """One product with the modules' weights side by side, in the compute type."""

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
    """Products in oneDNN's layout for few rows, on CPUs."""

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
    """Choose the fastest way to multiply one input with several modules.

    Args:
        modules: Linear modules; anything else (LoRA, quantized layers, modules with hooks or a replaced forward) is
            called as it is.
        dtype: Compute type of the products, under autocast another type than the weights'.
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
