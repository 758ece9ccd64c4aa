"""Published corrections by name, with their published defaults: one word in a configuration or on the command line.

    sparse-rl fit --config configs/naive.yaml --trainer.callbacks+=TIS

Each is ``SparsityAwareRejection`` and ``ImportanceReweighting`` with some settings (``docs/corrections.md``); r is the
ratio of dense to sparse probability of a token, called xi elsewhere.
"""

from __future__ import annotations

from lightning.pytorch import Trainer

from sparse_rl_lightning.callbacks.corrections.base import CorrectionCallback
from sparse_rl_lightning.callbacks.corrections.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.corrections.reweighting import ImportanceReweighting, Normalization
from sparse_rl_lightning.callbacks.protocol import RolloutModule
from sparse_rl_lightning.records import ScoredRollout


class TIS(ImportanceReweighting):
    """Truncated importance sampling (Yao et al. 2025; slime): every token weighs min(r, clip_max).

    Args:
        clip_max: Largest weight.
    """

    def __init__(self, clip_max: float = 2.0) -> None:
        super().__init__("token_truncate", clip_max=clip_max)


class IcePop(ImportanceReweighting):
    """A token weighs r inside [clip_min, clip_max] and nothing outside (Ring-1T, arXiv 2510.18855).

    Args:
        clip_min: Smallest ratio that counts.
        clip_max: Largest ratio that counts.
    """

    def __init__(self, clip_min: float = 0.5, clip_max: float = 5.0) -> None:
        super().__init__("token_mask", clip_min, clip_max)


class SequenceTIS(ImportanceReweighting):
    """Every token weighs min(product of r over its sequence, clip_max) (verl's rollout_is="sequence").

    Args:
        clip_max: Largest weight.
    """

    def __init__(self, clip_max: float = 2.0) -> None:
        super().__init__("sequence_truncate", clip_max=clip_max)


class GeometricTIS(ImportanceReweighting):
    """Every token weighs min(geometric mean of r over its sequence, clip_max) (slime's tis_level="geometric").

    Args:
        clip_max: Largest weight.
    """

    def __init__(self, clip_max: float = 2.0) -> None:
        super().__init__("geometric_truncate", clip_max=clip_max)


class SequenceMIS(ImportanceReweighting):
    """Masked importance sampling: the product of r over the sequence where at most clip_max, else 0 (TRL's default).

    Args:
        clip_max: Largest product that counts.
    """

    def __init__(self, clip_max: float = 3.0) -> None:
        super().__init__("sequence_mask", clip_max=clip_max)


class _Both(CorrectionCallback):
    """A rejection and a reweighting, one after the other."""

    weighs = True

    def __init__(self, rejection: SparsityAwareRejection, reweighting: ImportanceReweighting) -> None:
        super().__init__()
        self.parts = (rejection, reweighting)

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Multiply ``keep`` and ``weights``."""
        for part in self.parts:
            part.on_rollout_scored(trainer, module, scored)


class MIS(_Both):
    """The whole recipe of slime's ``mis.yaml``: tokens within [low, high], sequence veto, truncation, mean 1.

    A token weighs min(r, high) over the mean of that, none where r is outside [low, high] or where any token of its
    sequence has r < threshold. As there, use it with ``denominator: kept_tokens``. With ``high: 1.5`` and
    ``kl_on: kept`` it is what the code of Sparse-RL's authors does.

    Args:
        low: Smallest ratio of a token that stays.
        high: Largest ratio of a token that stays, and largest weight.
        threshold: A sequence goes when any of its tokens has a ratio below this.
        normalize: Whether weights are divided by their mean over the ``batch`` or, as in slime, each ``micro_batch``;
            ``none`` leaves them.
    """

    def __init__(
        self, low: float = 0.5, high: float = 2.0, threshold: float = 1e-4, normalize: Normalization = "micro_batch"
    ) -> None:
        super().__init__(
            SparsityAwareRejection(threshold, low, high),
            ImportanceReweighting("token_truncate", clip_max=high, normalize=normalize),
        )


class SequenceMaskTIS(_Both):
    """A token weighs r, in sequences whose geometric mean of r is within [low, high] (OpenRLHF's seq-mask-tis).

    The weights themselves are not truncated, as there. Use it with ``denominator: all``.

    Args:
        low: Smallest geometric mean that stays.
        high: Largest geometric mean that stays.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        super().__init__(SparsityAwareRejection(None, low, high, "geometric"), ImportanceReweighting())
