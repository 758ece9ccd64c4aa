"""R-KV: keep entries that are attended to and not redundant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.snapkv import SnapKV
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.ops import CachedEntries, key_redundancy
from sparse_rl_lightning.ops.key_redundancy import cached_mixture
from sparse_rl_lightning.records import LayerState


class RKV(SnapKV):
    """Trade the importance of an entry against its redundancy (R-KV, arXiv 2505.24133).

    The score is ``mix_lambda * importance - (1 - mix_lambda) * softmax(redundancy)``: the importance is SnapKV's, the
    redundancy a key's mean cosine to the other keys, and its softmax runs over all live entries, the window included.
    The defaults with ``num_sinks=0`` are R-KV as Sparse-RL configures it; R-KV's own code has ``mix_lambda=0.07``.
    Kept entries stay in the order of their positions, while R-KV stores them in the order of their scores, on which
    its next pooling and its "last similar" key then depend.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        mix_lambda: Weight of the importance, from 0 to 1.
        similarity_threshold: Cosine above which two keys are similar, from -1 to 1; each key spares the last one
            similar to it.
        **options: Arguments of :class:`SnapKV`. Published R-KV is ``variant="decode"``; "original" sums over the
            queries, so its importance is up to ``window`` times larger.
    """

    def __init__(
        self,
        budget: int | LengthSchedule,
        *,
        mix_lambda: float = 0.1,
        similarity_threshold: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(budget, **options)
        check_number("mix_lambda", mix_lambda, least=0, most=1, owner="RKV")
        check_number("similarity_threshold", similarity_threshold, least=-1, most=1, owner="RKV")  # a cosine
        self.mix_lambda = mix_lambda
        self.similarity_threshold = similarity_threshold

    def score(self, layer: LayerState) -> Tensor:
        """Weighted importance minus weighted redundancy: (S, H, N)."""
        importance = super().score(layer)
        redundancy = key_redundancy(layer.keys, layer.valid.sum(dim=-1), self.similarity_threshold)
        share = redundancy.masked_fill(~layer.valid, -torch.inf).softmax(dim=-1).masked_fill(~layer.valid, 0.0)
        return self.mix_lambda * importance - (1 - self.mix_lambda) * share

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return cached_mixture(entries, super().score_cached(entries), self.mix_lambda, self.similarity_threshold)
