"""Forward: transformers' own forward pass of a model, on packed rows, with the rollout's attention.

The model embeds, normalizes, rotates, routes to experts and scales as its class does: an attention function registered
with transformers receives queries, keys and values that are ready. All modules are called, so hooks and replaced
forwards count. On CPUs plain linear layers multiply with weights packed for few rows while a pass runs, which is most
of what makes decoding fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from sparse_rl_lightning.cache.linear_states import Run
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.output_head import LogitScaling
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.modes import exact_angles
from sparse_rl_lightning.policies.patched import swapped_forwards
from sparse_rl_lightning.policies.support import attention_modules, linear_modules, refusal
from sparse_rl_lightning.replay.hooks import named_attention, register
from sparse_rl_lightning.rollout.engine.decoders.base import (
    Attend,
    AttendAndRecur,
    Decoder,
    DecoderKind,
    head_product,
    per_head,
)
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Copied, copied_bytes, head_projection, join

ROLLOUT = "sparse_rl_rollout"


class TransformersDecoder(Decoder):
    """A causal language model as a function of packed tokens, through its own forward pass.

    Args:
        model: Model that :func:`~sparse_rl_lightning.policies.support.check_supported` admits.
        geometry: Sizes and compute type of the model.
        in_float32: Whether logits are float32, not rounded to the compute type.

    Raises:
        ValueError: If a weight is NaN, or logits cannot be float32.
    """

    decoder_kind: DecoderKind = "transformers"

    def __init__(self, model: PreTrainedModel, geometry: CacheGeometry, in_float32: bool = False) -> None:
        super().__init__(model, geometry, in_float32)
        self._decoder: Any = model.get_decoder()
        self._scaling = LogitScaling.of(model.config)
        self._head = head_projection(model.get_output_embeddings(), geometry.dtype, in_float32)
        products = [(module, join((module,), geometry.dtype)) for module in _linear(model)]
        self._products = [(module, product) for module, product in products if isinstance(product, Copied)]
        self._attention = attention_modules(model)
        self._now = now = _Pass()
        # what modules do in a pass
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = [*self._products]
        self._forwards += [(module, now.noting(module.forward)) for module in self._attention]
        linear = enumerate(linear_modules(model))
        self._forwards += [(module, now.recurring(layer, run_of(module, module.forward))) for layer, module in linear]

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute hidden states (R, E) after the final norm from tokens (R,) at positions (R,)."""
        g, now = self.geometry, self._now
        now.attend = attend

        def attention(
            layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
        ) -> Tensor:
            if value.shape != (1, g.num_kv_heads, len(ids), g.head_dim) or query.shape[1:2] != (g.num_heads,):
                shapes = " and ".join(str(tuple(t.shape)) for t in (query, key, value))
                sizes = f"{g.num_heads} heads and {g.num_kv_heads} KV heads of {g.head_dim}"
                raise UserError(
                    refusal(self.model, f"layer {layer} has queries, keys and values of shapes {shapes}, not {sizes}")
                )
            rows = torch.cat([t[0].transpose(0, 1) for t in (query, key, value)], dim=1)
            return attend(layer, rows, QKTransform(), now.hidden, sinks).transpose(0, 1)[None]

        with swapped_forwards(self._forwards), named_attention(self.model, ROLLOUT), exact_angles(self.model):
            out = self._decoder(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, rollout_attention=attention
            )
        now.attend = None  # a decoder may outlive the cache
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) as the model scales and caps them; a row's bits do not depend on the number of rows."""
        return self._scaling(head_product(self._head, hidden))

    def refresh(self) -> None:
        """Update the copies of weights after an optimizer step."""
        super().refresh()
        for product in (self._head, *(copied for _, copied in self._products)):
            product.refresh()

    @cached_property
    def output_weights(self) -> list[Tensor]:
        """The part of the output projection for each head, (L) of (Hq, D, E), at least float32, adapters included."""
        missing = next((module for module in self._attention if not hasattr(module, "o_proj")), None)
        if missing is not None:
            raise UserError(f"This compressor reads o_proj of each attention, which {type(missing).__name__} lacks.")
        return per_head([module.o_proj for module in self._attention], self.geometry)


class _Pass:
    """The pass that runs: apart from the decoder, whose copies of weights its forwards would keep in a cycle."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(0)  # the input of the attention that runs
        self.attend: Attend | None = None

    def noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of an attention module that also notes its input."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.hidden = hidden_states[0]
            return run(hidden_states, *args, **kwargs)

        return forward

    def recurring(self, layer: int, run: Run) -> Callable[..., Tensor]:
        """A forward of a linear module that regroups packed rows by sequence."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return cast(AttendAndRecur, self.attend).recur(layer, hidden_states, run)

        return forward


def transformers_bytes(model: PreTrainedModel, geometry: CacheGeometry) -> int:
    """The bytes of the copies of the decoder's weights that are made on a GPU."""
    return sum(copied_bytes((module,), geometry.dtype) for module in _linear(model))


def _linear(model: PreTrainedModel) -> list[nn.Linear]:
    """The linear layers of the decoder; adapters and quantized layers are their own kinds."""
    return [module for module in model.get_decoder().modules() if type(module) is nn.Linear]


register(ROLLOUT, "rollout_attention", lambda attention, *inputs: attention(*inputs))


def run_of(module: Any, call: Callable[..., Tensor]) -> Run:
    """A linear layer as a function of hidden states and the states that it updates in place.

    Args:
        module: The layer.
        call: Its forward.
    """
    layer: Any = LinearAttentionLayer()
    for flags in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized, layer.has_previous_state):
        flags[0] = True
    layer.conv_kernel_size[0] = module.conv_kernel_size
    keyword = "cache" if "cache" in signature(type(module).forward).parameters else "cache_params"  # by the release
    cache = Cache(layers=[layer] * (module.layer_idx + 1))  # read at the layer's index only

    def run(hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
        layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent
        out = call(hidden, **{keyword: cache})
        layer.conv_states[0] = layer.recurrent_states[0] = None  # views of memory that may be freed
        return out

    return run
