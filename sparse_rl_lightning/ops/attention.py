"""Attention in plain torch: of whole sequences, of the last tokens of one, and beside learned sinks.

A learned sink is one more logit per query head, which takes its share of the softmax and has no value. With a sink s
the result over logits l is sum(exp(l_i) v_i) / (sum(exp(l_i)) + exp(s)): the result without it, times
sigmoid(logsumexp(l) - s). Where no log-sum-exp is at hand, the sink is an additional key: keys get one more element, 1
in the sink's and 0 in all others, where queries have s / scale.
"""

from __future__ import annotations

from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.varlen import varlen_attn

WINDOW_BLOCK = 256  # queries that attend to a window at the same time, if it is shorter
MASK_SIZE = 2**27
"""Pairs of a query and a key in one mask: its copy in the queries' type is larger, and kernels count in 32 bits."""
HALF = (torch.bfloat16, torch.float16)
HAS_VARLEN = "num_splits" in signature(varlen_attn).parameters  # else results could depend on the batch
FLASH_WIDTH, FLASH_CAPABILITY = 256, (8, 0)  # head sizes and cards that FlashAttention takes
VARLEN_MULTIPLE = 8  # of head sizes
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
    sink_column = (sinks / scale).to(query.dtype)[..., None, None].expand(*query.shape[:-1], 1)
    query = F.pad(torch.cat([query, sink_column], dim=-1), (0, more - 1))
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
    if query.device.type == "cuda" and sinks is None and _has_varlen(value):
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


def _has_varlen(value: Tensor) -> bool:
    """Whether torch has a kernel for packed sequences with such values on their GPU: FlashAttention's."""
    return HAS_VARLEN and value.shape[-1] % VARLEN_MULTIPLE == 0 and _has_flash(value)


def _has_flash(value: Tensor) -> bool:
    """Whether torch has FlashAttention for such values on their GPU."""
    fits = value.dtype in HALF and value.shape[-1] <= FLASH_WIDTH
    allowed: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return fits and allowed and torch.cuda.get_device_capability(value.device) >= FLASH_CAPABILITY


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attention of the last tokens of a sequence over all of it, or a window: (t, Hq, D) queries on (T, H, D) keys."""
    length, total = len(query), len(key)
    window = window if window < total else 0
    if not window and length == total:
        return _attention(query, key, value, None, scale, sinks)
    if not window and sinks is None and value.device.type == "cuda" and value.dtype in (*HALF, torch.float32):
        return _attention(query, key, value, causal_lower_right(length, total), scale)
    # no block of queries sees more than its own keys and a window before them
    block, before = max(window, WINDOW_BLOCK) if window else length, total - length
    block = max(1, min(block, MASK_SIZE // (window + block if window else total)))
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        keys = slice(max(0, before + start + 1 - window) if window else 0, before + stop)
        mask = _seen(stop - start, keys.stop - keys.start, window, query.device)
        parts.append(_attention(query[start:stop], key[keys], value[keys], mask, scale, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _seen(length: int, total: int, window: int, device: torch.device) -> Tensor | None:
    """The keys (1, t, T) that the last queries of a sequence see; None if these are all of its queries, and causal."""
    if length == total and not 0 < window < total:
        return None
    index = torch.arange(total, device=device)
    last = index[total - length :, None]
    return ((index <= last) & (index > last - window) if window else index <= last)[None]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    keys, values = (t.transpose(0, 1) for t in (key, value))
    return visible_attention(query.to(value.dtype), keys, values, mask, scale, sinks).to(query.dtype)


def visible_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention (Q, Hq, D) over keys and values (H, N, D).

    ``mask`` (H, Q, N), or (1, Q, N) for all heads, says which entries a query sees; None is causal, for Q = N, and a
    causal bias of torch is for the last queries.
    """
    group, query = query.shape[1] // len(keys), query.transpose(0, 1)[None]
    keys, values = keys.to(values.dtype)[None], values[None]
    has_mask = not (mask is None or isinstance(mask, CausalBias))
    # the grouped form of torch's attention is slow on the CPU, and on a GPU without FlashAttention, which has no masks
    is_grouped = values.device.type == "cuda" and sinks is None and not has_mask and _has_flash(values)
    if not is_grouped:
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
    if mask is not None and has_mask:
        mask = (mask if len(mask) == 1 else mask.repeat_interleave(group, dim=0))[None]
    options = {"enable_gqa": True} if is_grouped else {}
    return torch_attention(query, keys, values, mask, scale, sinks, **options)[0].transpose(0, 1)
