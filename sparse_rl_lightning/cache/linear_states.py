"""The states of linear-attention layers: one of fixed size per layer and slot, beside the pool of keys and values.

A linear layer sees every token once and keeps a sum of what it saw, so there is nothing to evict from it, and its state
is the same under every compressor. It starts from zeros, is copied with a prompt to its samples, and saved with
a slot. The model's layers do the arithmetic: this file says which rows of a pass continue from which state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.cache.storage import SlotStorage
from sparse_rl_lightning.policies.geometry import LinearSizes

Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A linear layer on hidden states (B, n, E) from states (B, C, K) and (B, H, Dk, Dv), which it updates in place."""


Recur: TypeAlias = Callable[[int, Tensor, Run], Tensor]
"""The pass of one linear layer over packed rows, each sequence from its own state.

From the layer's index among the linear ones, hidden states (1, R, E) and the layer itself it computes the output
(1, R, E), zeros in the rows after the last sequence.
"""


@dataclass(frozen=True)
class LinearStates(SlotStorage):
    """The states of all linear layers: a row per slot, and one more for rows that pad a batch."""

    purpose, content = "linear attention", ("conv", "recurrent")

    conv: Tensor  # (L, P, C, K) inputs of the last K tokens to the convolution
    recurrent: Tensor  # (L, P, H, Dk, Dv), float32

    @classmethod
    def allocate(cls, sizes: LinearSizes, places: int, device: torch.device) -> LinearStates:
        """Allocate the states of sequences without tokens."""
        rows = (sizes.num_layers, places)
        conv = torch.zeros(*rows, *sizes.conv, dtype=sizes.dtype, device=device)
        return cls(conv, torch.zeros(*rows, *sizes.recurrent, dtype=torch.float32, device=device))

    @property
    def tensors(self) -> list[Tensor]:
        """Both tensors."""
        return [self.conv, self.recurrent]

    def begin(self, places: Tensor) -> None:
        """Begin new sequences in these places (B,)."""
        for tensor in self.tensors:
            tensor.index_fill_(1, places, 0)

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy places (B,) to as many others."""
        for tensor in self.tensors:
            tensor[:, destinations] = tensor[:, sources]

    def save(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copy the states of one slot, for :meth:`restore`."""
        return {name: getattr(self, name)[:, slot].clone() for name in self.content}

    def restore(self, slot: int, content: dict[str, Tensor]) -> None:
        """Fill a slot with what :meth:`save` returned."""
        for name in self.content:
            getattr(self, name)[:, slot] = content[name]


def recur_rows(states: LinearStates, places: Tensor, layer: int, hidden: Tensor, run: Run) -> Tensor:
    """Compute the output as :data:`Recur` says where row i is the next token of the sequence at ``places[i]``."""
    conv, recurrent = (tensor[layer] for tensor in states.tensors)
    gathered = conv[places], recurrent[places]
    out = run(hidden.transpose(0, 1), *gathered)
    conv[places], recurrent[places] = gathered
    return out.transpose(0, 1)


def recur_pieces(
    states: LinearStates, pieces: Sequence[tuple[int, int]], layer: int, hidden: Tensor, run: Run
) -> Tensor:
    """Compute the output as :data:`Recur` says where rows are pieces (slot, number of tokens) in order, then padding.

    Each piece is a separate call: torch's form of these layers does not keep the sequences of a batch apart, and a
    prompt's numbers must not depend on its neighbors.
    """
    conv, recurrent = (tensor[layer] for tensor in states.tensors)
    start, outputs = 0, list[Tensor]()
    for slot, count in pieces:
        at = slice(slot, slot + 1)
        outputs.append(run(hidden[:, start : start + count], conv[at], recurrent[at]))
        start += count
    return F.pad(torch.cat(outputs, dim=1), (0, 0, 0, hidden.shape[1] - start))
