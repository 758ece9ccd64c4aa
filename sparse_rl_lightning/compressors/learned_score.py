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
from sparse_rl_lightning.compressors.base import Compressor, ModelSizes
from sparse_rl_lightning.compressors.entries import newest_position
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_files
from sparse_rl_lightning.records import LayerState, StateUpdate


class ScoreNetwork(nn.Module):
    """One hidden layer per layer and KV head, from an entry's key, value and hidden state to its worth.

    It starts at a worth of 0 for everything. Keys, values and hidden states enter at unit root mean square, and
    everything is float32 whatever precision the policy trains in.

    Args:
        sizes: Sizes of the model.
        width: Hidden units M.
        seed: Seed of the initial weights.
    """

    def __init__(self, sizes: ModelSizes, width: int, seed: int = 0) -> None:
        super().__init__()
        heads = (sizes.num_layers, sizes.num_kv_heads)
        # whatever was drawn before: ranks and repeated runs start alike
        generator = torch.Generator("cpu").manual_seed(seed)
        bound = 1 / math.sqrt(2 * sizes.head_dim + sizes.hidden_size)

        def uniform(inputs: int) -> nn.Parameter:
            start = torch.rand(*heads, inputs, width, generator=generator, dtype=torch.float32, device="cpu")
            return nn.Parameter((2 * start - 1) * bound)

        def zero(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*heads, *shape, dtype=torch.float32, device="cpu"))

        self.key, self.value = uniform(sizes.head_dim), uniform(sizes.head_dim)
        self.hidden = uniform(sizes.hidden_size)
        self.bias, self.outer = zero(width), zero(width)
        self.recency = zero()  # per logarithm of an entry's age

    def forward(self, layer: int, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """Worth (S, H, Q) of entries with keys and values (S, H, Q, D) and hidden states (S, Q, E)."""
        products = _unit(keys) @ self.key[layer] + _unit(values) @ self.value[layer]
        products = products + torch.einsum("sqe,hem->shqm", _unit(hidden), self.hidden[layer])
        units = torch.tanh(products + self.bias[layer][:, None])
        return (units * self.outer[layer][:, None]).sum(dim=-1)

    @property
    def sizes(self) -> ModelSizes:
        """Of the model that it is for."""
        layers, heads, head_dim, _ = self.key.shape
        return ModelSizes(layers, heads, head_dim, self.hidden.shape[2])


class LearnedScore(Compressor):
    """Keep the entries that a small learned network per layer and head finds worth keeping (as arXiv 2602.10238).

    The network reads key, value and hidden state of a token once, when it enters the cache; its worth is a number kept
    with the entry, minus a learned rate times the logarithm of its age. ``sparse-rl statistics`` teaches the network to
    foresee the full cache's attention.

    Args:
        budget: Tokens kept per layer and KV head, like all sizes not listed here as in :class:`Compressor`.
        weights: File of a trained network, of ``sparse-rl statistics --method LearnedScore``.
        **sizes: Further arguments of :class:`Compressor`.

    Raises:
        ValueError: If the file is missing or holds something else, or an argument is out of range.
    """

    needs_hidden_states = True
    needs_layer_index = True
    num_queries = 0
    state_fields = ("worth",)

    def __init__(self, budget: int | LengthSchedule, *, weights: str, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.weights = weights
        self.network = load_network(weights)

    def check_model(self, sizes: ModelSizes) -> None:
        """Refuse a model of other sizes than the network's."""
        if self.network.sizes != sizes:
            raise UserError(
                f"LearnedScore: weights={self.weights!r} is for a model of {self.network.sizes}, this one has {sizes}. "
                "Give the file that was trained with it."
            )

    def update_state(self, update: StateUpdate) -> None:
        """Note what the new entries are worth."""
        network = self.network
        if network.recency.device != update.keys.device:  # of a sampler that no module moved it with
            network.to(update.keys.device)
        worth = network(update.layer_index, update.keys, update.values, update.hidden_states)
        update.state["worth"].scatter_(-1, update.entries, worth)

    def score(self, layer: LayerState) -> Tensor:
        """What each entry was found worth, minus the learned rate times the logarithm of its age: (S, H, N)."""
        age = (newest_position(layer)[:, None, None] - layer.positions).clamp(min=0)
        return layer.state["worth"] - self.network.recency[layer.layer_index][:, None] * torch.log1p(age.float())


def save_network(network: nn.Module, path: Path) -> None:
    """Write a network as a safetensors file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_files({path: partial(save_file, tensors)})


def load_network(path: str) -> ScoreNetwork:
    """Read what :func:`save_network` wrote.

    Raises:
        ValueError: If the file is missing or holds something else.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"LearnedScore: there is no file weights={path!r}. `sparse-rl statistics --method LearnedScore` writes one."
        )
    try:
        tensors = load_file(file)
        if not all(tensor.is_floating_point() for tensor in tensors.values()):
            raise TypeError("integers would be cast")
        layers, heads, head_dim, width = tensors["key"].shape
        network = ScoreNetwork(ModelSizes(layers, heads, head_dim, tensors["hidden"].shape[2]), width)
        network.load_state_dict(tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"LearnedScore: weights={path!r} does not hold a network of it. Give a file of `sparse-rl statistics "
            "--method LearnedScore`."
        ) from error
    return network


def _unit(numbers: Tensor) -> Tensor:
    return F.rms_norm(numbers.to(torch.float32), numbers.shape[-1:])
