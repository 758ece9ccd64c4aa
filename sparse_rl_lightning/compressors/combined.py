"""Combined: one score from several compressors, and one set of tokens for all heads of a layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import normalized_ranks, standardized
from sparse_rl_lightning.compressors.wrapped import SIZES, Wrapped
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.ops.entries import HeadReduction, shared_scores
from sparse_rl_lightning.records import LayerState

Normalization = Literal["rank", "standard", "none"]
"""Ways to make scores of different heads or methods comparable: ranks, mean 0 and deviation 1, or not at all."""


class Combined(Wrapped):
    """Keep what several methods value, or keep the same tokens in all KV heads of a layer, or both.

    The scores of each method are made comparable within each head, then added with their weights. ``across_heads``
    gives a token one score in all heads that have it: its score in the head that values it most (``max``, so the set is
    close to a union of what the heads would keep) or the average (``mean``). This is needed if memory is shared by all
    heads, as in paged caches of inference engines, and for comparisons with methods that work so.

    Budget, buffer and all other sizes are taken from the methods, which must agree. Each method gets the number of
    queries that it reads, and its running numbers.

    Args:
        compressors: Methods to combine, one or more.
        weights: Positive numbers, one per method; null for equal ones.
        normalization: Scale of the scores: "rank" compares ranks, "standard" standard deviations from the mean, "none"
            raw scores.
        across_heads: Reduction "max" or "mean" for one set of tokens per layer, null for a set per head.
    """

    def __init__(
        self,
        compressors: list[Compressor],
        weights: list[float] | None = None,
        normalization: Normalization = "rank",
        across_heads: HeadReduction | None = None,
    ) -> None:
        name = type(self).__name__
        if not compressors:
            raise UserError(f"{name}: give at least one compressor.")
        super().__init__(compressors)
        for method in compressors:
            _check_sizes(name, compressors[0], method)
        check_choice("normalization", normalization, Normalization, name)
        if across_heads is not None:
            check_choice("across_heads", across_heads, HeadReduction, name)
        weights = [1.0] * len(compressors) if weights is None else list(weights)
        if len(weights) != len(compressors):
            raise UserError(
                f"{name}: weights must be {len(compressors)} numbers, one per compressor, got weights={weights}."
            )
        for index, weight in enumerate(weights):
            check_number(f"weights[{index}]", weight, above=0, owner=name)
        self.weights = weights
        self.normalization: Normalization = normalization
        self.across_heads: HeadReduction | None = across_heads

    def score(self, layer: LayerState) -> Tensor:
        """The weighted sum (S, H, N), with ``across_heads`` the same for a token in every head."""
        scores = self.part_scores(layer)
        unranked = [score.isnan() for score in scores]  # a rank would hide it
        if self.normalization != "none":
            comparable = normalized_ranks if self.normalization == "rank" else standardized
            scores = [comparable(score, layer.valid) for score in scores]
        total = scores[0] * self.weights[0]
        for weight, score in zip(self.weights[1:], scores[1:], strict=True):
            total = total + weight * score
        if self.across_heads is not None:
            total = shared_scores(total, layer.positions, layer.valid, self.across_heads)
        for mask in unranked:
            total = total.masked_fill(mask & layer.valid, torch.nan)
        return total

    def __repr__(self) -> str:
        hidden = ("_", "needs_")  # derived from the methods, which show their budget and sizes
        options = {n: v for n, v in vars(self).items() if n not in ("schedule", *SIZES) and not n.startswith(hidden)}
        arguments = ", ".join(f"{name}={value!r}" for name, value in {"compressors": self._parts, **options}.items())
        return f"{type(self).__name__}({arguments})"


def _check_sizes(name: str, first: Compressor, method: Compressor) -> None:
    """Refuse a method whose sizes differ from the first's."""
    first_sizes, sizes = _sizes(first), _sizes(method)
    for size in first_sizes:
        if first_sizes[size] != sizes[size]:
            raise UserError(
                f"{name}: all compressors inside must have the same {size}, but {type(first).__name__} has "
                f"{size}={first_sizes[size]} and {type(method).__name__} has {size}={sizes[size]}."
            )


def _sizes(method: Compressor) -> dict[str, str]:
    """The sizes of a method as a user gave them."""
    return {"budget": repr(method.schedule.plain)} | {size: repr(getattr(method, size)) for size in SIZES}
