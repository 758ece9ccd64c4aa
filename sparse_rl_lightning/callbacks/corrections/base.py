"""The base of callbacks that correct for sampling with a policy other than the learner's."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule
from sparse_rl_lightning.corrections import consistency_log_ratio
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Rollout

NO_TOKENS = (torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.bool))
"""Log-ratios and mask of an empty rollout, on which the pure functions check their other arguments."""


class CorrectionCallback(RolloutCallback):
    """A callback that edits a rollout by the ratio xi of dense to sparse probability."""

    weighs = False
    """Whether it multiplies ``weights``, which only one callback may do: two would weight by the ratio twice."""

    def __init__(self) -> None:
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second correction of the same kind."""
        others = [c for c in trainer.callbacks if isinstance(c, CorrectionCallback) and c is not self]  # type: ignore[attr-defined]
        for other in others:
            if type(other) is type(self) or (other.weighs and self.weighs):
                raise UserError(
                    f"trainer.callbacks: {type(other).__name__} and {type(self).__name__} are two corrections of one "
                    "kind, which would be applied one after the other. Keep one of them."
                )

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Look at every sequence by itself."""
        return False

    def log_ratio(self, rollout: Rollout) -> Tensor:
        """The log-ratios log xi (B, T) of sequences with dense log-probs, 0 outside the completions."""
        assert rollout.old_logprobs is not None
        name = type(self).__name__
        if rollout.behavior_logprobs is not None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{name}: the rollouts are drawn from truncated distributions (top_k, top_p, min_p, "
                "min_completion_length or a repetition_penalty), but the ratio xi compares whole distributions and "
                "ignores the truncation. Sample with top_k=0, top_p=1, min_p=null, min_completion_length=0, "
                "repetition_penalty=1 for an exact correction."
            )
        return consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, rollout.completion_mask)
