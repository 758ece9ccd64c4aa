"""OPSM: leave out bad samples that the learner has already moved away from."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.corrections import off_policy_sequences
from sparse_rl_lightning.errors import UserError


class OPSM(RolloutCallback):
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556), at the loss of every micro-batch.

    A sequence goes when its advantage is negative and mean_t(log pi_old - log pi) > delta, pi being the learner as it
    is now. It counts as zeros: no divisor changes, whatever ``denominator`` says.

    Args:
        delta: Largest mean difference of log-probs that stays; the paper gives none, the default is slime's.
        reference: pi_old is the dense policy before the update (``old``, as in slime), or the ``sampler`` as in the
            paper and in TRL: then the compression counts too, and ``delta`` must be above its mismatch
            (``mismatch/kl_k1``).

    Raises:
        ValueError: If ``delta`` is negative, the reference unknown or the module has no policy objective.
    """

    edits = True

    def __init__(self, delta: float = 1e-4, reference: Literal["old", "sampler"] = "old") -> None:
        nothing = torch.zeros(1, 0)
        off_policy_sequences(nothing, nothing, torch.zeros(1), nothing.bool(), delta)
        if reference not in ("old", "sampler"):
            raise UserError(f"reference must be 'old' or 'sampler', got reference={reference!r}.")
        self.delta, self.reference = delta, reference

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the module's objective."""
        objective = getattr(pl_module, "objective", None)
        if objective is None:
            raise UserError(f"OPSM needs a module with a policy objective, {type(pl_module).__name__} has none.")
        pl_module.objective = replace(objective, off_policy_delta=self.delta, off_policy_reference=self.reference)
