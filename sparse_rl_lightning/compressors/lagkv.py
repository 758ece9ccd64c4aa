"""LagKV: keep entries that differ from those that follow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.records import LayerState


class LagKV(Compressor):
    """Keep, in every chunk of the slot, the entries that differ most from the range of the next chunk (2504.04704).

    After the sinks the slot is cut into chunks of ``lag_size`` entries. Channels of a key are scaled by minimum and
    maximum of the next chunk; the deviation over the channels, in a softmax over the chunk, is averaged with the
    value's and replaced by its rank in the chunk. The last full chunk and what follows it are kept before anything
    else, the most recent first. So is everything if a slot has fewer than two full chunks.

    The paper compresses each chunk once, when the next one is complete. Here the contents of the slot are cut anew
    every time, including survivors of earlier compressions. A channel that is constant over the next chunk counts as 0,
    where the published code divides by zero.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        lag_size: Entries of a chunk, at least 2.
        **sizes: Arguments of :class:`Compressor`.

    Raises:
        ValueError: If ``lag_size`` is below 2, a slot is too small for two chunks after its sinks, or
            :class:`Compressor` refuses an argument.
    """

    num_queries = 0

    def __init__(self, budget: int | LengthSchedule, *, lag_size: int = 128, **sizes: Any) -> None:
        self.lag_size = lag_size
        super().__init__(budget, **sizes)

    def _check_schedule(self, schedule: LengthSchedule) -> None:
        super()._check_schedule(schedule)
        self._check_lag_size(schedule.minimum)

    def layer_budgets(self, num_layers: int, budget: int | None = None) -> list[int]:
        """Those of the rule, each large enough for two chunks."""
        budgets = super().layer_budgets(num_layers, budget)
        self._check_lag_size(min(budgets))
        return budgets

    def _check_lag_size(self, budget: int) -> None:
        lag_size, smallest = self.lag_size, budget + self.buffer
        largest = (smallest - self.num_sinks) // 2
        if not hasattr(lag_size, "__index__") or not 2 <= lag_size <= largest:
            raise UserError(
                f"LagKV: lag_size must be from 2 to {largest}, so that a slot of budget + buffer = "
                f"{smallest} tokens holds two chunks behind its sinks, and whole; got lag_size={lag_size}."
            )

    def score(self, layer: LayerState) -> Tensor:
        """Ranks within the chunk from 0 to below 1, and from 1 on in the kept tail: (S, H, N)."""
        num_entries, lag = layer.valid.shape[-1], self.lag_size
        index = torch.arange(num_entries, device=layer.valid.device)
        scores = (1.0 + index.to(torch.float32)).expand(layer.valid.shape)  # the kept tail, most recent first
        num_chunks = max(num_entries - self.num_sinks, 0) // lag
        if num_chunks < 2:
            return scores
        chunks = slice(self.num_sinks, self.num_sinks + num_chunks * lag)
        shape = (*layer.keys.shape[:2], num_chunks, lag, -1)
        # free memory is at the end: it is in no chunk whose ranks are used, nor in the next one
        keys, values = (t[:, :, chunks].reshape(shape) for t in (layer.keys, layer.values))
        shares = _difference(keys) + _difference(values)
        ranks = shares.argsort(dim=-1, stable=True).argsort(dim=-1).to(torch.float32) / lag
        scored = slice(self.num_sinks, self.num_sinks + (num_chunks - 1) * lag)
        chunk = (index[scored] - self.num_sinks) // lag
        next_is_full = self.num_sinks + (chunk + 2) * lag <= layer.lengths.unsqueeze(-1)
        middle = torch.where(next_is_full, ranks.flatten(-2), scores[..., scored])
        return torch.cat([scores[..., : scored.start], middle, scores[..., scored.stop :]], dim=-1)


def _difference(chunks: Tensor) -> Tensor:
    """How much entries leave the range of the next chunk (S, H, chunks - 1, lag), a softmax over each chunk."""
    chunks = chunks.to(accumulation_dtype(chunks.dtype))
    these, following = chunks[:, :, :-1], chunks[:, :, 1:]
    low, high = following.amin(dim=3, keepdim=True), following.amax(dim=3, keepdim=True)
    width = (high - low).masked_fill(high == low, torch.inf)  # by which a constant channel becomes 0
    # the standard deviation in float64, as torch.std computes it on CPUs, but many times as fast
    scaled = (these - low).div_(width).to(torch.float64)
    centered = scaled.sub_(scaled.mean(dim=-1, keepdim=True))
    norm: Tensor = torch.linalg.vector_norm(centered, dim=-1)
    return (norm / math.sqrt(chunks.shape[-1] - 1)).to(chunks.dtype).softmax(dim=-1)
