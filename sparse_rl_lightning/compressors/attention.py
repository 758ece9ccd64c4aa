"""The attention of recent queries, for scores that are made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.entries import live_entries
from sparse_rl_lightning.ops.window_importance import group_logits
from sparse_rl_lightning.records import LayerState


def recent_attention(layer: LayerState) -> Tensor:
    """Probabilities (S, H, G, A, N) that each recent query pays to each live entry before it; 0 everywhere else.

    The G query heads that share a KV head come one by one, and the A queries as they lie in the ring, so the newest is
    where ``layer.query_positions`` is largest. A place of the ring that is still empty pays nothing.
    """
    keys = live_entries(layer.keys, layer.valid)
    logits = group_logits(layer.queries, keys, layer.scale)
    past = layer.positions[:, :, None, :] <= layer.query_positions[:, None, :, None]
    hidden = ~(layer.valid[:, :, None, :] & past).unsqueeze(2)
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).masked_fill(hidden, 0.0)
