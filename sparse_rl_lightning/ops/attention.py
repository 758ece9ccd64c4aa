"""Attention in plain torch: of whole sequences, of the last tokens of one, and beside learned sinks.

A learned sink is one more logit per query head, which takes its share of the softmax and has no value. With a sink s
the result over logits l is sum(exp(l_i) v_i) / (sum(exp(l_i)) + exp(s)): the result without it, times
sigmoid(logsumexp(l) - s). Where no log-sum-exp is at hand, the sink is a key of its own: keys get one more element, 1
in the sink's and 0 in all others, where queries have s / scale.
"""

from __future__ import annotations

from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

WINDOW_BLOCK = 256  # queries that attend to a window at the same time, if it is shorter
HALF = (torch.bfloat16, torch.float16)
HAS_VARLEN = "num_splits" in signature(varlen_attn).parameters  # else results could depend on the batch
ALIGNMENT = 8  # elements: attention on GPUs wants rows of whole words of 16 bytes


def entries_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The probability (...) that entries with this log-sum-exp (...) have beside sinks, which broadcast to it."""
    return (lse - sinks.to(lse.dtype)).sigmoid()


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Torch's scaled_dot_product_attention, with gradient also of the sinks if there are any.

    Args:
        query: Queries (..., Hq, t, D).
        key: Keys (..., H, T, D).
        value: Values (..., H, T, D).
        mask: Pairs that see each other, bool, broadcasting to (..., Hq, t, T); None is causal, for t = T.
        scale: Factor of the logits.
        sinks: Sinks, broadcasting to (..., Hq).
        options: Further arguments of torch's function.

    Returns:
        The result (..., Hq, t, D).
    """
    length, width = query.shape[-2:]
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, sinks, scale)
        # seen by every query: by the first column of a mask, or as the first token
        query, mask = (F.pad(query, (0, 0, 1, 0)), None) if mask is None else (query, F.pad(mask, (1, 0), value=True))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, **options
    )
    return out if sinks is None else out[..., -length:, :width]


def _with_sink(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (..., Hq, t, D'), and keys and values (..., H, 1 + T, D') that begin with the sink's."""
    width = key.shape[-1]
    more = ALIGNMENT - width % ALIGNMENT
    asked = (sinks / scale).to(query.dtype)[..., None, None].expand(*query.shape[:-1], 1)
    query = F.pad(torch.cat([query, asked], dim=-1), (0, more - 1))
    key, value = (F.pad(t, (0, more, 1, 0)) for t in (key, value))
    key[..., 0, width] = 1
    return query, key, value


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], borders: Tensor, scale: float, window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of whole sequences, each causal within itself, in one launch where torch has a kernel for that.

    Args:
        query: Queries (R, Hq, D): sequences one after the other, then padding.
        key: Keys (R, H, D).
        value: Values (R, H, D).
        lengths: Lengths (P) of the sequences.
        borders: Rows (P + 1,), int32, where they begin, and the end of the last.
        scale: Factor of the logits.
        window: Number of tokens that a token sees, itself included; 0 for all before it.
        sinks: Learned sinks (Hq), which that kernel does not know.

    Returns:
        The result (R, Hq, D), zeros in the padding.
    """
    out, rows, longest = torch.zeros_like(query), sum(lengths), max(lengths)
    if query.device.type == "cuda" and value.dtype in HALF and HAS_VARLEN and sinks is None:
        q, k = query[:rows].to(value.dtype), key[:rows].to(value.dtype)
        # one split, so that a sequence's result is the same in any batch
        packed = varlen_attn(
            q, k, value[:rows], borders, borders, longest, longest, scale=scale, window_size=(window - 1, 0),
            enable_gqa=True, num_splits=1,
        )  # fmt: skip
        assert isinstance(packed, Tensor)
        out[:rows] = packed
        return out
    for start, stop in pairwise([0, *accumulate(lengths)]):
        out[start:stop] = causal_attention(query[start:stop], key[start:stop], value[start:stop], scale, window, sinks)
    return out


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attention of the last tokens of a sequence over all of it, or a window: (t, Hq, D) queries on (T, H, D) keys."""
    if 0 < window < len(key):  # no block of queries sees more than its own keys and a window before them
        block, before = max(window, WINDOW_BLOCK), len(key) - len(query)
        spans = [(i, min(i + block, len(query))) for i in range(0, len(query), block)]
        first = [max(0, before + start + 1 - window) for start, _ in spans]
        parts = [
            _attention(query[i:j], key[k : before + j], value[k : before + j], scale, window, sinks)
            for (i, j), k in zip(spans, first, strict=True)
        ]
        return torch.cat(parts)
    return _attention(query, key, value, scale, window, sinks)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    length, total, mask = len(query), len(key), None
    if length < total or 0 < window < total:
        index = torch.arange(total, device=query.device)
        last = index[total - length :, None]
        mask = ((index <= last) & (index > last - window) if window else index <= last)[None]
    keys, values = (t.transpose(0, 1) for t in (key, value))
    return visible_attention(query.to(value.dtype), keys, values, mask, scale, sinks).to(query.dtype)


def visible_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention (Q, Hq, D) over keys and values (H, N, D).

    ``mask`` (H, Q, N), or (1, Q, N) for all heads, says which entries a query sees; None is causal, for Q = N.
    """
    group = query.shape[1] // len(keys)
    # each KV head is repeated: the grouped form of torch's attention is slow on the CPU
    keys, values = (t.to(values.dtype).repeat_interleave(group, dim=0)[None] for t in (keys, values))
    if mask is not None:
        mask = (mask if len(mask) == 1 else mask.repeat_interleave(group, dim=0))[None]
    return torch_attention(query.transpose(0, 1)[None], keys, values, mask, scale, sinks)[0].transpose(0, 1)
