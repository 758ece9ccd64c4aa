"""R-KV: keep what is attended to and not said twice."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.snapkv import SnapKV, Variant
from sparse_rl_lightning.ops import KVPools, score_redundancy
from sparse_rl_lightning.ops.importance import GroupReduction, Pooling
from sparse_rl_lightning.types import LayerState


class RKV(SnapKV):
    """Trade the importance of an entry against its redundancy (R-KV, arXiv 2505.24133).

    The score is ``mix_lambda * importance - (1 - mix_lambda) * softmax(redundancy)``: the importance is SnapKV's, the
    redundancy a key's mean cosine to the other keys, its softmax runs over all live entries, the window included.
    The defaults with ``num_sinks=0`` are R-KV as Sparse-RL configures it; R-KV's own code has ``mix_lambda=0.07``.
    Kept entries stay in the order of their positions, while R-KV stores them in the order of their scores, on which
    its next pooling and its "last similar" key then depend.

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
        variant: How importance is measured, as in :class:`SnapKV`. Published R-KV is "decode"; "original" sums over
            the queries, so its importance is up to ``window`` times larger.
        mix_lambda: Weight of the importance, from 0 to 1.
        similarity_threshold: Cosine above which two keys are similar, from -1 to 1; each key spares the last of those
            similar to it.

    Raises:
        ValueError: If the numbers leave nothing to choose from, or an option is outside its range.
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
        mix_lambda: float = 0.1,
        similarity_threshold: float = 0.5,
    ) -> None:
        super().__init__(
            budget, buffer, num_sinks, window, compress_prompt, kernel_size, pooling, group_reduction, variant
        )
        if not 0 <= mix_lambda <= 1:
            raise ValueError(f"RKV: mix_lambda must be from 0 to 1, got mix_lambda={mix_lambda}.")
        if not -1 <= similarity_threshold <= 1:
            raise ValueError(
                f"RKV: similarity_threshold is a cosine and must be from -1 to 1, got "
                f"similarity_threshold={similarity_threshold}."
            )
        self.mix_lambda = mix_lambda
        self.similarity_threshold = similarity_threshold

    def score(self, layer: LayerState) -> Tensor:
        """Weighted importance minus weighted redundancy: (S, H, N)."""
        importance = super().score(layer)
        pools = KVPools.from_dense(layer.keys, layer.keys, layer.valid.sum(dim=-1))
        slots = torch.arange(len(layer.lengths), device=layer.keys.device)
        redundancy = score_redundancy(pools, slots, layer.keys.shape[2], self.similarity_threshold)
        share = redundancy.masked_fill(~layer.valid, -torch.inf).softmax(dim=-1).masked_fill(~layer.valid, 0.0)
        return self.mix_lambda * importance - (1 - self.mix_lambda) * share
