"""What a compressor is: a score per cached entry. Pinning, ties, compaction and the record live elsewhere, once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sparse_rl_lightning.ops.select import select_entries
from sparse_rl_lightning.types import LayerState


class Compressor(ABC):
    """Decides which ``budget`` entries of a full slot survive; subclasses only write :meth:`score`.

    A slot holds ``budget + buffer`` tokens per layer and KV head. When it is full, the first ``num_sinks``
    positions, the last ``window`` entries and the best scores among the rest stay. A compressor keeps no state
    of its own: one instance serves all layers, slots and ranks.

    Args:
        budget: Tokens kept per layer and KV head after a compression.
        buffer: Tokens appended between two compressions.
        num_sinks: First positions of the sequence that are never evicted. 0 reproduces published R-KV and SnapKV.
        window: Most recent tokens that are never evicted.
        compress_prompt: Compress a prompt that does not fit the slot at the end of its prefill. With False the
            slot grows to ``max(budget, longest prompt) + buffer`` and the prompt competes from the first trigger on.

    Raises:
        ValueError: If the numbers leave nothing to choose from.
    """

    evicts = True
    """Whether slots are ever compressed. False sizes them for the whole sequence."""

    def __init__(
        self, budget: int, buffer: int = 128, num_sinks: int = 4, window: int = 8, compress_prompt: bool = True
    ) -> None:
        name = type(self).__name__
        if budget <= 0:
            raise ValueError(f"{name}: budget must be a positive number of tokens, got budget={budget}.")
        if buffer < 1:
            raise ValueError(f"{name}: buffer must be at least 1 token, got buffer={buffer}.")
        if num_sinks < 0 or window < 1:
            raise ValueError(
                f"{name}: num_sinks must be >= 0 and window >= 1, got num_sinks={num_sinks}, window={window}."
            )
        if budget < num_sinks + window:
            raise ValueError(
                f"{name}: budget={budget} is smaller than num_sinks + window = {num_sinks} + {window} = "
                f"{num_sinks + window} tokens that are never evicted. Raise budget or lower num_sinks or window."
            )
        self.budget = budget
        self.buffer = buffer
        self.num_sinks = num_sinks
        self.window = window
        self.compress_prompt = compress_prompt

    @property
    def num_queries(self) -> int:
        """How many of the most recent queries the cache keeps for :meth:`score`; 0 keeps none."""
        return self.window

    @abstractmethod
    def score(self, layer: LayerState) -> Tensor:
        """How much each entry is worth: (S, H, N), higher is kept. Entries that are not valid may hold anything."""

    def checked_score(self, layer: LayerState) -> Tensor:
        """What :meth:`score` returns, refused where it cannot be ranked.

        Raises:
            ValueError: If :meth:`score` returned another shape than (S, H, N), or NaN for a live entry.
        """
        scores = self.score(layer)
        name = type(self).__name__
        if scores.shape != layer.valid.shape:
            raise ValueError(
                f"{name}.score returned shape {tuple(scores.shape)}, expected (slots, KV heads, entries) = "
                f"{tuple(layer.valid.shape)}."
            )
        if bool((scores.isnan() & layer.valid).any()):
            raise ValueError(f"{name}.score returned NaN for live entries of layer {layer.layer_index}.")
        return scores

    def select(self, layer: LayerState, budget: int | Tensor | None = None) -> Tensor:
        """The entries that stay: (S, H, N) bool. The cache does the same in place, with the op ``select_and_compact``.

        Args:
            layer: One layer's cache.
            budget: Entries to keep, a number or (S, H); default :attr:`budget`.

        Raises:
            ValueError: As :meth:`checked_score`.
        """
        limit = self.budget if budget is None else budget
        scores = self.checked_score(layer)
        return select_entries(scores, layer.valid, layer.positions, limit, self.num_sinks, self.window)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({arguments})"
