"""A LearnedScore with weights, as if learned, for models of ``tiny_model``'s sizes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sparse_rl_lightning.compressors import LearnedScore
from sparse_rl_lightning.compressors.base import ModelSizes
from sparse_rl_lightning.compressors.learned_score import ScoreNetwork, save_network
from sparse_rl_lightning.testing import tiny_model


def sizes_of(model: Any) -> ModelSizes:
    """What its weights depend on, read off a configuration."""
    own = model.config
    head_dim = own.hidden_size // own.num_attention_heads
    return ModelSizes(own.num_hidden_layers, own.num_key_value_heads, head_dim, own.hidden_size)


def learned_score(seed: int = 0, num_layers: int = 2, model: ModelSizes | None = None, **sizes: Any) -> LearnedScore:
    """One with these sizes, for a model of others than ``tiny_model`` if given."""
    network = ScoreNetwork(model or sizes_of(tiny_model(num_layers=num_layers)), width=16)
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + index)))
    with TemporaryDirectory() as folder:
        save_network(network, Path(folder) / "network")
        return LearnedScore(**sizes, weights=str(Path(folder) / "network"))
