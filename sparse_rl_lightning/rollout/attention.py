"""The attention functions registered with transformers; the only file that knows its attention hooks.

Model keyword arguments reach the attention function, so the cache travels as one. A name that transformers'
mask interface does not know gets no mask at all: each function here brings its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

REPLAY = "sparse_rl_replay"


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


AttentionInterface.register(REPLAY, replay_attention)
