"""TOVA: keep what the newest token attends to."""

from __future__ import annotations

from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import CachedEntries, score_entries, window_importance
from sparse_rl_lightning.ops.entries import shared_scores
from sparse_rl_lightning.ops.window_importance import cached_importance
from sparse_rl_lightning.records import LayerState


class TOVA(Compressor):
    """Evict what the newest token attends to least, on average over all heads of the layer (arXiv 2401.06104).

    All heads of a layer keep the same tokens. The paper evicts one token at every step, which is ``buffer=1``; it
    protects neither sinks (``num_sinks=0``) nor more than the newest token (``window=1``, which in the paper depends on
    its attention to itself).
    """

    num_queries = 1

    def score(self, layer: LayerState) -> Tensor:
        """Attention of the last query, a mean over the layer's query heads: (S, H, N)."""
        attention = window_importance(
            layer.queries.to(layer.keys.dtype),
            layer.query_positions,
            layer.keys,
            layer.lengths,
            layer.positions,
            layer.scale,
            window=0,
            group_reduction="mean",
            pooling="none",
        )
        return shared_scores(attention, layer.positions, layer.valid, "mean")

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        attention = cached_importance(entries, window=0, group_reduction="mean", pooling="none")
        return score_entries(entries, "shared", given=attention)
