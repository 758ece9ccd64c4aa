"""Correction callbacks without a Lightning trainer: they edit a rollout as they do there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from sparse_rl_lightning.callbacks.base import CorrectionCallback
from sparse_rl_lightning.corrections import normalize_weights
from sparse_rl_lightning.records import Rollout


class Corrections:
    """Corrections, applied one after the other.

    Args:
        callbacks: Corrections.
        accelerator: Accelerator of the processes that share a rollout, for means over all of them.

    Raises:
        ValueError: If two are of one kind.
    """

    def __init__(self, callbacks: Sequence[CorrectionCallback], accelerator: Any) -> None:
        self.callbacks = list(callbacks)
        strategy = SimpleNamespace(reduce=lambda total, reduce_op: accelerator.reduce(total, reduction=reduce_op))
        world = SimpleNamespace(callbacks=self.callbacks, world_size=accelerator.num_processes, strategy=strategy)
        self._asked = (cast(Any, world), cast(Any, None))  # all that a correction asks of a trainer, and of a module
        for callback in self.callbacks:
            callback.setup(*self._asked, "fit")

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> None:
        """Reject and weigh the sequences of a rollout with dense log-probs."""
        for callback in self.callbacks:
            callback.correct(*self._asked, rollout)


def factors(part: Rollout) -> Tensor:
    """What the clipped term of each token (B, T) of a micro-batch is multiplied by, 0 where it is rejected."""
    mask = part.completion_mask
    keep = mask if part.keep is None else mask & part.keep
    weights = mask.float() if part.weights is None else part.weights
    if part.weight_reference is not None:
        weights = normalize_weights(weights, part.weight_reference, mask)
    return torch.where(keep, weights, 0.0)
