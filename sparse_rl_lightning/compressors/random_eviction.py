"""RandomEviction, the baseline that every method has to beat, and RandomAttention, its published form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import fresh_draws
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
        self._has_op = not redraw

    def score(self, layer: LayerState) -> Tensor:
        """Random number of each token: (S, H, N) in (0, 1)."""
        if self.redraw:
            return fresh_draws(layer)
        heads = torch.arange(layer.positions.shape[1], device=layer.positions.device)
        # a prompt may be compressed before its samples begin
        in_prompt = layer.positions < layer.prompt_lengths[:, None, None]
        keys = torch.where(in_prompt, layer.prompt_keys[:, None, None], layer.sequence_keys[:, None, None])
        return hash_uniform(keys, layer.layer_index, heads[:, None], layer.positions)

    def score_cached(self, entries: CachedEntries) -> Tensor:
        """The same in all layers at once: (L, B, H, N)."""
        return score_entries(entries, "random")


class RandomAttention(RandomEviction):
    """Keep the prompt, the newest tokens, and what each head draws anew at every compression (arXiv 2609.03430).

    It is :class:`RandomEviction` with ``redraw`` and the sizes of the published runs: what prompt and ``window`` leave
    of the budget goes to tokens of the completion that each KV head draws without a look at them. After k compressions
    a token is still there with the k-th power of the chance to survive one, so the past thins out with its age.

    Args:
        budget: Tokens kept per layer and KV head after a compression, prompt and ``window`` among them; a number, or a
            schedule by length. It must hold the longest prompt and ``window``.
        buffer: Tokens appended between two compressions.
        num_sinks: First positions of the sequence that are never evicted; the protected prompt holds them.
        window: Most recent tokens that are never evicted.
        protect_prompt: Whether the prompt is never evicted, as in :class:`Compressor`.
        **sizes: Other arguments of :class:`Compressor`.
    """

    def __init__(
        self, budget: int | LengthSchedule, *, buffer: int = 64, num_sinks: int = 0, window: int = 64,
        protect_prompt: bool = True, **sizes: Any,
    ) -> None:  # fmt: skip
        sizes |= {"buffer": buffer, "num_sinks": num_sinks, "window": window, "protect_prompt": protect_prompt}
        super().__init__(budget, redraw=True, **sizes)
