"""Protect: some tokens are never evicted."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.wrapper import Wrapper
from sparse_rl_lightning.records import LayerState


class Protect(Wrapper):
    """Never evict the prompt, or certain tokens, whatever they score.

    Protected tokens take places of the budget, beside sinks and window. More of them than the budget holds is an
    error when it happens, not an eviction: for protected prompts, ``budget`` must exceed the longest prompt.

    Args:
        compressor: Scores everything else; budget and all other sizes are its own.
        prompt: Protect the prompt.
        token_ids: Protect these tokens wherever they stand, such as digits or line breaks.

    Raises:
        ValueError: If nothing is protected.
    """

    def __init__(self, compressor: Compressor, prompt: bool = True, token_ids: list[int] | None = None) -> None:
        super().__init__([compressor])
        if not prompt and not token_ids:
            raise ValueError("Protect: nothing is protected. Set prompt: true, or name tokens in token_ids.")
        self.prompt = prompt
        self.token_ids = list(token_ids or [])

    def score(self, layer: LayerState) -> Tensor:
        """The compressor's scores, +inf for what must stay: (S, H, N)."""
        (scores,) = self.part_scores(layer)
        wanted = torch.tensor(self.token_ids, dtype=layer.token_ids.dtype, device=layer.token_ids.device)
        protected = torch.isin(layer.token_ids, wanted)
        if self.prompt:
            protected = protected | (layer.positions < layer.prompt_lengths[:, None, None])
        return scores.masked_fill(protected & layer.valid, torch.inf)
