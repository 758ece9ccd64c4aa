"""Smoothed: scores that are averages over the compressions of a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.wrapped import Wrapped
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.ops.pools import live_entries
from sparse_rl_lightning.records import LayerState


class Smoothed(Wrapped):
    """Keep what another method has valued over time: an exponential average of its scores (InertiaKV, 2609.03515).

    At every compression an entry's average becomes ``decay`` times the one before plus ``1 - decay`` times its score,
    so one low score evicts nothing that was valued all along. It begins with the first score that is not 0, once the
    entry has left the window. The paper scores at every step, or at every fourth; here methods score when a slot is
    full, so a small ``buffer`` comes closer to it. It is for scores that can be compared over time, such as shares of
    attention; others are made so by ``Combined``, whose scores are ranks. The averages take a number per entry, which
    is set up at every step, so decode steps are not captured as CUDA graphs.

    Budget, buffer and all other sizes are those of the method.

    Args:
        compressor: Method whose scores are averaged.
        decay: Weight of the average before, from 0 (no average) to below 1.
    """

    score_field = "average"

    def __init__(self, compressor: Compressor, decay: float = 0.8) -> None:
        super().__init__([compressor])
        check_number("decay", decay, least=0, below=1, owner=type(self).__name__)
        self.decay = decay

    @property
    def state_fields(self) -> tuple[str, ...]:
        """Names of the method's numbers, and the average."""
        return (*super().state_fields, "average")

    def score(self, layer: LayerState) -> Tensor:
        """The average with the method's new score: (S, H, N), 0 in the window."""
        (scores,) = self.part_scores(layer)
        before = layer.state["average"]
        has_average = (before != 0) & before.isfinite()  # protected tokens scored +inf
        average = torch.where(has_average, self.decay * before + (1 - self.decay) * scores, scores)
        return average.masked_fill(~live_entries(layer.lengths - self.window, scores.shape[-1]), 0.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(compressor={self._parts[0]!r}, decay={self.decay!r})"
