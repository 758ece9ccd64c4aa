"""The attention functions registered with transformers; the only file that knows its attention hooks.

Model keyword arguments reach the attention function, so the cache travels as one. A name that transformers'
mask interface does not know gets no mask at all: each function here brings its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.rollout.cache import SlotCache

SLOTS = "sparse_rl_slots"
REPLAY = "sparse_rl_replay"


@dataclass
class Prefill:
    """A forward pass over whole prompts that fills their slots."""

    cache: SlotCache
    slots: Tensor  # (P,)
    compressor: Compressor
    staging_bytes: int = 0  # largest K and V held beside the cache


@dataclass
class Decode:
    """A forward pass over one token for each of the first ``num_active`` slots; further rows are padding."""

    cache: SlotCache
    num_active: int


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: Prefill | Decode,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the rollout: causal over whole prompts, or one token over its slot's live entries."""
    layer: int = module.layer_idx  # type: ignore[assignment]  # nn.Module types every attribute as Tensor | Module
    cache = slots.cache
    if isinstance(slots, Prefill):
        slots.staging_bytes = max(slots.staging_bytes, key.nbytes + value.nbytes)
        cache.store_prompts(layer, slots.slots, query, key, value, slots.compressor)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=cache.geometry.scale, enable_gqa=True
        )
        return out.transpose(1, 2), None
    n = slots.num_active
    attended = cache.append_and_attend(layer, query[:n, :, 0], key[:n, :, 0], value[:n, :, 0])
    out = torch.zeros(query.shape[0], *attended.shape[1:], dtype=query.dtype, device=query.device)
    out[:n] = attended
    return out.unsqueeze(1), None  # (rows, 1, Hq, D)


def replay_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    death: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the learner under the sampler's evictions: the query at q sees the key at k iff k <= q < death."""
    num_groups, length = query.shape[1] // key.shape[1], query.shape[2]
    layer: int = module.layer_idx  # type: ignore[assignment]  # as above
    step = torch.arange(length, device=query.device)
    alive = step[:, None] < death[layer].unsqueeze(2)  # (B, H, query, key)
    mask = alive & (step[None, :] <= step[:, None])
    key, value, mask = (t.repeat_interleave(num_groups, dim=1) for t in (key, value, mask))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2), None


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model with another attention function, and give it its own back whatever happens."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


AttentionInterface.register(SLOTS, slot_attention)
AttentionInterface.register(REPLAY, replay_attention)
