"""What resuming may touch of a module: the description of a run and its checkpoints see nothing else of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.callbacks.base import RolloutModule
from sparse_rl_lightning.modules.old_logprobs import OldLogprobs


class ResumableModule(Protocol):
    """A LightningModule whose run can be gone on with, such as any PolicyModule."""

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    same_on_ranks: dict[str, str]
    """What ranks compare with each other before they train."""
    resumed_parts: tuple[str, ...]
    """Parts that a checkpoint must have besides Lightning's own."""
    _trainer: Trainer | None
    """The trainer, None in a script."""
    _world_size: int

    @property
    def trainer(self) -> Trainer:
        """The trainer, which there must be."""

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer is the configured one, and not of a subclass."""

    @property
    def compares_with_start(self) -> bool:
        """Whether the loss reads the policy that training began with, from somewhere else than the checkpoint."""

    def configured(self) -> tuple[torch.optim.Optimizer, Any]:
        """A new optimizer and its schedule, None if there is none."""

    def state_dict(self) -> dict[str, Any]:
        """The weights by their names."""


class ResumableRollouts(ResumableModule, RolloutModule, Protocol):
    """A LightningModule whose run of rollouts can be gone on with, such as SparseGRPO."""

    num_sequences: int
    """Sequences drawn on all ranks since the start of training."""
    old_logprobs: OldLogprobs

    @property
    def global_rank(self) -> int:
        """The number of this process."""
