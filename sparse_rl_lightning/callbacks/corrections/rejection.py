"""SparsityAwareRejection: leave out what the dense policy would hardly ever have sampled."""

from __future__ import annotations

import math
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from sparse_rl_lightning.callbacks.base import NO_TOKENS, CorrectionCallback, RolloutModule
from sparse_rl_lightning.corrections import mask_sequences, mask_tokens, reject_sequences
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.records import Rollout

Baseline = Literal["all", "kept"]
Level = Literal["token", "sequence", "geometric"]


class SparsityAwareRejection(CorrectionCallback):
    """Reject sequences with a token that the dense policy finds near-impossible, and tokens outside an interval.

    This is the first half of the correction of Sparse-RL (arXiv 2601.10079); ``ImportanceReweighting`` is the other.
    Rejected samples stay in the advantages' baseline unless ``baseline`` says otherwise. The paper rejects sequences
    and nothing else::

        - class_path: SparsityAwareRejection

    The authors' code also drops single tokens::

        - class_path: SparsityAwareRejection
          init_args: {low: 0.5, high: 1.5}

    Args:
        threshold: Ratio xi of dense to sparse probability below which a single token rejects its sequence. Null
            rejects no sequence.
        low: Ratio xi below which a token is left out, null for no bound.
        high: Ratio xi above which a token is left out, null for no bound.
        level: Level of the bounds: the xi of each ``token``, or of a whole sequence, as its product (``sequence``) or
            its ``geometric`` mean over the tokens.
        baseline: Samples that make the mean and deviation of a prompt's advantages: ``all`` as in the paper, or those
            of which this and earlier callbacks leave something (``kept``), so that bad samples that nothing is learned
            from do not make others good.
    """

    def __init__(
        self,
        threshold: float | None = 1e-4,
        low: float | None = None,
        high: float | None = None,
        level: Level = "token",
        baseline: Baseline = "all",
    ) -> None:
        self.threshold, self.level, self.baseline = threshold, level, baseline
        check_choice("baseline", baseline, Baseline, "SparsityAwareRejection")
        check_choice("level", level, Level, "SparsityAwareRejection")
        high = None if high == math.inf else high  # no bound, as a low of 0 is none
        for name, value in (("threshold", threshold), ("low", low), ("high", high)):
            check_number(name, value, owner="SparsityAwareRejection", or_none=True)
        self.bounds = (low or 0.0, math.inf if high is None else high) if low or high is not None else None
        if threshold is None and self.bounds is None:
            raise UserError(
                "SparsityAwareRejection: threshold, low and high are all null or no bound, so that nothing would be "
                "rejected. Give one of them, or leave the callback out."
            )
        if threshold is not None:
            reject_sequences(*NO_TOKENS, threshold)
        if self.bounds is not None:
            self._within(*NO_TOKENS)
        elif level != "token":
            raise UserError(f"level={level!r} needs a bound: give low or high.")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse baselines that a sparse term, which learns from the rejected too, would not have."""
        super().setup(trainer, pl_module, stage)
        learns = ("learns_from_rejected", "adapter_learns_from_rejected")  # any module may be corrected
        if self.baseline == "kept" and any(getattr(pl_module, name, False) for name in learns):
            raise UserError(
                "SparsityAwareRejection: baseline='kept' leaves rejected sequences without an advantage, and "
                f"{type(pl_module).__name__} as it is configured learns from them. Set baseline to all."
            )

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Look at whole rollouts for baselines of what is kept: a prompt's samples are in several micro-batches."""
        return self.baseline == "kept"

    def correct(self, trainer: Trainer, module: RolloutModule, part: Rollout) -> None:
        """Multiply ``keep`` by the mask of what remains, and compare what remains if the baseline is of that."""
        log_ratio, mask = self.log_ratio(part), part.completion_mask
        keep = mask if part.keep is None else part.keep
        if self.threshold is not None:
            keep = keep & reject_sequences(log_ratio, mask, self.threshold)[:, None]
        if self.bounds is not None:
            keep = keep & self._within(log_ratio, mask)
        part.keep = keep
        if self.baseline == "kept":
            assert part.rewards is not None
            part.advantages = module.advantages(torch.where(keep.any(dim=1), part.rewards, torch.nan))

    def _within(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The mask (B, T) or (B, 1), bool, of what is inside the bounds."""
        assert self.bounds is not None
        if self.level == "token":
            return mask_tokens(log_ratio, mask, *self.bounds)
        return mask_sequences(log_ratio, mask, *self.bounds, self.level)[:, None]
