"""The shape of a model's KV cache, and how far its positions reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors.base import ModelSizes
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.pools import FLOAT8
from sparse_rl_lightning.policies.support import attention_modules, check_supported, linear_modules, steady_length
from sparse_rl_lightning.policies.windows import binding_windows, rope_of, rotation_of


@dataclass(frozen=True)
class LinearSizes:
    """The state that a model's linear-attention layers keep of a sequence, whatever its length."""

    num_layers: int
    conv: tuple[int, int]  # channels, and tokens that the convolution sees
    recurrent: tuple[int, int, int]  # heads, channels of a key and of a value
    dtype: torch.dtype  # type of the convolution's inputs; the recurrent state is float32

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's states in all linear layers."""
        return self.num_layers * (math.prod(self.conv) * self.dtype.itemsize + math.prod(self.recurrent) * 4)

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> LinearSizes | None:
        """Read the sizes from a supported model; None without such layers."""
        modules = linear_modules(model)
        if not modules:
            return None
        first = modules[0]
        recurrent = (first.num_v_heads, first.head_k_dim, first.head_v_dim)
        return cls(len(modules), (first.conv_dim, first.conv_kernel_size), recurrent, dtype)


@dataclass(frozen=True)
class CacheGeometry:
    """The properties of a model that its cache depends on: sizes, types, and the rotary frequencies for compressors."""

    num_layers: int  # of full attention, which are evicted from; windowed and linear ones are not among them
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    inv_freq: Tensor = field(compare=False)  # (r / 2,) for the first r of the D channels of a head, which are rotated
    attention_scaling: float
    dtype: torch.dtype  # type that the model computes in
    kv_dtype: torch.dtype  # type that keys and values are stored in
    device: torch.device
    linear: LinearSizes | None = None  # of a hybrid's other layers
    windows: tuple[int, ...] = ()  # tokens that each attention layer sees, 0 for all; empty if all layers see all
    has_sinks: bool = False  # learned ones, a logit per query head

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The numbers of the ``num_layers`` layers of full attention among all layers with attention."""
        return tuple(i for i, window in enumerate(self.windows or (0,) * self.num_layers) if not window)

    @cached_property
    def is_mixed(self) -> bool:
        """Whether there are layers of other kinds than full attention."""
        return bool(self.windows) or self.linear is not None

    @cached_property
    def window_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a window among all layers with attention."""
        return tuple(i for i, window in enumerate(self.windows) if window)

    @cached_property
    def index_in_group(self) -> dict[int, int]:
        """The index of each attention layer among those of its group: full attention, or with a window."""
        groups = (self.full_layers, self.window_layers)
        return {layer: index for layers in groups for index, layer in enumerate(layers)}

    @cached_property
    def depth(self) -> int:
        """The number of layers with keys and values, of either kind."""
        return len(self.windows) or self.num_layers

    @cached_property
    def window(self) -> int:
        """The tokens that layers with a window see, 0 without such layers."""
        return max(self.windows, default=0)

    def window_of(self, layer: int) -> int:
        """The tokens that an attention layer sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    @cached_property
    def query_dtype(self) -> torch.dtype:
        """The type of queries for attention and compressors: the keys' type, but 8-bit types are storage only."""
        return self.dtype if self.kv_dtype == FLOAT8 else self.kv_dtype

    @cached_property
    def bytes_per_entry(self) -> int:
        """Bytes of one key and one value of one head."""
        return 2 * self.head_dim * self.kv_dtype.itemsize

    @classmethod
    def of(
        cls, model: PreTrainedModel, kv_dtype: torch.dtype | None = None, longest: int = 0, of_shapes: bool = False
    ) -> CacheGeometry:
        """Read the geometry from a supported causal language model of transformers.

        Keys and values are stored in ``kv_dtype``, by default the type that the model computes in. ``longest`` is the
        number of tokens of the longest sequence: windows in all layers count only beyond their own length. A model
        ``of_shapes`` is one on torch's meta device, of which only sizes and types are read.
        """
        check_supported(model, of_shapes)
        config, attention = model.config, attention_modules(model)
        windows = binding_windows(config, longest)
        inv_freq, attention_scaling = rotation_of(model.get_decoder().rotary_emb)
        assert inv_freq is not None
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # an nn.Module attribute
        device_type = weight.device.type
        mixed = not of_shapes and torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if mixed else weight.dtype
        return cls(
            num_layers=len(attention) - sum(window > 0 for window in windows),
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            scale=attention[0].scaling,
            inv_freq=inv_freq,
            attention_scaling=attention_scaling,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            device=weight.device,
            linear=LinearSizes.of(model, dtype),
            windows=windows,
            has_sinks=any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in attention),
        )


def model_sizes(model: PreTrainedModel, geometry: CacheGeometry) -> ModelSizes:
    """What weights of a compressor depend on."""
    g = geometry
    return ModelSizes(g.depth, g.num_kv_heads, g.head_dim, model.config.get_text_config().hidden_size)


def kv_type(choice: torch.dtype | str | None, argument: str = "kv_dtype") -> torch.dtype | None:
    """The type that keys and values are stored in, by its name; None for the model's own type."""
    types = {
        "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64,
        "float8_e4m3fn": FLOAT8, "fp8": FLOAT8,
    }  # fmt: skip
    dtype = types.get(choice) if isinstance(choice, str) else choice
    if choice is not None and dtype not in types.values():
        raise UserError(f"{argument} must be one of {', '.join(types)}, or None for the model's type, got {choice!r}.")
    return dtype


def context_length(config: Any) -> int | None:
    """The number of tokens of the longest sequence that a model is made for; None if its configuration lacks it.

    Scaled rotary positions reach further than ``max_position_embeddings``, which model cards leave unchanged:
    ``factor`` times as far as the original context. Llama 3's scaling is already part of its own number.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = rope_of(config)
    rope_type, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor") or 1.0
    if positions is None or rope_type not in ("linear", "dynamic", "yarn", "llama3"):
        return positions
    original = rope.get("original_max_position_embeddings") or positions
    return positions if rope_type == "llama3" and original < positions else max(positions, int(original * factor))


def longest_sequence(config: Any) -> int | None:
    """The number of tokens of the longest sequence that can be drawn, None for no limit."""
    limits = [context_length(config), steady_length(config)]
    return min((limit for limit in limits if limit is not None), default=None)
