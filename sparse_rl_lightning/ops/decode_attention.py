"""decode_attention: attention of one new token per slot over the slot's live entries; append_attend writes it first."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.append import reference as append_reference
from sparse_rl_lightning.ops.attention import entries_share
from sparse_rl_lightning.ops.checks import check_runs
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, accumulation_dtype, gather_heads

MAX_SPLIT = 768  # entries of a head that one block of the CUDA kernels reads at most, as kMaxSplit in attention.h


def decode_attention(
    pools: KVPools,
    slots: Tensor,
    query: Tensor,
    scale: float,
    max_length: int,
    *,
    lse: Tensor | None = None,
    probs: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per slot over all live entries, with grouped KV heads and float32 sums.

    A head without entries gives zeros (and a log-sum-exp of -inf). A row's result depends only on its own slot, bit for
    bit.

    Args:
        pools: Pools of one layer, (S, H).
        slots: Slots (B), int64, -1 for a row to skip.
        query: Queries (B, Hq, D); Hq is a multiple of H, the heads of a group are adjacent.
        scale: Factor on q.k before the softmax.
        max_length: Upper bound of the entries of a head; the capacity will do.
        lse: Output (B, Hq), float32: the log of the sum of the exponentials of the scaled logits, without sinks.
        probs: Output (B, Hq, M), float32, with M >= max_length: the probability of each entry, 0 behind the last.
        sinks: Learned sinks (Hq) of the layer, which take their share of the result and of ``probs``.

    Returns:
        The result (B, Hq, D), of the query's type.

    Raises:
        RuntimeError: If a head holds more than ``max_length`` entries; on a GPU by ``pools.raise_errors``.
    """
    out = torch.empty_like(query)
    if sinks is not None and lse is None:
        lse = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
    call(
        "decode_attention", pools.keys, query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, scale,
        max_length, out, lse, probs, empty_partials(query, max_length), pools.errors,
    )  # fmt: skip
    if sinks is None or lse is None:
        return out
    share = entries_share(lse, sinks).unsqueeze(-1)
    if probs is not None:
        probs.mul_(share)
    return (out * share).to(out.dtype)


def empty_partials(query: Tensor, most_entries: int) -> Tensor | None:
    """Memory for what the splits of heads of up to ``most_entries`` leave, None if there is one split.

    For every query (B, Hq, D) and split (P): the sums of the values (D), the largest logit and the sum of exponentials.
    """
    splits = -(-most_entries // MAX_SPLIT)
    if splits <= 1:
        return None
    rows, heads, dim = query.shape
    return query.new_empty(rows, heads, splits, dim + 2, dtype=accumulation_dtype(query.dtype))


def reference(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, scale: float,
    max_length: int, out: Tensor, lse: Tensor | None, probs: Tensor | None, partials: Tensor | None = None,
    errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``decode_attention`` in PyTorch."""
    if probs is not None and probs.shape[2] < max_length:
        raise UserError(f"probs has room for {probs.shape[2]} entries, max_length is {max_length}.")
    check_runs(slots, offsets, lengths, max_length, len(key_pool))
    counts = lengths[slots.clamp(min=0)] * (slots >= 0)[:, None]  # (B, H)
    width = int(counts.max()) if counts.numel() else 0
    rows, live = gather_heads(offsets[slots.clamp(min=0)], counts, width)
    result, total, shares = attend_rows(query, key_pool, value_pool, rows, live, scale)
    out.copy_(result)
    if lse is not None:
        lse.copy_(total)
    if probs is not None:
        probs.zero_()[..., :width] = shares


def attend_rows(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, rows: Tensor, live: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention of queries (B, Hq, D) over the ``live`` rows (B, H, N) of the pools, at least in float32.

    Returns:
        The result (B, Hq, D), the log-sum-exp of the scaled logits (B, Hq), and the probabilities (B, Hq, N).
    """
    dtype = accumulation_dtype(query.dtype)
    keys, values = key_pool[rows].to(dtype), value_pool[rows].to(dtype)  # (B, H, N, D)
    batch, heads, _ = rows.shape
    grouped = query.to(dtype).view(batch, heads, query.shape[1] // heads, query.shape[2])  # (B, H, G, D)
    dead = ~live.unsqueeze(2)
    logits = (grouped @ keys.mT * scale).masked_fill(dead, -torch.inf)
    total = logits.logsumexp(dim=-1, keepdim=True)
    shares = (logits - total.masked_fill(total == -torch.inf, 0.0)).exp().masked_fill(dead, 0.0)
    # a head without entries repeats a row of free memory with any content: its weights are 0, and so is the result
    result = shares @ values.masked_fill(dead.mT, 0.0)
    return result.flatten(1, 2), total.flatten(1), shares.flatten(1, 2)


register("decode_attention", reference)


def append_attend(
    pools: KVPools, slots: Tensor, seen: Tensor, projected: Tensor, query_ring: Tensor | None,
    transform: QKTransform, scale: float, max_length: int,
) -> Tensor:  # fmt: skip
    """Write one token per slot, and attend over the slot's entries with its query, that token included.

    Arguments, results and errors are those of :func:`~sparse_rl_lightning.ops.append` and
    :func:`~sparse_rl_lightning.ops.decode_attention`, bit for bit.

    Args:
        pools: Pools of one layer, (S, H); lengths grow by one.
        slots: Slots (B), int64, each at most once, -1 for a row to skip.
        seen: Positions (S), int64, of each slot's new token.
        projected: Queries, keys and values (B, Hq + 2 H, D) of the new tokens.
        query_ring: Recent queries (S, Hq, A, D).
        transform: Norms and angles of queries and keys.
        scale: Factor on q.k before the softmax.
        max_length: Upper bound of the entries of a head, the new one among them.

    Returns:
        The result (B, Hq, D), zeros in rows to skip.
    """
    rows, heads, dim = projected.shape
    query = projected.new_empty(rows, max(heads - 2 * pools.offsets.shape[-1], 0), dim)
    out = torch.empty_like(query)
    call(
        "append_attend", pools.keys, projected, transform.query_norm, transform.key_norm, transform.epsilon,
        transform.cos, transform.sin, slots, seen, pools.offsets, pools.capacities, pools.keys, pools.values,
        pools.positions, pools.lengths, query_ring, query, scale, max_length, out,
        empty_partials(query, max_length), pools.errors,
    )  # fmt: skip
    return out


def reference_of_both(
    projected: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float, cos: Tensor | None,
    sin: Tensor | None, slots: Tensor, seen: Tensor, offsets: Tensor, capacities: Tensor, key_pool: Tensor,
    value_pool: Tensor, position_pool: Tensor, lengths: Tensor, query_ring: Tensor | None, query: Tensor, scale: float,
    max_length: int, out: Tensor, partials: Tensor | None, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``append_attend`` in PyTorch."""
    append_reference(
        projected, query_norm, key_norm, epsilon, cos, sin, slots, seen, offsets, capacities, key_pool, value_pool,
        position_pool, lengths, query_ring, query,
    )  # fmt: skip
    reference(query, key_pool, value_pool, slots, offsets, lengths, scale, max_length, out, None, None)


register("append_attend", reference_of_both)
