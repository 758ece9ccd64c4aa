"""Attention of a learner under masks that are never whole: in chunks of queries, each mask computed when needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl_lightning.ops.attention import torch_attention

MASK_BYTES = 2**26
"""Size limit in bytes of a mask on the CPU."""
BYTES_PER_PAIR = 5
"""Bytes per query and key: a bool, and the float32 that scaled_dot_product_attention converts it to."""

MaskOf = Callable[[int, int], Tensor]
"""Function from the first and last query (exclusive) to bool that broadcasts to (B, H, 1, queries, keys up to them)."""


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask_of: MaskOf, scale: float, mask_bytes: int = MASK_BYTES,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention by scaled_dot_product_attention under boolean masks of at most ``mask_bytes``, with gradient.

    A mask is shared only by the query heads of a KV head. At least one query is processed at a time.

    Args:
        query: Queries (B, Hq, T, D), or the last of them.
        key: Keys (B, H, T, D); H divides Hq.
        value: Values (B, H, T, D).
        mask_of: Function that gives the mask of a range of queries; called again in the backward pass.
        scale: Factor on query x key.
        mask_bytes: Size limit of one mask in bytes.
        sinks: Learned sinks (Hq).
    """
    batch, heads, length, _ = key.shape
    first = length - query.shape[2]
    grouped, keys, values = group_heads(query, key, value)
    grouped_sinks = None if sinks is None else sinks.view(heads, -1).repeat(batch, 1)  # (B x H, Hq / H)

    def attend(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        mask = mask_of(start, start + query.shape[2]).flatten(0, 1)
        return torch_attention(query, key, value, mask, scale, grouped_sinks)

    size = max(1, mask_bytes // (BYTES_PER_PAIR * batch * heads * length))
    if size >= length - first:
        return attend(grouped, keys, values, first).reshape(query.shape)
    chunks = []
    for start in range(first, length, size):
        stop = min(start + size, length)
        args = grouped[:, :, start - first : stop - first], keys[:, :, :stop], values[:, :, :stop], start
        # the graph would keep every mask until the backward pass
        chunks.append(checkpoint(attend, *args, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(chunks, dim=2).reshape(query.shape)


def group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B x H, Hq / H, T, D), and keys and values expanded to them.

    One mask then serves all query heads of a KV head.
    """
    batch, heads, length, width = key.shape
    grouped = query.reshape(batch * heads, -1, query.shape[2], width)
    shape = (*grouped.shape[:2], length, width)
    keys, values = (t.reshape(batch * heads, 1, length, width).expand(shape) for t in (key, value))
    return grouped, keys, values
