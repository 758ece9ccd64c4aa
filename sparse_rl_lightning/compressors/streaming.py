"""StreamingLLM: keep attention sinks and the most recent tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import CachedEntries, score_entries
from sparse_rl_lightning.records import LayerState


class StreamingLLM(Compressor):
    """Keep the first ``num_sinks`` tokens and the most recent ones (arXiv 2309.17453), the cheapest rule of all.

    Keys keep the rotation of their true positions; the paper renumbers them inside the cache. ``window`` has no effect
    here, since the whole budget except the sinks goes to the most recent tokens.
    """

    num_queries = 0

    def score(self, layer: LayerState) -> Tensor:
        """The position of each entry: (S, H, N)."""
        return layer.positions.to(torch.float32)

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return score_entries(entries, "position")
