"""What a policy's layers keep for the backward pass: full, inputs only, selective, or offloaded.

All forms give the same gradients bit by bit. Inputs that go to the host are copied on the stream that computes, in
page-locked memory: each is 2 x T x C bytes in 16 bits, 0.27 GB at 32,768 tokens and a width of 4,096.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Checkpointing = bool | Literal["selective", "offload"]
Store = Callable[[], AbstractContextManager[Any]]
"""A context in which what autograd saves is kept elsewhere."""
ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose results selective checkpointing keeps."""


ON_HOST = partial(save_on_cpu, pin_memory=True)
"""A store in the host's memory, page-locked where there is a GPU."""


def checkpoint_layers(policy: PreTrainedModel, how: Checkpointing, store: Store = ON_HOST) -> None:
    """Let the layers keep less, in the form that needs no gradient of the embeddings (frozen under LoRA).

    Args:
        policy: Policy; nothing changes outside of training mode.
        how: What is kept.
        store: Where ``offload`` keeps the inputs of layers.
    """
    if not how:
        return
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, ATTENTION)} if how == "selective" else {}
    enable_checkpointing(policy, use_reentrant=False, **selective)
    policy.disable_input_require_grads()  # a hook on the embeddings, which the sampler calls too
    if how == "offload":
        layers: list[Any] = [module for module in policy.modules() if hasattr(module, "_gradient_checkpointing_func")]
        for layer in layers:
            layer._gradient_checkpointing_func = _storing(layer._gradient_checkpointing_func, store)


def enable_checkpointing(policy: PreTrainedModel, **arguments: Any) -> None:
    """Let transformers checkpoint the layers, with these arguments of torch's ``checkpoint``, under either name."""
    name = "activation_checkpointing_enable"  # gradient_checkpointing_enable in older transformers
    enable = getattr(policy, name, None) or policy.gradient_checkpointing_enable
    enable(arguments)


def _storing(run: Callable[..., Any], store: Store) -> Callable[..., Any]:
    """A checkpointed call whose inputs, which are all that it saves, are kept in a store."""

    def stored(*args: Any) -> Any:
        with store():
            return run(*args)

    return stored
