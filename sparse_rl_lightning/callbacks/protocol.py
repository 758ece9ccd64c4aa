"""RolloutModule: everything that a callback may use of a module that rolls out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.learner.loss import Denominators, GRPOLoss
from sparse_rl_lightning.records import LossOutput, Rollout
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.rollout.generator import Generator


class RolloutModule(Protocol):
    """A LightningModule that rolls out, such as SparseGRPO.

    Besides these members it has everything of Lightning's own: parameters, device, logging.
    """

    policy: PreTrainedModel
    """The policy, loaded when the fit starts."""
    generator: Generator
    """Generator; lengths and ``top_logprobs`` may change between rollouts, budgets by ``raise_budget``."""
    rewards: Rewards
    learner: Learner
    loss: GRPOLoss
    val_sampling: SamplingParams
    keeps_evictions: bool
    """Whether the loss reads the record of evictions."""
    block: RolloutBlock | None
    """The rollout that is trained on."""
    num_rollouts: int

    @property
    def trainer(self) -> Trainer:
        """The trainer that fits the module."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    def starts_rollout(self) -> bool:
        """Whether the next training step begins with a rollout."""

    @property
    def grad_norm_key(self) -> str:
        """The name under which the norm of this step's gradient is logged."""

    def plan(self, num_prompts: int) -> BlockPlan:
        """Plan the optimizer steps of a rollout of ``num_prompts`` prompts."""

    def denominators(self, window: Rollout) -> Denominators:
        """The divisors of an optimizer step's sums, over all ranks."""

    def micro_batch_loss(self, part: Rollout, denominators: Denominators) -> LossOutput:
        """Run the learner's forward pass and compute the loss."""

    def replayed(self, part: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T) of the sparse policy, with the evictions of the sampler."""

    def reference_logprobs(self, part: Rollout) -> Tensor:
        """Log-probabilities (B, T) of the reference policy."""

    def buffers(self) -> Iterator[Tensor]:
        """All buffers of the module."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the module."""

    def log(self, name: str, value: Any, *, batch_size: int | None = None) -> None:
        """Log a number."""

    def log_dict(self, dictionary: Mapping[str, Any], *, batch_size: int | None = None) -> None:
        """Log several numbers."""


def rollout_module(module: LightningModule, owner: object) -> RolloutModule:
    """Return the module if it rolls out; ``owner`` is the callback that needs it.

    Raises:
        ValueError: If it does not.
    """
    if not isinstance(getattr(module, "generator", None), Generator):
        raise UserError(
            f"{type(owner).__name__}: {type(module).__name__} does not roll out. Use it with SparseGRPO, or remove it "
            "from trainer.callbacks."
        )
    return cast(RolloutModule, module)
