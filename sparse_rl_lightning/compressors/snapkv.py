"""SnapKV: keep what the most recent queries attend to."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import KVPools, score_importance
from sparse_rl_lightning.ops.importance import GroupReduction, Pooling
from sparse_rl_lightning.types import LayerState

Variant = Literal["decode", "original"]


class SnapKV(Compressor):
    """Keep the entries that the last ``window`` queries attend to most, pooled over neighbours (arXiv 2404.14469).

    ``variant="decode"`` with all defaults and ``num_sinks=0`` is the SnapKV of the R-KV repository, which Sparse-RL
    uses: softmax over the entries outside the window, mean over the queries. ``variant="original"`` is that of the
    SnapKV repository: softmax over all live entries under the causal mask, sum over the queries; its class defaults
    are ``num_sinks=0, window=64, kernel_size=5, pooling="avg"`` (``window=32`` in its model configurations). It picks
    entries per query head, on keys repeated for each of them; here a set belongs to a KV head, so with grouped queries
    ``group_reduction`` makes one score of the group ("mean" as in kvpress). Both originals score every compression
    with ``window`` queries; here means run over the queries there are.

    Args:
        budget: Tokens kept per layer and KV head after a compression.
        buffer: Tokens appended between two compressions.
        num_sinks: First positions of the sequence that are never evicted.
        window: Most recent tokens that are never evicted, and the number of queries that score the others.
        compress_prompt: Compress a prompt that does not fit the slot at the end of its prefill.
        kernel_size: Entries that pooling looks at, an odd number; 1 pools nothing.
        pooling: "max", "avg" or "none" over neighbouring entries.
        group_reduction: "max" of the logits over the query heads of a KV head before the softmax, or "mean" of their
            importance after softmax and pooling.
        variant: "decode" or "original".

    Raises:
        ValueError: If the numbers leave nothing to choose from, or an option is none of those listed.
    """

    def __init__(
        self,
        budget: int,
        buffer: int = 128,
        num_sinks: int = 4,
        window: int = 8,
        compress_prompt: bool = True,
        kernel_size: int = 7,
        pooling: Pooling = "max",
        group_reduction: GroupReduction = "max",
        variant: Variant = "decode",
    ) -> None:
        super().__init__(budget, buffer, num_sinks, window, compress_prompt)
        name = type(self).__name__
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"{name}: kernel_size must be an odd number of entries, got kernel_size={kernel_size}.")
        _check_choice(name, "pooling", pooling, Pooling)
        _check_choice(name, "group_reduction", group_reduction, GroupReduction)
        _check_choice(name, "variant", variant, Variant)
        self.kernel_size = kernel_size
        self.pooling: Pooling = pooling
        self.group_reduction: GroupReduction = group_reduction
        self.variant: Variant = variant

    def score(self, layer: LayerState) -> Tensor:
        """Pooled attention of the last queries: (S, H, N), 0 in the window."""
        pools = KVPools.from_dense(layer.keys, layer.keys, layer.valid.sum(dim=-1), layer.positions)
        return score_importance(
            pools,
            torch.arange(len(layer.lengths), device=layer.keys.device),
            layer.queries.to(layer.keys.dtype).contiguous(),
            layer.query_positions.contiguous(),
            layer.scale,
            layer.keys.shape[2],
            window=self.window,
            exclude_window=self.variant == "decode",
            group_reduction=self.group_reduction,
            query_reduction="mean" if self.variant == "decode" else "sum",
            pooling=self.pooling,
            kernel_size=self.kernel_size,
        )


def _check_choice(name: str, argument: str, value: str, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}: {argument} must be one of {', '.join(allowed)}, got {argument}={value!r}.")
