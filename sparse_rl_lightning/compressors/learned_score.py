"""LearnedScore: a small network per layer and head says what a new entry is worth."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.entries import newest_position
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import write_files
from sparse_rl_lightning.records import LayerState, StateUpdate

FILE = "learned_score.safetensors"
"""Name of the network's file in the folder of an exported policy."""


class ScoreNetwork(nn.Module):
    """One hidden layer per layer and KV head, from an entry's key, value and hidden state to its worth.

    It starts at a worth of 0 for everything, and keys, values and hidden states enter at unit root mean square.

    Args:
        num_layers: Layers L.
        num_kv_heads: KV heads H of a layer.
        head_dim: Size D of a key.
        hidden_size: Size E of a hidden state.
        width: Hidden units M.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, hidden_size: int, width: int) -> None:
        super().__init__()
        inputs, heads = 2 * head_dim + hidden_size, (num_layers, num_kv_heads)
        bound = 1 / math.sqrt(inputs)
        # the same for everybody, whatever was drawn before: ranks and repeated runs start alike
        start = torch.rand(*heads, inputs, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        self.inner = nn.Parameter((2 * start - 1) * bound)
        self.bias = nn.Parameter(torch.zeros(*heads, width, dtype=torch.float32))
        self.outer = nn.Parameter(torch.zeros(*heads, width, dtype=torch.float32))
        self.recency = nn.Parameter(torch.zeros(heads, dtype=torch.float32))  # per logarithm of an entry's age

    def forward(self, layer: int, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """Worth (S, H, Q) of entries with keys and values (S, H, Q, D) and hidden states (S, Q, E)."""
        count = keys.shape[1]
        parts = [_unit(t.to(torch.float32)) for t in (keys, values)]
        seen = torch.cat([*parts, _unit(hidden)[:, None].expand(-1, count, -1, -1)], dim=-1)
        units = torch.tanh(seen @ self.inner[layer] + self.bias[layer][:, None])
        return (units * self.outer[layer][:, None]).sum(dim=-1)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Layers, KV heads, and 2 D + E."""
        return self.inner.shape[0], self.inner.shape[1], self.inner.shape[2]


class LearnedScore(Compressor):
    """Keep the entries that a small learned network per layer and head finds worth keeping (as arXiv 2602.10238).

    The network reads key, value and hidden state of a token once, when it enters the cache; its worth is a number kept
    with the entry, plus a learned rate times the logarithm of its age. ``LearnedEvictionGRPO`` trains the network
    inside :class:`~sparse_rl_lightning.compressors.Drawn`; untrained it gives every entry the same worth.

    Args:
        budget: Tokens kept per layer and KV head, like all sizes not listed here as in :class:`Compressor`.
        weights: File of a trained network, ``learned_score.safetensors`` in the folder of an exported policy; null to
            begin anew.
        width: Hidden units of a new network.
        **sizes: Further arguments of :class:`Compressor`.

    Raises:
        ValueError: If the file is missing or holds something else, or an argument is out of range.
    """

    needs_hidden_states = True
    scores_are_logits = True

    def __init__(
        self, budget: int | LengthSchedule, *, weights: str | None = None, width: int = 16, **sizes: Any
    ) -> None:
        super().__init__(budget, **sizes)
        check_number("width", width, least=1, owner="LearnedScore")
        self.weights, self.width = weights, width
        self._network: ScoreNetwork | None = None if weights is None else load_network(weights)

    @property
    def num_queries(self) -> int:
        """None."""
        return 0

    @property
    def state_fields(self) -> tuple[str, ...]:
        """The worth of an entry."""
        return ("worth",)

    @property
    def state_is_constant(self) -> bool:
        """It is that of its token."""
        return True

    def build(self, num_layers: int, num_kv_heads: int, head_dim: int, hidden_size: int) -> ScoreNetwork:
        """The network for a model of these sizes, made anew if there is none yet.

        Raises:
            ValueError: If there is one of other sizes.
        """
        if self._network is None:
            self._network = ScoreNetwork(num_layers, num_kv_heads, head_dim, hidden_size, self.width)
        wanted = (num_layers, num_kv_heads, 2 * head_dim + hidden_size)
        if self._network.sizes != wanted:
            raise UserError(
                f"LearnedScore: weights={self.weights!r} is of a model with (layers, KV heads, 2 x head size + hidden "
                f"size) = {self._network.sizes}, this one has {wanted}. Give the file that was trained with it."
            )
        return self._network

    def update_state(self, update: StateUpdate) -> None:
        """Note what the new entries are worth."""
        network = self._on(update.keys.device)
        worth = network(update.layer_index, update.keys, update.values, update.hidden_states)
        update.state["worth"].scatter_(-1, update.entries, worth)

    def score(self, layer: LayerState) -> Tensor:
        """What each entry was found worth, and the learned preference for young or old ones: (S, H, N)."""
        age = (newest_position(layer)[:, None, None] - layer.positions).clamp(min=0)
        recency = self._on(layer.keys.device).recency[layer.layer_index][:, None]
        return layer.state["worth"] - recency * torch.log1p(age.to(torch.float32))

    def _on(self, device: torch.device) -> ScoreNetwork:
        if self._network is None:
            raise UserError(
                "LearnedScore has no network yet: give weights, the learned_score.safetensors of an exported policy, "
                "or train one with LearnedEvictionGRPO."
            )
        return self._network.to(device)


def save_network(network: ScoreNetwork, path: Path) -> None:
    """Write a network as a safetensors file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_files({path: partial(save_file, tensors)})


def load_network(path: str) -> ScoreNetwork:
    """Read what :func:`save_network` wrote.

    Raises:
        ValueError: If the file is missing or holds something else.
    """
    place = Path(path).expanduser()
    if not place.is_file():
        raise UserError(f"LearnedScore: there is no file weights={path!r}. Exported policies have one: FOLDER/{FILE}.")
    try:
        tensors = load_file(place)
        layers, heads, inputs, width = tensors["inner"].shape
        network = ScoreNetwork(layers, heads, 0, inputs, width)
        network.load_state_dict(tensors)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"LearnedScore: weights={path!r} does not hold a network of it. Give FOLDER/{FILE}.") from error
    return network


def _unit(numbers: Tensor) -> Tensor:
    return F.rms_norm(numbers, numbers.shape[-1:])
