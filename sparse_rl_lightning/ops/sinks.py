"""Learned sinks of attention: one more logit per query head, which takes its share of the softmax and has no value.

With a sink s the result over logits l is sum(exp(l_i) v_i) / (sum(exp(l_i)) + exp(s)): the result without it, times
sigmoid(logsumexp(l) - s). Where no log-sum-exp is at hand, the sink is a key of its own: keys get one more element, 1
in the sink's and 0 in all others, where queries have s / scale.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
