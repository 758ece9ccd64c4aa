"""Union: all heads of a layer keep the same tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor, check_choice
from sparse_rl_lightning.compressors.entries import normalized_ranks, standardized
from sparse_rl_lightning.compressors.heads import HeadReduction, across_heads
from sparse_rl_lightning.compressors.wrapper import Wrapper
from sparse_rl_lightning.records import LayerState

Normalization = Literal["rank", "standard", "none"]
"""How scores of different heads or methods are made comparable: their order, mean 0 and deviation 1, or not at all."""


class Union(Wrapper):
    """One set of tokens for all KV heads of a layer, chosen by any compressor's scores.

    A token counts as much as in the head that values it most (``reduction="max"``, so the set is close to a union of
    what the heads would keep) or as on average. Scores are made comparable in each head first. Needed where memory is
    shared by all heads, as in paged caches of inference engines, and for comparisons with methods that work so.

    Args:
        compressor: The compressor whose scores are reduced; budget and all other sizes are its own.
        reduction: "max" or "mean" over the heads.
        normalization: "rank" compares places, "standard" standard deviations from the mean, "none" raw scores.

    Raises:
        ValueError: If an option is unknown, or the compressor never evicts.
    """

    def __init__(
        self, compressor: Compressor, reduction: HeadReduction = "max", normalization: Normalization = "rank"
    ) -> None:
        super().__init__([compressor])
        check_choice(self, "reduction", reduction, HeadReduction)
        check_choice(self, "normalization", normalization, Normalization)
        self.reduction: HeadReduction = reduction
        self.normalization: Normalization = normalization

    def score(self, layer: LayerState) -> Tensor:
        """The reduced score, the same for a token in every head: (S, H, N)."""
        (scores,) = self.part_scores(layer)
        return across_heads(
            normalize(scores, layer.valid, self.normalization), layer.positions, layer.valid, self.reduction
        )


def normalize(scores: Tensor, valid: Tensor, how: Normalization) -> Tensor:
    """Scores that can be compared between heads and methods: (S, H, N)."""
    if how == "none":
        return scores
    return normalized_ranks(scores, valid) if how == "rank" else standardized(scores, valid)
