"""Published corrections by name, with their published defaults: one word in a configuration or on the command line.

    sparse-rl fit --config configs/naive.yaml --trainer.callbacks+=TIS

Each is ``SparsityAwareRejection`` and ``ImportanceReweighting`` with some settings (``docs/corrections.md``); r is the
ratio of dense to sparse probability of a token, called xi elsewhere.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch import Tensor

from sparse_rl_lightning.callbacks.base import NO_TOKENS, CorrectionCallback, RolloutModule
from sparse_rl_lightning.callbacks.corrections.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.corrections.reweighting import ImportanceReweighting, Normalization
from sparse_rl_lightning.corrections import calibrated_weights
from sparse_rl_lightning.records import Rollout


class TIS(ImportanceReweighting):
    """Truncated importance sampling (Yao et al. 2025; slime): every token has the weight min(r, clip_max).

    Args:
        clip_max: Largest weight.
    """

    def __init__(self, clip_max: float = 2.0) -> None:
        super().__init__("token_truncate", clip_max=clip_max)


class IcePop(ImportanceReweighting):
    """A token has the weight r inside [clip_min, clip_max] and 0 outside (Ring-1T, arXiv 2510.18855).

    Args:
        clip_min: Smallest ratio that counts.
        clip_max: Largest ratio that counts.
    """

    def __init__(self, clip_min: float = 0.5, clip_max: float = 5.0) -> None:
        super().__init__("token_mask", clip_min, clip_max)


class CIS(ImportanceReweighting):
    """Calibrated importance sampling: min(r, 1 + threshold x max(1 - p, floor)), p dense (arXiv 2609.32444).

    Rounding moves the log-odds of sure and unsure tokens alike, and so the ratio of sure ones less: their bound is
    tighter.

    Args:
        threshold: Bound on the factor of the odds, minus 1.
        floor: Least 1 - p, near the resolution of the log-probabilities.
    """

    def __init__(self, threshold: float = 2.3, floor: float = 5e-3) -> None:
        super().__init__()
        calibrated_weights(NO_TOKENS[0], *NO_TOKENS, threshold, floor)
        self.threshold, self.floor = threshold, floor

    def weigh(self, log_ratio: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """The weights (B, T) of tokens with these log-ratios and dense log-probs, 0 outside the mask."""
        return calibrated_weights(log_ratio, old_logprobs, mask, self.threshold, self.floor)


class SequenceTIS(ImportanceReweighting):
    """Every token has the weight min(product of r over its sequence, clip_max) (verl's rollout_is="sequence").

    Args:
        clip_max: Largest weight.
    """

    def __init__(self, clip_max: float = 2.0) -> None:
        super().__init__("sequence_truncate", clip_max=clip_max)


class GeometricTIS(ImportanceReweighting):
    """Every token has the weight min(geometric mean of r over its sequence, clip_max) (slime's tis_level="geometric").

    Args:
        clip_max: Largest weight.
    """

    def __init__(self, clip_max: float = 2.0) -> None:
        super().__init__("geometric_truncate", clip_max=clip_max)


class SequenceMIS(ImportanceReweighting):
    """Masked importance sampling: the product of r over the sequence if at most clip_max, else 0 (TRL's default).

    Args:
        clip_max: Largest product that counts.
    """

    def __init__(self, clip_max: float = 3.0) -> None:
        super().__init__("sequence_mask", clip_max=clip_max)


class _Both(CorrectionCallback):
    """A rejection and a reweighting, one after the other."""

    weighs = True

    def __init__(self, rejection: SparsityAwareRejection, reweighting: ImportanceReweighting) -> None:
        self.parts = (rejection, reweighting)

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Look at all sequences if one of the two does."""
        return any(correction.needs_rescoring(module) for correction in self.parts)

    def correct(self, trainer: Trainer, module: RolloutModule, part: Rollout) -> None:
        """Multiply ``keep`` and ``weights``."""
        for correction in self.parts:
            correction.correct(trainer, module, part)


class MIS(_Both):
    """The whole recipe of slime's ``mis.yaml``: tokens within [low, high], sequence veto, truncation, mean 1.

    A token has the weight min(r, high) divided by the mean of that, and none if r is outside [low, high] or any token
    of its sequence has r < threshold. As in slime, use it with ``denominator: kept_tokens``. With ``high: 1.5`` and
    ``kl_on: kept`` it is the correction in the code of Sparse-RL's authors.

    Args:
        low: Smallest ratio of a token to keep.
        high: Largest ratio of a token to keep, and largest weight.
        threshold: Ratio below which a single token rejects its sequence.
        normalize: Mean that divides the weights: over the ``batch`` or, as in slime, each ``micro_batch``; ``none``
            leaves them unchanged.
    """

    def __init__(
        self, low: float = 0.5, high: float = 2.0, threshold: float = 1e-4, normalize: Normalization = "micro_batch"
    ) -> None:
        super().__init__(
            SparsityAwareRejection(threshold, low, high),
            ImportanceReweighting("token_truncate", clip_max=high, normalize=normalize),
        )


class SequenceMaskTIS(_Both):
    """A token has the weight r, in sequences whose geometric mean of r is within [low, high] (OpenRLHF's seq-mask-tis).

    The weights themselves are not truncated, as in OpenRLHF. Use it with ``denominator: all``.

    Args:
        low: Smallest geometric mean to keep.
        high: Largest geometric mean to keep.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        super().__init__(SparsityAwareRejection(None, low, high, "geometric"), ImportanceReweighting())
