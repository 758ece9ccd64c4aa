"""Attention under death steps: the query at q sees the key at k if and only if ``k <= q < death[k]``.

There are three ways to the same numbers. Small inputs use one mask. Long ones on the CPU are cut into chunks of
queries, so that no mask exceeds :data:`MASK_BYTES`, and the backward pass computes each chunk's mask again. On CUDA
FlexAttention needs no mask: blocks in which everything is dead are skipped, and fully visible ones need no check. It is
compiled, for whatever shapes a training meets, or an error: without its kernel it would store all scores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from sparse_rl_lightning.ops.attention import entries_share
from sparse_rl_lightning.replay.masked_attention import MASK_BYTES, masked_attention

BLOCK = 128
"""Number of queries and keys in a block of FlexAttention."""
MAX_COMPILES = 64
"""Kernels of FlexAttention in one process; torch's own limit, 8, is for mistakes."""


def death_attention(
    query: Tensor, key: Tensor, value: Tensor, death: Tensor | None, scale: float, sinks: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention (B, Hq, T, D) with gradient under the deaths of one layer: FlexAttention on CUDA, masks elsewhere.

    A single block has a mask on CUDA too: nothing could be skipped, and it would need further kernels.

    ``death`` (B, H, T) is the first query that no longer sees each key, None if all later ones do, ``sinks`` (Hq) are
    the layer's learned ones, if it has some, and ``ends`` (B) the numbers of tokens of the sequences, if nothing behind
    them is read; the other arguments are as in :func:`~sparse_rl_lightning.replay.masked_attention.masked_attention`.
    Queries may be the last of T alone.
    """
    if query.is_cuda and query.shape[2] > BLOCK:
        return flex_death_attention(query, key, value, death, scale, compiled=True, sinks=sinks, ends=ends)
    return sdpa_death_attention(query, key, value, death, scale, sinks=sinks)


def sdpa_death_attention(
    query: Tensor, key: Tensor, value: Tensor, death: Tensor | None, scale: float, mask_bytes: int = MASK_BYTES,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention by scaled_dot_product_attention under boolean masks of at most ``mask_bytes``; arguments as above."""
    step = torch.arange(key.shape[2], device=key.device)

    def alive(start: int, stop: int) -> Tensor:
        queries, keys = step[start:stop, None], step[:stop]
        causal = keys <= queries
        return causal[None, None, None] if death is None else causal & (queries < death[:, :, None, None, :stop])

    return masked_attention(query, key, value, alive, scale, mask_bytes, sinks)


def flex_death_attention(
    query: Tensor, key: Tensor, value: Tensor, death: Tensor | None, scale: float, compiled: bool,
    sinks: Tensor | None = None, ends: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """FlexAttention with the deaths as its ``mask_mod``; arguments as above.

    ``compiled=False`` runs PyTorch's slow version, which stores all scores and, on the CPU, has no backward pass.
    """
    device_type = query.device.type
    # queries and keys come rotated, in float32: torch before 2.13 mixes no types
    if torch.is_autocast_enabled(device_type):
        query, key, value = (tensor.to(torch.get_autocast_dtype(device_type)) for tensor in (query, key, value))
    group, length = query.shape[1] // key.shape[1], key.shape[2]
    first, more = divmod(length - query.shape[2], BLOCK)  # queries that are left out: whole blocks, and the rest
    query = F.pad(query, (0, 0, more, 0)) if more else query
    dies = key.new_full(key.shape[:3], length, dtype=torch.int32) if death is None else death
    # no number, since kernels would be compiled for each, and filled where it is read: a copy would wait
    start = torch.full((), first * BLOCK, device=key.device)

    def alive(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < dies[b, h // group, k])

    def alive_later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return alive(b, h, q + start, k)

    blocks = death_blocks(dies, group, alive_later if first else alive, first, ends)
    flex: Any = flex_attention
    if compiled:
        flex = compile_flex()
        for tensor in (query, key, value, dies, *blocks.as_tuple()):
            if isinstance(tensor, Tensor):  # or a batch of as many sequences as there are heads would be another case
                torch._dynamo.mark_static(tensor, 1)
    options = {"block_mask": blocks, "scale": scale, "enable_gqa": group > 1}
    if sinks is None:
        plain: Tensor = flex(query, key, value, **options)
        return plain[:, :, more:] if more else plain
    out, aux = flex(query, key, value, return_aux=AuxRequest(lse=True), **options)
    result: Tensor = out * entries_share(aux.lse, sinks[:, None]).unsqueeze(-1)
    return result[:, :, more:].to(out.dtype)


def death_blocks(death: Tensor, group: int, alive: Any, first: int = 0, ends: Tensor | None = None) -> BlockMask:
    """The blocks of queries and keys that FlexAttention computes, derived from deaths (B, H, T) without pairwise masks.

    ``group`` is the number of query heads per KV head, ``alive`` the ``mask_mod`` of blocks neither dead nor visible,
    ``first`` the first block of queries. Queries in blocks behind the ``ends`` (B) of their sequences see their own
    block alone.
    """
    length = death.shape[-1]
    count = -(-length // BLOCK)
    padded = F.pad(death, (0, count * BLOCK - length), value=0).view(*death.shape[:-1], count, BLOCK)
    latest, earliest = padded.amax(-1)[..., None, :], padded.amin(-1)[..., None, :]  # padding is never fully visible
    block = torch.arange(count, device=death.device)
    key, query = block, block[first:, None]
    before = key < query
    if ends is not None:
        before = before & (query * BLOCK < ends[:, None, None, None])
    some = (key == query) | (before & (latest > query * BLOCK))  # a token sees itself
    whole = before & (earliest >= (query + 1) * BLOCK)
    partial, full = (_listed(t.repeat_interleave(group, dim=1)) for t in (some & ~whole, whole & some))
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=alive, seq_lengths=(length - first * BLOCK, length)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of key blocks (B, H, Q) chosen for each query block, and their indices (B, H, Q, K), chosen first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1).to(torch.int32), order.to(torch.int32)


@cache
def compile_flex(backend: Any = "inductor") -> Any:
    """FlexAttention as kernels, one for one sequence and one for more, of each type and with gradients or without.

    What cannot be compiled, or not once more, raises an error.
    """
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    return torch._dynamo.config.patch(recompile_limit=MAX_COMPILES)(compiled)
