"""CUR: keep entries whose key and value are large among their neighbors."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import live_entries
from sparse_rl_lightning.errors import check_choice, check_number
from sparse_rl_lightning.records import LayerState

Leverage = Literal["product", "mean", "key", "value"]


class CUR(Compressor):
    """Keep what has leverage: squared norms of key and value, relative to their neighbors (CurDKV, arXiv 2509.15038).

    A squared norm is divided by the sum over its ``local_window`` entries, which are cut from the start of the slot.
    The random projection that the published code can put before the norms is left out.

    Args:
        budget: Tokens kept per layer and KV head after a compression; a number, or a schedule by length.
        leverage: The "product" of the shares of key and value, their "mean", or only that of "key" or "value".
        local_window: Neighboring entries that share one sum; 0 takes the norms as they are.
        **sizes: Arguments of :class:`Compressor`.
    """

    num_queries = 0

    def __init__(
        self, budget: int | LengthSchedule, *, leverage: Leverage = "product", local_window: int = 16, **sizes: Any
    ) -> None:
        super().__init__(budget, **sizes)
        check_choice("leverage", leverage, Leverage, type(self).__name__)
        check_number("local_window", local_window, least=0, owner="CUR", whole=True)
        self.leverage: Leverage = leverage
        self.local_window = local_window

    def score(self, layer: LayerState) -> Tensor:
        """Shares of leverage (S, H, N), which sum to 1 over the live entries."""
        key = self._shares(layer.keys, layer.valid)
        value = self._shares(layer.values, layer.valid)
        scores = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[self.leverage]
        return _divide(scores, scores.sum(dim=-1, keepdim=True))

    def _shares(self, tensor: Tensor, valid: Tensor) -> Tensor:
        """Each squared norm divided by the sum of its window: (S, H, N)."""
        squares = live_entries(tensor, valid).square().sum(dim=-1)
        num_entries, width = squares.shape[-1], self.local_window
        if width == 0:
            return squares
        padded = F.pad(squares, (0, -num_entries % width))
        windows = padded.view(*padded.shape[:2], -1, width)
        return _divide(windows, windows.sum(dim=-1, keepdim=True)).flatten(-2)[..., :num_entries]


def _divide(numbers: Tensor, whole: Tensor) -> Tensor:
    """Shares of a whole, 0 where the whole is 0."""
    return numbers / whole.masked_fill(whole == 0, 1.0)
