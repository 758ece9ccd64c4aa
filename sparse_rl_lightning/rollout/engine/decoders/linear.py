"""A linear-attention layer of transformers on the states of slots, as part of a forward pass over packed rows.

The layer's own forward runs, with transformers' own cache between it and the states: it continues each sequence from
its state and writes the new one in its place. Nothing of the layer is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from sparse_rl_lightning.cache.linear_states import Run


def run_of(module: Any, own: Callable[..., Tensor]) -> Run:
    """A linear layer as a function of hidden states and the states that it updates in place.

    Args:
        module: The layer.
        own: Its forward.
    """
    held: Any = LinearAttentionLayer()
    for flags in (held.is_conv_states_initialized, held.is_recurrent_states_initialized, held.has_previous_state):
        flags[0] = True
    held.conv_kernel_size[0] = module.conv_kernel_size
    keyword = "cache" if "cache" in signature(type(module).forward).parameters else "cache_params"  # by the release
    cache = Cache(layers=[held] * (module.layer_idx + 1))  # read at the layer's index only

    def run(hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
        held.conv_states[0], held.recurrent_states[0] = conv, recurrent
        out = own(hidden, **{keyword: cache})
        held.conv_states[0] = held.recurrent_states[0] = None  # views of memory that may be freed
        return out

    return run
