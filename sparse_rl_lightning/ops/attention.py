"""Attention over the slots of a cache, one query token per sequence."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, live: Tensor, scale: float) -> Tensor:
    """What one new token per slot reads from its live entries, with grouped KV heads.

    Args:
        query: (S, Hq, D).
        keys: (S, H, N, D).
        values: (S, H, N, D).
        live: (S, H, N) bool, at least one per row.
        scale: Factor on q.k before the softmax.

    Returns:
        (S, Hq, D).
    """
    slots, num_kv_heads, _, width = keys.shape
    grouped = query.reshape(slots, num_kv_heads, -1, width)  # (S, H, G, D): the group becomes the query dimension
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=live.unsqueeze(2), scale=scale)
    return out.flatten(1, 2)
