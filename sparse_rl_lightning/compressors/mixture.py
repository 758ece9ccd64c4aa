"""Mixture: a weighted sum of several compressors' scores."""

from __future__ import annotations

from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor, check_choice
from sparse_rl_lightning.compressors.union import Normalization, normalize
from sparse_rl_lightning.compressors.wrapper import Wrapper
from sparse_rl_lightning.ranges import check_number
from sparse_rl_lightning.records import LayerState


class Mixture(Wrapper):
    """Keep what several methods value, by the weighted sum of their scores made comparable.

    Args:
        compressors: The methods; budget and all other sizes must be the same in all.
        weights: Positive numbers, one per method; null for equal ones.
        normalization: "rank" adds places, "standard" standard deviations from the mean, "none" raw scores.

    Raises:
        ValueError: If sizes differ, or weights do not fit.
    """

    def __init__(
        self,
        compressors: list[Compressor],
        weights: list[float] | None = None,
        normalization: Normalization = "rank",
    ) -> None:
        super().__init__(compressors)
        check_choice(self, "normalization", normalization, Normalization)
        weights = [1.0] * len(compressors) if weights is None else list(weights)
        if len(weights) != len(compressors):
            raise ValueError(
                f"Mixture: weights must be {len(compressors)} numbers, one per compressor, got weights={weights}."
            )
        for place, weight in enumerate(weights):
            check_number(f"weights[{place}]", weight, above=0, owner="Mixture")
        self.weights = weights
        self.normalization: Normalization = normalization

    def score(self, layer: LayerState) -> Tensor:
        """The weighted sum: (S, H, N)."""
        scores = [normalize(s, layer.valid, self.normalization) for s in self.part_scores(layer)]
        total = scores[0] * self.weights[0]
        for weight, score in zip(self.weights[1:], scores[1:], strict=True):
            total = total + weight * score
        return total
