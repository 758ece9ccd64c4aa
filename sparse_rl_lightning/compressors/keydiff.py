"""KeyDiff: keep the keys that differ most from the others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import live_entries
from sparse_rl_lightning.ops import CachedEntries, score_entries
from sparse_rl_lightning.records import LayerState


class KeyDiff(Compressor):
    """Evict the keys most similar to the mean direction of all keys (arXiv 2504.15364).

    The mean is taken over the keys in the slot, as in the paper's block-wise eviction: keys evicted earlier do not
    count.
    """

    num_queries = 0

    def score(self, layer: LayerState) -> Tensor:
        """The negative cosine to the mean of the normalized keys: (S, H, N) from -1 to 1."""
        unit = F.normalize(live_entries(layer.keys, layer.valid), dim=-1)
        mean_direction = F.normalize(unit.sum(dim=2, keepdim=True), dim=-1)
        return -(unit * mean_direction).sum(dim=-1)

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return score_entries(entries, "key_difference")
