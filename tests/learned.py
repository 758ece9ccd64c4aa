"""A LearnedScore with weights, as if learned, for models of ``tiny_model``'s sizes."""

from __future__ import annotations

from typing import Any

import torch

from sparse_rl_lightning.compressors import LearnedScore
from sparse_rl_lightning.testing import tiny_model


def learned_score(seed: int = 0, num_layers: int = 2, **sizes: Any) -> LearnedScore:
    """One with these sizes."""
    compressor, config = LearnedScore(**sizes), tiny_model().config
    head_dim = config.hidden_size // config.num_attention_heads
    network = compressor.build(num_layers, config.num_key_value_heads, head_dim, config.hidden_size)
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + index)))
    return compressor
