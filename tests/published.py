"""The same small prompt for this library and for kvpress, and what kvpress 0.5.5 makes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.records import LayerState, StateUpdate
from sparse_rl_lightning.testing import random_layer

HEADS, GROUP, ENTRIES, DIM = 2, 2, 14, 16


def wave(*shape: int, step: float) -> Tensor:
    """Numbers that look random without a generator: sines of the squares."""
    return torch.sin(step * torch.arange(torch.Size(shape).numel(), dtype=torch.float64) ** 2).view(shape)


def prompt(
    keys: Tensor | None = None, values: Tensor | None = None, queries: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values (S, H, N, D), queries of all tokens (S, Hq, N, D), causal attention (S, Hq, N, N)."""
    keys = wave(1, HEADS, ENTRIES, DIM, step=0.73) * 2 if keys is None else keys
    values = wave(1, HEADS, ENTRIES, DIM, step=1.31) if values is None else values
    queries = wave(1, HEADS * GROUP, ENTRIES, DIM, step=0.41) if queries is None else queries
    length = keys.shape[2]
    logits = queries @ keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1).mT / keys.shape[-1] ** 0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return keys, values, queries, logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)


def whole_prompt(keys: Tensor, values: Tensor, queries: Tensor, num_queries: int) -> LayerState:
    """What a compressor sees at the end of the prefill of prompts of equal length."""
    slots, heads, length, dim = keys.shape
    base = random_layer(lengths=[[3, 3]] * 3)
    positions = torch.arange(length).expand(slots, heads, length)
    ring = torch.arange(length - num_queries, length)
    return LayerState(
        keys=keys,
        values=values,
        valid=torch.ones(slots, heads, length, dtype=torch.bool),
        positions=positions,
        lengths=torch.full((slots, heads), length),
        token_ids=positions,
        prompt_lengths=torch.full((slots,), length),
        queries=queries[:, :, length - num_queries :],
        query_positions=ring.expand(slots, num_queries),
        sequence_keys=torch.arange(slots),
        prompt_keys=torch.arange(slots),
        layer=0,
        scale=dim**-0.5,
        inv_freq=base.inv_freq,
        attention_scaling=1.0,
    )


# PRESS.score(...) of kvpress 0.5.5 on prompt(), the entries of one head and then of the other; KeyDiffPress(),
# LagKVPress(n_sink=2, lag_size=4), CURPress(num_sinks=0, local_window_size=4), TOVAPress(),
# SnapKVPress(window_size=4, kernel_size=5), ObservedAttentionPress(), KnormPress()
SCORES = {
    "KeyDiff": """
        0.196931 -0.500274 -0.104254 -0.479087 -0.513008 -0.195617 -0.485922 -0.184116 -0.511265 -0.11303 -0.338525
        -0.438277 -0.121803 -0.401747 -0.151961 0.154535 -0.59711 -0.179639 -0.408654 -0.520815 -0.0799848 -0.46087
        -0.269632 -0.708683 -0.0243366 -0.437474 -0.243687 -0.293114
    """,
    "LagKV": """
        1 1 0.75 0 0.5 0.25 0.75 0.25 0 0.5 1 1 1 1 1 1 0.75 0.5 0 0.25 0.5 0.75 0.25 0 1 1 1 1
    """,
    "CUR": """
        0.053521 0.0447854 0.0391288 0.0606584 0.0518611 0.0513556 0.0540911 0.0403662 0.0400297 0.0598486 0.051058
        0.0483787 0.252718 0.1522 0.0412531 0.0507262 0.0580106 0.049306 0.0380249 0.0549148 0.048003 0.0602934
        0.035246 0.0483303 0.0493555 0.0667812 0.205121 0.194634
    """,
    "TOVA": """
        0.0707614 0.084145 0.0338146 0.0703341 0.0942049 0.0832724 0.0957332 0.057939 0.0977089 0.103571 0.0252727
        0.0814941 0.0542319 1.10357 0.0707614 0.084145 0.0338146 0.0703341 0.0942049 0.0832724 0.0957332 0.057939
        0.0977089 0.103571 0.0252727 0.0814941 0.0542319 1.10357
    """,
    "SnapKV": """
        0.0445519 0.0548886 0.0715221 0.0630996 0.0642972 0.0648239 0.0752161 0.0770415 0.0658132 0.0525312 1.08914
        1.08914 1.08914 1.08914 0.049815 0.0669971 0.0836054 0.087305 0.086866 0.0891436 0.0867464 0.0879543 0.0664626
        0.0466823 1.08914 1.08914 1.08914 1.08914
    """,
    "H2O": """
        0.234605 0.199786 0.0922353 0.135066 0.101682 0.0872513 0.126967 0.0823642 0.115129 0.0823769 0.117543
        0.132354 0.0556054 0.0502833 0.204177 0.207108 0.154776 0.131898 0.127281 0.112749 0.119238 0.0606392 0.075455
        0.0906933 0.041324 0.0752079 0.0665693 0.0447492
    """,
    "KNorm": """
        -5.42286 -5.53969 -5.8873 -5.83183 -6.00029 -6.03632 -6.3939 -5.11436 -5.95319 -6.19506 -6.18398 -5.67175
        -6.00563 -5.36033 -5.84159 -5.57459 -5.93559 -5.50885 -5.58873 -6.17716 -5.8869 -6.35565 -4.70458 -5.57439
        -5.61397 -6.50805 -5.19351 -5.10261
    """,
}
KVPRESS = {
    name: torch.tensor([float(number) for number in text.split()], dtype=torch.float64).view(HEADS, ENTRIES)
    for name, text in SCORES.items()
}


def update_of(layer: LayerState, mass: Tensor) -> StateUpdate:
    """What a compressor hears of the last tokens of a layer, which pay (S, H, Q, N) attention."""
    new = slice(layer.valid.shape[-1] - mass.shape[2], None)
    return StateUpdate(
        layer.state, layer.head_state, layer.lengths, layer.positions[:, 0, new], layer.keys[:, :, new],
        layer.values[:, :, new], layer.prompt_lengths, layer.layer_index, {"mass": mass},
    )  # fmt: skip
