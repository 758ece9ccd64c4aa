"""Attention of a learner under a mask that is never whole: chunk by chunk of queries, each mask made when needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MASK_BYTES = 2**26
"""Most bytes of a mask that exists at one time on the CPU."""
BYTES_PER_PAIR = 5
"""Of a query and a key: a bool, and the float32 that scaled_dot_product_attention turns it into."""

MaskOf = Callable[[int, int], Tensor]
"""From the first and the last query (exclusive) to (B, H, 1, queries, keys) bool, keys up to the last query."""


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask_of: MaskOf, scale: float, mask_bytes: int = MASK_BYTES
) -> Tensor:
    """scaled_dot_product_attention under boolean masks of at most ``mask_bytes``, with gradient.

    A mask is shared by the query heads of a KV head and by nothing else. At least one query is taken at a time.

    Args:
        query: (B, Hq, T, D).
        key: (B, H, T, D); H divides Hq.
        value: (B, H, T, D).
        mask_of: What a run of queries sees; asked again in the backward pass.
        scale: Factor on query x key.
        mask_bytes: Of one mask.

    Returns:
        (B, Hq, T, D).
    """
    batch, heads, length, width = key.shape
    # the query heads of a KV head become the heads, so that one mask serves them all by broadcasting
    grouped = query.reshape(batch * heads, -1, length, width)
    keys, values = (t.reshape(batch * heads, 1, length, width).expand_as(grouped) for t in (key, value))

    def attend(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        mask = mask_of(start, start + query.shape[2]).flatten(0, 1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

    size = max(1, mask_bytes // (BYTES_PER_PAIR * batch * heads * length))
    if size >= length:
        return attend(grouped, keys, values, 0).reshape(query.shape)
    chunks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        args = grouped[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop], start
        # the graph would hold every mask until the backward pass
        chunks.append(checkpoint(attend, *args, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(chunks, dim=2).reshape(query.shape)
