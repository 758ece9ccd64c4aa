"""NativeDecoder: the forward pass of a Llama-like model, module by module, the fastest way to decode.

The layers of Llama, Mistral, Qwen2 and Qwen3 differ only in optional norms and biases, so they are run part by part: a
norm with the sum before it, the norms and the rotation of queries and keys, and the activation of a feed-forward block
are an op each; modules with hooks or a replaced forward are called as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3RMSNorm

from sparse_rl_lightning import ops
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.append import QKTransform, parts
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.patched import is_changed, is_patched, refusal, uncompiled
from sparse_rl_lightning.rollout.engine.decoders.adapted_products import Adapted, adapted, adapted_bytes
from sparse_rl_lightning.rollout.engine.decoders.base import (
    Attend,
    Decoder,
    DecoderKind,
    head_product,
    per_head,
    signature,
)
from sparse_rl_lightning.rollout.engine.decoders.linear_products import (
    Copied,
    Projection,
    copied_bytes,
    head_projection,
    join,
)

LAYERS = (
    (LlamaDecoderLayer, LlamaAttention),
    (MistralDecoderLayer, MistralAttention),
    (Qwen2DecoderLayer, Qwen2Attention),
    (Qwen3DecoderLayer, Qwen3Attention),
)
"""The layers that are run here, with their attention."""

Group: TypeAlias = tuple[nn.Module, ...]
"""Linear modules with the same input."""


@dataclass(frozen=True)
class _Layer:
    """The parts of one layer; ``query_norm`` and ``key_norm`` are Qwen3's."""

    norm: AddNorm
    project_in: Projection  # query, key, value
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    project_out: Projection
    mlp_norm: AddNorm
    mlp: FeedForward
    head_norms: tuple[NormWeight, NormWeight] | None  # those two, if the op can apply them


class NativeDecoder(Decoder):
    """A causal language model as a function of packed tokens: embedding, layers, final norm, output head.

    Args:
        model: Model for which :func:`is_native` holds.
        geometry: Sizes and compute type of the model.
        in_float32: Whether logits are float32, not rounded to the compute type.

    Raises:
        ValueError: If a module that is not called has a replaced ``forward``, a weight is NaN, or logits cannot be
            float32.
    """

    decoder_kind: DecoderKind = "native"

    def __init__(self, model: PreTrainedModel, geometry: CacheGeometry, in_float32: bool = False) -> None:
        decoder: Any = model.get_decoder()
        _check_native(decoder)
        super().__init__(model, geometry, in_float32)
        self._projections: list[Projection] = []
        self.embedding: nn.Module = decoder.embed_tokens
        self._copies_embeddings = is_changed(self.embedding) or type(self.embedding) is not nn.Embedding
        self.inv_freq: Tensor = geometry.inv_freq.to(torch.float32)
        self._hidden_dtype: torch.dtype = self.embedding.weight.dtype  # of the hidden states
        self.head = self._registered(head_projection(model.get_output_embeddings(), geometry.dtype, in_float32))
        self.final_norm = AddNorm(decoder.norm, self.head, self._hidden_dtype)
        self.layers = [self._layer(layer) for layer in decoder.layers]
        self._angles = self._rotation(torch.arange(0, device=self.inv_freq.device))
        self.followed = [
            layer for projection in self._projections if isinstance(projection, Adapted) for layer in projection.modules
        ]
        self._signature = signature(model, self.followed)

    def _joined(self, modules: Group) -> Projection:
        return self._registered(adapted(modules, self.geometry.dtype) or join(modules, self.geometry.dtype))

    def _registered(self, projection: Projection) -> Projection:
        self._projections.append(projection)
        return projection

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        project_in, project_out, *feed = (self._joined(group) for group in _groups(layer))
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        of_query, of_key = NormWeight.of(query_norm, self._hidden_dtype), NormWeight.of(key_norm, self._hidden_dtype)
        head_norms = None
        if of_query is not None and of_key is not None and of_query.epsilon == of_key.epsilon:
            head_norms = of_query, of_key
        return _Layer(
            norm=AddNorm(layer.input_layernorm, project_in, self._hidden_dtype),
            project_in=project_in,
            query_norm=query_norm,
            key_norm=key_norm,
            project_out=project_out,
            mlp_norm=AddNorm(layer.post_attention_layernorm, feed[0] if feed else None, self._hidden_dtype),
            mlp=GatedMLP(feed[0], mlp.act_fn, feed[1]) if feed else mlp,
            head_norms=head_norms,
        )

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute hidden states (R, E) after the final norm from tokens (R,) at positions (R,)."""
        g = self.geometry
        x: Tensor = self.embedding(ids)
        if self._copies_embeddings:
            x = x.clone()  # sums are written into it
        cos, sin = self._angles[:, positions]
        addend = None
        for index, layer in enumerate(self.layers):
            x, hidden = layer.norm(x, addend)
            projected = layer.project_in(hidden).view(x.shape[0], -1, g.head_dim)
            transform = QKTransform(cos, sin)
            if layer.head_norms is not None:
                of_query, of_key = layer.head_norms
                transform = QKTransform(cos, sin, of_query.weight, of_key.weight, of_query.epsilon)
            elif layer.query_norm is not None and layer.key_norm is not None:
                query, key, value = parts(projected, g.num_kv_heads)
                query, key = layer.query_norm(query), layer.key_norm(key)
                projected = torch.cat([query, key, value.to(key.dtype)], dim=1)
            attended = attend(index, projected, transform, hidden)
            x, hidden = layer.mlp_norm(x, layer.project_out(attended.flatten(1)))
            addend = layer.mlp(hidden)
        return self.final_norm(x, addend)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) as the head gives them; a row's bits do not depend on the number of rows."""
        return head_product(self.head, hidden)

    def refresh(self) -> None:
        """Update the copies of weights after an optimizer step."""
        super().refresh()
        for projection in self._projections:
            projection.refresh()
        for norm in self._norms():
            norm.refresh()

    @cached_property
    def output_weights(self) -> list[Tensor]:
        """The part of the output projection for each head, (L) of (Hq, D, E), at least float32, adapters included."""
        return per_head([layer.project_out for layer in self.layers], self.geometry)

    def reach(self, length: int) -> None:
        """Prepare the angles of positions up to a length, which does not shrink."""
        if length > self._angles.shape[1]:
            self._angles = self._rotation(torch.arange(length, device=self.inv_freq.device))

    def _rotation(self, positions: Tensor) -> Tensor:
        """Cosines and sines (2, R, D), rounded to the type of the hidden states as in transformers."""
        angles = positions[:, None].to(torch.float32) * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        scaling, wide = self.geometry.attention_scaling, accumulation_dtype(self.geometry.query_dtype)
        return (torch.stack([angles.cos(), angles.sin()]) * scaling).to(self._hidden_dtype).to(wide)

    def _norms(self) -> Iterator[NormWeight]:
        """The weights of norms that ops read."""
        for layer in self.layers:
            yield from (norm.norm_weight for norm in (layer.norm, layer.mlp_norm) if norm.norm_weight is not None)
            yield from layer.head_norms or ()
        if self.final_norm.norm_weight is not None:
            yield self.final_norm.norm_weight


def is_native(model: PreTrainedModel) -> bool:
    """Whether all layers are exactly those that this file reproduces, in a model of their family.

    What runs the layers has to be the family's too: a derived class may scale embeddings or logits in its forward.
    """
    decoder: Any = model.get_decoder()
    kinds = {(type(uncompiled(layer)), type(getattr(layer, "self_attn", None))) for layer in decoder.layers}
    if len(kinds) != 1 or not kinds <= set(LAYERS):
        return False
    causal: Any = uncompiled(model)
    causal = causal.get_base_model() if hasattr(causal, "get_base_model") else causal
    used = (causal, decoder, decoder.rotary_emb, decoder.layers[0], decoder.layers[0].self_attn)
    return all(_is_of_family(module, decoder.layers[0]) for module in used)


def _is_of_family(module: nn.Module, layer: nn.Module) -> bool:
    """Whether a module's class has the forward that transformers gives it beside this layer, in the same file."""
    forward: Any = type(uncompiled(module)).forward
    return getattr(forward, "__module__", None) == type(uncompiled(layer)).__module__


def native_bytes(model: PreTrainedModel, geometry: CacheGeometry, length: int) -> int:
    """The bytes of the copies of layers' weights that are made on a GPU, and of the angles for this many positions."""
    layers: Any = model.get_decoder().layers
    groups: list[Group] = [group for layer in layers for group in _groups(layer)]
    angles = 2 * length * geometry.head_dim * accumulation_dtype(geometry.query_dtype).itemsize
    copied = (copied_bytes(group, geometry.dtype) + adapted_bytes(group, geometry.dtype) for group in groups)
    return sum(copied) + angles


def _groups(layer: Any) -> list[Group]:
    """The matrices of a layer that are one product each: queries, keys and values; output; gate and up; down.

    A feed-forward block of another class, with hooks or with a replaced forward is called as it is, and has none.
    """
    attention, mlp = layer.self_attn, layer.mlp
    groups: list[Group] = [(attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,)]
    if is_changed(mlp) or not _is_of_family(mlp, layer):
        return groups
    return [*groups, (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]


def _check_native(decoder: Any) -> None:
    """Check the modules that are not called: decoder, rotary embedding, layers, attention.

    Raises:
        ValueError: If one has a replaced forward; hooks, which mostly just observe, are a warning.
    """
    parts = (module for layer in decoder.layers for module in (layer, layer.self_attn))
    passed_over: list[nn.Module] = [decoder, decoder.rotary_emb, *parts]
    for module in passed_over:
        if is_patched(module):
            raise UserError(refusal(module))
    for module in passed_over:
        if module._forward_hooks or module._forward_pre_hooks:
            warnings.warn(
                f"Forward hooks of {type(module).__name__} are not called in rollouts, which run the layers "
                "themselves. Hooks of feed-forward blocks, linear layers, norms and embeddings are.",
                stacklevel=2,
            )
            return


NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


class NormWeight:
    """The weight and the epsilon of a norm for an op: at least float32, at the same address for all rollouts."""

    def __init__(self, module: nn.Module) -> None:
        self._source: Tensor = module.weight.detach()  # type: ignore[operator]  # an nn.Module's attribute
        self.epsilon = float(module.variance_epsilon)  # type: ignore[arg-type]  # a module's attributes may be tensors
        self.weight = self._source.to(accumulation_dtype(self._source.dtype))

    def refresh(self) -> None:
        """Update the copy after an optimizer step, if it is one."""
        if self.weight is not self._source:
            self.weight.copy_(self._source)

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
        self.norm_weight = NormWeight.of(module, dtype)
        # the next norm adds to the sum in place, which a hook of this one may keep
        self._copies = is_changed(module)

    def __call__(self, x: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum (R, E), for which ``x`` may be overwritten, and its norm."""
        if self.norm_weight is None or (addend is not None and addend.dtype != self._dtype):
            x = x if addend is None else x + addend
            return x.clone() if self._copies else x, self._module(x)
        return x, ops.rms_norm(x, self.norm_weight.weight, self.norm_weight.epsilon, addend, self._dtype)


class GatedMLP:
    """A feed-forward block with projections made for decoding."""

    def __init__(self, gate_and_up: Projection, activation: nn.Module, down: Projection) -> None:
        self.gate_and_up, self.activation, self.down = gate_and_up, activation, down
        self._is_silu = type(activation) in (SiLUActivation, nn.SiLU) and not is_changed(activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute (R, E) from (R, E)."""
        both = self.gate_and_up(x)
        if self._is_silu:
            return self.down(ops.silu_mul(both))
        gate, up = both.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


FeedForward = Callable[[Tensor], Tensor]
