"""KNorm: keep keys with a small norm, which attract attention."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import CachedEntries, score_entries
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.records import LayerState


class KNorm(Compressor):
    """Evict the keys with the largest L2 norm (arXiv 2406.11430).

    Models that normalize their keys (Qwen3) leave little to rank: there norms differ only by the learned scale, and
    before training by rounding.
    """

    num_queries = 0

    def score(self, layer: LayerState) -> Tensor:
        """The negative norm (S, H, N), in float32, since half precision would make many norms equal."""
        norm: Tensor = torch.linalg.vector_norm(layer.keys, dim=-1, dtype=accumulation_dtype(layer.keys.dtype))
        return -norm

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return score_entries(entries, "key_norm")
