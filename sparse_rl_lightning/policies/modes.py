"""Modes of a policy: frozen, without dropout, and temporary evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the model: no gradients, evaluation mode."""
    model.requires_grad_(False)
    model.eval()
    return model


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to zero, including plain attributes of attention layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  # torch types module attributes as tensors


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch off dropout and gradient checkpointing while sampling; training flags are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
