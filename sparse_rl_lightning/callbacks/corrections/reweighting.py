"""ImportanceReweighting: let every token count as often as the dense policy would have sampled it."""

from __future__ import annotations

from typing import Literal, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from sparse_rl_lightning.callbacks.base import NO_TOKENS, CorrectionCallback, RolloutModule
from sparse_rl_lightning.corrections import WeightMode, importance_weights, normalize_weights
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.records import Rollout

Normalization = Literal["none", "batch", "micro_batch"]


class ImportanceReweighting(CorrectionCallback):
    """Multiply the loss of each token by xi, the ratio of its dense to its sparse probability, without gradient.

    This is the second half of the correction of Sparse-RL (arXiv 2601.10079). The paper's weights are xi itself::

        - class_path: SparsityAwareRejection
        - class_path: ImportanceReweighting

    The authors' code bounds xi and divides it by a mean taken in every micro-batch. Together with
    ``denominator: kept_tokens`` and ``kl_on: kept`` of the module that is::

        - class_path: SparsityAwareRejection
          init_args: {low: 0.5, high: 1.5}
        - class_path: ImportanceReweighting
          init_args: {mode: token_mask, clip_min: 0.5, clip_max: 1.5, normalize: micro_batch, normalize_clip_max: 1.5}

    Args:
        mode: Ratio of each ``token``, ``sequence`` (product over the sequence) or ``geometric`` (geometric mean),
            followed by ``_truncate`` (clamp to the bounds) or ``_mask`` (0 outside of them).
        clip_min: Lower bound of a weight, null for none.
        clip_max: Upper bound of a weight, null for none.
        normalize: Mean over the completion tokens, rejected ones included, that divides the weights: of the whole
            rollout (``batch``) or of each micro-batch (``micro_batch``); ``none`` leaves them unchanged. With
            ``micro_batch`` the gradient depends on how sequences are grouped into micro-batches.
        normalize_clip_max: Bound in the divisor: null divides by the mean of the weights themselves, a number by the
            mean of min(ratio, that number), as the authors' code does.
    """

    weighs = True

    def __init__(
        self,
        mode: WeightMode = "token_truncate",
        clip_min: float | None = None,
        clip_max: float | None = None,
        normalize: Normalization = "none",
        normalize_clip_max: float | None = None,
    ) -> None:
        importance_weights(*NO_TOKENS, mode, clip_min, clip_max)
        check_choice("normalize", normalize, Normalization)
        if normalize_clip_max is not None:
            check_number("normalize_clip_max", normalize_clip_max, above=0)
            if normalize == "none":
                raise UserError(
                    f"normalize_clip_max={normalize_clip_max} needs normalize='batch' or 'micro_batch', got "
                    f"normalize={normalize!r}."
                )
        self.mode, self.clip_min, self.clip_max = mode, clip_min, clip_max
        self.normalize, self.normalize_clip_max = normalize, normalize_clip_max

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Look at all sequences for a mean over the whole rollout."""
        return self.normalize == "batch"

    def correct(self, trainer: Trainer, module: RolloutModule, part: Rollout) -> None:
        """Multiply ``weights``; a mean over micro-batches is left to the loss, through ``weight_reference``."""
        log_ratio, mask = self.log_ratio(part), part.completion_mask
        assert part.old_logprobs is not None
        weights = self.weigh(log_ratio, part.old_logprobs, mask)
        reference = self._reference(log_ratio, mask, weights)
        if self.normalize == "batch":
            weights = normalize_weights(weights, reference, mask) * self._local_to_common(trainer, reference, mask)
        elif self.normalize == "micro_batch":
            if part.weight_reference is not None:
                raise UserError("Only one ImportanceReweighting may have normalize='micro_batch'. Remove the other.")
            part.weight_reference = reference
        part.weights = weights if part.weights is None else part.weights * weights

    def weigh(self, log_ratio: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """The weights (B, T) of tokens with these log-ratios and dense log-probs, 0 outside the mask."""
        return importance_weights(log_ratio, mask, self.mode, self.clip_min, self.clip_max)

    def _local_to_common(self, trainer: Trainer, reference: Tensor, mask: Tensor) -> Tensor | float:
        """The ratio of this rank's mean of the reference to the mean over all ranks."""
        if trainer.world_size == 1:
            return 1.0
        local = torch.stack([reference[mask].sum(), mask.sum()]).double()
        total: Tensor = trainer.strategy.reduce(local.clone(), reduce_op="sum")
        means = [sums[0] / sums[1].clamp(min=1) for sums in (local, total)]
        return torch.where(means[0] > 0, means[0] / means[1].clamp(min=1e-300), 1.0).to(reference.dtype)

    def _reference(self, log_ratio: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        """The weights (B, T) whose mean is the divisor."""
        if self.normalize_clip_max is None:
            return weights
        mode = cast(WeightMode, f"{self.mode.split('_')[0]}_truncate")
        return importance_weights(log_ratio, mask, mode, clip_max=self.normalize_clip_max)
