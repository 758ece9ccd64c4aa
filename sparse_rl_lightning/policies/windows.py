"""Sliding windows: which layers have one, and what it means for a cache and for a replay.

A layer with a window of W lets the query at q see the keys at q - W + 1, ..., q, as transformers' masks do. So its
cache is never more than the last W tokens, whatever the compressor, and it needs no record: the key at k is seen until
the query at k + W. Compressors evict from the layers of full attention beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.evictions import EvictionRecord

LINEAR = "linear_attention"
"""The type of a layer that keeps a recurrent state in place of keys and values."""
GROWING = ("dynamic", "longrope")
"""Rotary types whose frequencies change when a sequence outgrows the original context."""


def layer_windows(config: Any) -> tuple[int, ...]:
    """The window (L) of each layer with attention in tokens, 0 for full attention; empty if no layer has one."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    config_class: Any = type(config)
    window: int | None = getattr(config, "sliding_window", None) if _knows_windows(config_class) else None
    if types is None:  # all layers alike
        slides = window is not None and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    if window is None or "sliding_attention" not in types:
        return ()
    return tuple(window if name == "sliding_attention" else 0 for name in types if name != LINEAR)


@lru_cache
def _knows_windows(config_class: type) -> bool:
    """Whether configurations of this class have windows; others keep a file's value, which their models never read."""
    return hasattr(config_class(), "sliding_window")


def binding_windows(config: Any, longest: int) -> tuple[int, ...]:
    """The windows (L) under which sequences of up to ``longest`` tokens are cached; empty for none.

    If all layers have windows, they count only where they cut something: sequences that fit are then as under full
    attention, and can be evicted from. Beside layers of full attention they always count, so that a sequence's
    evictions do not depend on the longest one of its batch.
    """
    windows = layer_windows(config)
    return windows if not all(windows) or longest > max(windows, default=0) else ()


def recorded_layers(config: Any, record: EvictionRecord) -> list[int]:
    """The numbers of the attention layers that a record speaks of: those of full attention, or all."""
    windows = layer_windows(config)
    return [layer for layer, window in enumerate(windows) if not window or record.num_layers == len(windows)] or list(
        range(record.num_layers)
    )


def deaths_by_layer(config: Any, record: EvictionRecord) -> Tensor | list[Tensor]:
    """The first query that no longer sees each key, (B, H, T) for each layer with attention: by eviction or window."""
    windows, death, length = layer_windows(config), record.death, record.length
    if not windows:
        return death
    passed = torch.arange(length, dtype=death.dtype, device=death.device).expand(death.shape[1:])
    recorded = dict(zip(recorded_layers(config, record), death, strict=True))
    deaths = []
    for layer, window in enumerate(windows):
        recorded_death = recorded.get(layer, passed + window)
        deaths.append(
            torch.minimum(recorded_death, passed + window) if window and layer in recorded else recorded_death
        )
    return deaths


def deaths_by_window(config: Any, sequences: Tensor) -> list[Tensor | None] | None:
    """As :func:`deaths_by_layer` where nothing is evicted: None for a layer of full attention, or if all are."""
    passed = torch.arange(sequences.shape[1], device=sequences.device, dtype=torch.int32)
    windows = layer_windows(config)
    heads = (len(sequences), config.num_key_value_heads, -1)
    return [(passed + window).expand(heads) if window else None for window in windows] or None


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary parameters of the layers of full attention, or of all layers."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layer_type = _full_kind(rope)
    return (rope[layer_type] or {}) if layer_type else rope  # null where these layers have no positions


def rotation_of(rotary: Any) -> tuple[Tensor | None, float]:
    """Frequencies, and scaling of cos and sin, in the layers of full attention; no frequencies if not rotary.

    Frequencies are those of the original context: a longer sequence, elsewhere, may have changed the others in place.
    """
    kinds: Any = getattr(rotary, "rope_type", "default")
    layer_type = _full_kind(kinds) if isinstance(kinds, dict) else ""
    name, prefix = (kinds[layer_type], f"{layer_type}_") if layer_type else (kinds, "")
    original = "original_" if name in GROWING else ""
    inv_freq: Tensor | None = getattr(rotary, f"{prefix}{original}inv_freq", None)
    return inv_freq, float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


def _full_kind(by_kind: dict[str, Any]) -> str:
    """The kind of layer, of those that differ in their rotation, that compressors evict from; empty if none differ."""
    return next((layer_type for layer_type in ("full_attention", "sliding_attention") if layer_type in by_kind), "")
