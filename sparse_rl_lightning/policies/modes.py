"""Modes of a policy: frozen, without dropout, and evaluation for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """The model without gradients and dropout."""
    model.requires_grad_(False)
    model.eval()
    return model


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to zero, those that are plain attributes of attention layers too."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  # torch types module attributes as tensors


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """No dropout and no gradient checkpointing while sampling; the training flag comes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
