"""ExpectedAttention: keep what future queries are expected to attend to."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import newest_position
from sparse_rl_lightning.compressors.rotary import angles, mean_rotation, turn
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.ops.window_importance import group_logits
from sparse_rl_lightning.records import LayerState

Covariance = Literal["full", "diagonal", "none"]


class ExpectedAttention(Compressor):
    """Keep what a normal distribution of future queries attends to, times the norm of the value (arXiv 2510.00636).

    The latest ``query_window`` queries, rotated back to position 0, give a mean and a covariance; both are rotated by
    the mean rotation of the ``num_future`` positions that follow. A key's expected attention is the softmax of
    ``mean.k * scale + k.covariance.k * scale^2 / 2``, a mean over the query heads of its group.

    Queries are rotated by their true positions and the future begins after the newest token, whereas kvpress counts
    from the length of its buffer while it decodes. Positions below ``num_sinks`` enter neither the softmax nor, as
    outliers, the statistics, as in kvpress. The covariance is never formed: with A queries, ``k.covariance.k`` is a
    mean of A squared products. "diagonal" keeps only the variances of the rotated channels.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        query_window: Number of latest queries for the statistics; the cache keeps them.
        num_future: Number of positions ahead over which the rotation is averaged.
        covariance: Covariance to use, "full", "diagonal" or "none".
        value_norm: Multiply by the norm of the value.
        epsilon: Added to the expected attention before, so that a large value counts without any.
        **sizes: Arguments of :class:`Compressor`.
    """

    needs_rotation = "partial"

    def __init__(
        self,
        budget: int | LengthSchedule,
        *,
        query_window: int = 64,
        num_future: int = 512,
        covariance: Covariance = "full",
        value_norm: bool = True,
        epsilon: float = 0.0,
        **sizes: Any,
    ) -> None:
        super().__init__(budget, **sizes)
        if not all(hasattr(number, "__index__") and number >= 1 for number in (query_window, num_future)):
            raise UserError(
                "ExpectedAttention: query_window and num_future must be whole numbers of at least 1, got "
                f"query_window={query_window}, num_future={num_future}."
            )
        check_choice("covariance", covariance, Covariance, type(self).__name__)
        check_number("epsilon", epsilon, least=0, owner="ExpectedAttention")
        self.query_window = query_window
        self.num_future = num_future
        self.covariance: Covariance = covariance
        self.value_norm = value_norm
        self.epsilon = epsilon

    @property
    def num_queries(self) -> int:
        """The number of queries for the statistics."""
        return self.query_window

    def score(self, layer: LayerState) -> Tensor:
        """Expected attention times the norm of the value: (S, H, N), 0 for sinks."""
        mean, centered, count = self._future_queries(layer)
        logits = group_logits(mean, layer.keys, layer.scale)[..., 0, :]  # (S, H, G, N)
        logits = logits + self._spread(centered, count, layer) / 2
        hidden = ~(layer.valid & (layer.positions >= self.num_sinks)).unsqueeze(2)
        attention = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).masked_fill(hidden, 0.0).mean(dim=2)
        if not self.value_norm:
            return attention
        norm: Tensor = torch.linalg.vector_norm(layer.values, dim=-1, dtype=attention.dtype)
        return (attention + self.epsilon) * norm

    def _future_queries(self, layer: LayerState) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (S, Hq, 1, D) and deviations (S, Hq, A, D) of queries under the mean future rotation, and their number.

        Deviations of queries that do not count are 0.
        """
        counted = layer.query_positions >= self.num_sinks  # absent ones are at -1
        shown = counted[:, None, :, None]
        queries = layer.queries.to(accumulation_dtype(layer.queries.dtype)).masked_fill(~shown, 0.0)
        inv_freq = layer.inv_freq.to(queries.dtype)
        # back to position 0, which keeps the scale of the rotation, on to the token that follows, and to the mean
        following = angles(newest_position(layer)[:, None] + 1, inv_freq)
        angle = following - angles(layer.query_positions, inv_freq)  # (S, A, r / 2)
        ahead = mean_rotation(torch.arange(self.num_future, device=queries.device), inv_freq)
        whole = turn(torch.cat([angle.cos(), angle.sin()], dim=-1), *ahead).unsqueeze(1)
        turned = turn(queries, *whole.chunk(2, dim=-1))
        count = counted.sum(dim=-1).clamp(min=1)[:, None, None, None]
        mean = turned.sum(dim=2, keepdim=True) / count
        return mean, turned.sub_(mean).mul_(shown), count

    def _spread(self, centered: Tensor, count: Tensor, layer: LayerState) -> Tensor | float:
        """The variance of the logits: (S, H, G, N)."""
        if self.covariance == "none":
            return 0.0
        if self.covariance == "full":
            squares = group_logits(centered, layer.keys, layer.scale).square_()  # (S, H, G, A, N)
            return squares.sum(dim=3) / count
        variances = centered.square().sum(dim=2, keepdim=True) / count  # (S, Hq, 1, D)
        keys = layer.keys.to(variances.dtype)
        return group_logits(variances, keys.square(), layer.scale**2)[..., 0, :]
