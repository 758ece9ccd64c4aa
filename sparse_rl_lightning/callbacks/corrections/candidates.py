"""ReadsCandidates: what callbacks share whose learner reads the sampler's most likely tokens."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.learner.loss import Loss
from sparse_rl_lightning.records import Rollout


class ReadsCandidates(RolloutCallback):
    """A callback that puts another learner, perhaps another loss, in the place of the module's for the time of a fit.

    Args:
        top: Number of most likely tokens that the sampler reports, at most the vocabulary, on a GPU 256.
    """

    keeps_candidates = True

    def __init__(self, top: int) -> None:
        check_number("top", top, least=1, owner=type(self).__name__, whole=True)
        self.top = top
        self._before: tuple[RolloutModule, Learner, Loss] | None = None

    def install(self, module: RolloutModule, learner: type[Learner], **more: Any) -> None:
        """Put a learner of this class, with what the module's has and more, in its place, and ask for the tokens.

        Raises:
            ValueError: If another callback of the class does the same.
        """
        if isinstance(module.learner, learner):
            raise UserError(f"trainer.callbacks: two of {type(self).__name__}. Keep one of them.")
        self._before = module, module.learner, module.loss
        module.learner = learner(**{f.name: getattr(module.learner, f.name) for f in fields(Learner)}, **more)
        module.generator.top[id(self)] = min(self.top, int(module.policy.config.vocab_size))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give learner and loss back."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give them back after a fit that failed or was interrupted, too."""
        self._give_back()

    def _give_back(self) -> None:
        if self._before is not None:
            (module, learner, loss), self._before = self._before, None
            module.learner, module.loss = learner, loss
            module.generator.top.pop(id(self), None)


def token_and_most_likely(rollout: Rollout, top: int) -> Tensor:
    """Each token, and behind it the sampler's ``top`` most likely ones in its place: ids (B, T, 1 + top)."""
    assert rollout.topk_ids is not None
    most_likely = rollout.topk_ids[..., :top]  # others may have asked for more
    return torch.cat([rollout.sequences[..., None].to(most_likely), most_likely], dim=-1)
