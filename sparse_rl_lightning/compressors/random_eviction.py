"""RandomEviction: the baseline that every method has to beat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops import CachedEntries, score_entries
from sparse_rl_lightning.ops.keyed_random import hash_uniform
from sparse_rl_lightning.records import LayerState


class RandomEviction(Compressor):
    """Keep a uniform random sample of the past, besides sinks and window.

    Each token draws a random number once, from (key, layer, head, position) with the key of its sequence or, in the
    prompt, of the prompt, and keeps it for all compressions. So the survivors are always an even sample of everything
    so far; and they are the same in any batch and slot.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        redraw: Whether tokens draw a new number at every compression. The past is then thinned out again and again: a
            token survives k compressions with the k-th power of the chance to survive one.
        **sizes: Arguments of :class:`Compressor`.
    """

    num_queries = 0
    needs_layer_index = True

    def __init__(self, budget: int | LengthSchedule, *, redraw: bool = False, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.redraw = redraw

    @property
    def scores_natively(self) -> bool:
        """Whether the op scores; it knows a token's lasting number only."""
        return super().scores_natively and not self.redraw

    def score(self, layer: LayerState) -> Tensor:
        """Random number of each token: (S, H, N) in (0, 1)."""
        heads = torch.arange(layer.positions.shape[1], device=layer.positions.device)
        if self.redraw:
            newest = layer.positions.masked_fill(~layer.valid, -1).amax(dim=(1, 2), keepdim=True)
            keys = layer.sequence_keys[:, None, None]  # the prompt's, until its samples begin
            return hash_uniform(keys, newest, layer.layer_index, heads[:, None], layer.positions)
        # a prompt may be compressed before its samples begin
        in_prompt = layer.positions < layer.prompt_lengths[:, None, None]
        keys = torch.where(in_prompt, layer.prompt_keys[:, None, None], layer.sequence_keys[:, None, None])
        return hash_uniform(keys, layer.layer_index, heads[:, None], layer.positions)

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return score_entries(entries, "random")
