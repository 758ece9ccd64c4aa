"""The shape of a model's KV cache, and which models this library supports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.pools import FLOAT8
from sparse_rl_lightning.output_head import output_head
from sparse_rl_lightning.policies.replaced import check_reachable

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of which this library can reproduce every layer."""


@dataclass(frozen=True)
class CacheGeometry:
    """The properties of a model that its cache depends on: sizes, types, and the rotary frequencies for compressors."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    inv_freq: Tensor = field(compare=False)  # (D / 2,)
    attention_scaling: float
    dtype: torch.dtype  # type that the model computes in
    kv_dtype: torch.dtype  # type that keys and values are stored in
    device: torch.device

    @property
    def query_dtype(self) -> torch.dtype:
        """The type of queries for attention and compressors: the keys' type, but 8-bit types are storage only."""
        return self.dtype if self.kv_dtype == FLOAT8 else self.kv_dtype

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one key and one value of one head."""
        return 2 * self.head_dim * self.kv_dtype.itemsize

    @classmethod
    def of(cls, model: PreTrainedModel, kv_dtype: torch.dtype | None = None) -> CacheGeometry:
        """Read the geometry from a supported causal language model of transformers.

        Keys and values are stored in ``kv_dtype``, by default the type that the model computes in.
        """
        check_supported(model)
        config, decoder = model.config, model.get_decoder()
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # an nn.Module attribute
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            scale=decoder.layers[0].self_attn.scaling,
            inv_freq=decoder.rotary_emb.inv_freq,
            attention_scaling=decoder.rotary_emb.attention_scaling,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            device=weight.device,
        )


def kv_type(kind: torch.dtype | str | None, argument: str = "kv_dtype") -> torch.dtype | None:
    """The type that keys and values are stored in, by its name; None for the model's own type."""
    known = {
        "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64,
        "float8_e4m3fn": FLOAT8, "fp8": FLOAT8,
    }  # fmt: skip
    found = known.get(kind) if isinstance(kind, str) else kind
    if kind is not None and found not in known.values():
        raise UserError(f"{argument} must be one of {', '.join(known)}, or None for the model's type, got {kind!r}.")
    return found


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model whose cache could not be evicted correctly.

    Such a model is of an unsupported family, or has no weights, no output head, a changed forward pass, layers other
    than attention, or rotary frequencies that change with the length.
    """
    if not hasattr(model, "get_output_embeddings"):
        raise UserError(f"model must be a causal language model of transformers, got {type(model)}.")
    check_reachable(model)
    output_head(model)
    config, name = model.config, type(model).__name__
    if model.device.type == "meta":
        raise UserError(f"The weights of this {name} are on the meta device: they hold no numbers. Load them first.")
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{name} (model_type {config.model_type!r}) is not supported: other families may scale logits or attention "
            f"in ways that this library does not reproduce. Supported: {', '.join(FAMILIES)}."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise UserError(
            f"{name} has rope_type={rope!r}, whose frequencies change with the length of the sequence, so cached keys "
            "would not fit. Use rope_type 'default', 'linear', 'llama3' or 'yarn'."
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not layer_types <= {"full_attention", "sliding_attention"}:
        raise UserError(
            f"{name} has layers of type {sorted(layer_types)}, only 'full_attention' layers can be evicted from. "
            "Choose a full-attention model such as Qwen2, Qwen3 or Llama."
        )


def context_length(config: Any) -> int | None:
    """The number of tokens of the longest sequence that a model is made for; None if its configuration lacks it.

    Scaled rotary positions reach further than ``max_position_embeddings``, which model cards leave unchanged:
    ``factor`` times as far as the original context. Llama 3's scaling is already part of its own number.
    """
    own: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor") or 1.0
    if own is None or kind not in ("linear", "dynamic", "yarn", "llama3"):
        return own
    original = rope.get("original_max_position_embeddings") or own
    return own if kind == "llama3" and original < own else max(own, int(original * factor))


def check_window(model: PreTrainedModel, longest: int) -> None:
    """Refuse sequences that a sliding window would cut: eviction and replay support full attention only.

    ``longest`` is the number of tokens of the longest sequence, prompt and completion.
    """
    types = getattr(model.config, "layer_types", None)
    slides = getattr(model.config, "use_sliding_window", True) if types is None else "sliding_attention" in types
    window: int | None = getattr(model.config, "sliding_window", None) if slides else None
    if window is not None and longest > window:
        raise UserError(
            f"{type(model).__name__} uses sliding-window attention (sliding_window={window}), and sequences of up to "
            f"{longest} tokens exceed the window: only full attention can be evicted from. Keep prompt and completion "
            "within the window, or choose a full-attention model such as Qwen2, Qwen3 or Llama."
        )
