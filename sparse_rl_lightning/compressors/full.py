"""FullKV: the full cache, nothing is ever evicted."""

from __future__ import annotations

from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.records import LayerState


class FullKV(Compressor):
    """Keep every entry: the dense baseline. Slots are sized for the longest prompt plus the longest completion."""

    evicts = False
    num_queries = 0

    def __init__(self) -> None:
        super().__init__(budget=1, buffer=1, num_sinks=0, window=1)

    def score(self, layer: LayerState) -> Tensor:
        """Equal scores, which the engine never reads."""
        return layer.valid.to(layer.keys.dtype)
