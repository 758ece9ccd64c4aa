"""Plain forward passes whose attention is watched: queries, keys and values of every layer, as a cache holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.policies.modes import eval_mode, exact_angles
from sparse_rl_lightning.policies.windows import deaths_by_window
from sparse_rl_lightning.replay.death_attention import death_attention
from sparse_rl_lightning.replay.hooks import named_attention, plain_attention, register

WATCHED = "sparse_rl_watched"


@dataclass(frozen=True)
class Seen:
    """The attention of one layer.

    Args:
        layer: Its number among those with a cache.
        query: Rotated queries (B, Hq, T, D).
        key: Rotated keys (B, H, T, D).
        value: Values (B, H, T, D).
        scale: Factor of the logits.
        sinks: Learned sinks (Hq) or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    sinks: Tensor | None


See = Callable[[Seen], None]
Watched = tuple[See, list[Tensor | None] | None]
"""The observer, and the deaths of keys in layers with a window, as of :func:`deaths_by_window`."""


@torch.no_grad()
def watch(model: PreTrainedModel, ids: Tensor, see: See) -> None:
    """Run the body of a model over token ids (B, T), and show each layer's attention; padding is on the right."""
    watched: Watched = see, deaths_by_window(model.config, ids)
    with eval_mode(model), named_attention(model, WATCHED), exact_angles(model):
        model.get_decoder()(input_ids=ids, use_cache=False, watched_attention=watched)


def _attend(
    watched: Watched, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    see, deaths = watched
    see(Seen(layer, query, key, value, scale, sinks))
    death = None if deaths is None else deaths[layer]
    if death is None:
        return plain_attention(query, key, value, scale, sinks)
    return death_attention(query, key, value, death, scale, sinks)


register(WATCHED, "watched_attention", _attend)
