"""TriAttention: the mean query turned to the positions to come, plus the queries' spread around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import newest_position, standardized
from sparse_rl_lightning.compressors.query_statistics import QueryStatistics, resolve_statistics
from sparse_rl_lightning.compressors.rotary import pair_lengths, rotate_to_mean
from sparse_rl_lightning.errors import check_choice, check_number
from sparse_rl_lightning.ops.window_importance import GroupReduction, group_logits
from sparse_rl_lightning.records import LayerState


class TriAttention(Compressor):
    """Keep the keys that the mean query meets at future distances, by a trigonometric series (arXiv 2604.04921).

    Before rotation the queries of a head gather around one vector, so the logit of a key is a sum of cosines of its
    distance. The mean vector is rotated to the positions 1, 2, 4, ... up to ``max_offset`` after the next token; its
    mean product with the key is the first part of the score. The second adds, for every frequency, the length of the
    key times what the mean length of the queries exceeds the length of their mean by. Scores are standardized over
    the live entries of each query head, then reduced over the group. These are the formulas of the published code
    with per-head selection; it standardizes over the completion only, since it never evicts the prompt.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        statistics: File written by ``sparse-rl statistics``, or the statistics themselves.
        max_offset: Largest distance ahead, in tokens.
        group_reduction: "max" or "mean" over the query heads of a KV head.
        **sizes: Arguments of :class:`Compressor`.

    Raises:
        ValueError: If the file of statistics is missing or holds something else, ``max_offset`` is below 1,
            ``group_reduction`` is unknown, or :class:`Compressor` refuses an argument.
    """

    num_queries = 0
    needs_layer_index = True
    needs_rotation = "whole"

    def __init__(
        self,
        budget: int | LengthSchedule,
        statistics: str | QueryStatistics,
        *,
        max_offset: int = 65536,
        group_reduction: GroupReduction = "max",
        **sizes: Any,
    ) -> None:
        super().__init__(budget, **sizes)
        check_number("max_offset", max_offset, least=1, owner="TriAttention", whole=True)
        check_choice("group_reduction", group_reduction, GroupReduction, type(self).__name__)
        self.statistics = resolve_statistics(statistics, type(self).__name__)
        self.max_offset = max_offset
        self.group_reduction: GroupReduction = group_reduction

    def score(self, layer: LayerState) -> Tensor:
        """Standardized expectation over the distances to come: (S, H, N)."""
        mean, lengths, _ = self.statistics.layer(layer, type(self).__name__)
        offsets = 2 ** torch.arange(self.max_offset.bit_length(), device=mean.device)
        following = (newest_position(layer) + 1)[:, None]  # (S, 1)
        turned = rotate_to_mean(mean, following, offsets, layer.inv_freq)  # (S, Hq, D)
        around_mean = group_logits(turned.unsqueeze(2), layer.keys, layer.attention_scaling)
        excess = (lengths - pair_lengths(mean)).expand(len(turned), -1, -1)  # (S, Hq, D / 2)
        beyond = group_logits(excess.unsqueeze(2), pair_lengths(layer.keys.to(mean.dtype)), layer.attention_scaling)
        scores = standardized((around_mean + beyond)[..., 0, :], layer.valid.unsqueeze(2))  # (S, H, G, N)
        return scores.amax(dim=2) if self.group_reduction == "max" else scores.mean(dim=2)
