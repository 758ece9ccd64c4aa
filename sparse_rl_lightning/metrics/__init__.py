"""What is measured: pure functions on one rollout, and torchmetrics classes that add up over rollouts and ranks."""

from __future__ import annotations

from sparse_rl_lightning.metrics.acceptance import AcceptanceTail, SampledAcceptanceTail
from sparse_rl_lightning.metrics.accuracy import (
    Accuracy,
    ConfidenceInterval,
    accuracy,
    confidence_interval,
    mean_accuracy,
    pass_at_k,
)
from sparse_rl_lightning.metrics.beta import BetaFit, fit_beta
from sparse_rl_lightning.metrics.kv import KVSaving
from sparse_rl_lightning.metrics.mismatch import EffectiveSampleSize, MismatchKL
from sparse_rl_lightning.metrics.rejection import RejectionRate, rejection_rate, token_mask_rate
from sparse_rl_lightning.metrics.repetition import RepetitionRate, repetition_rates
from sparse_rl_lightning.metrics.rollout import rollout_metrics

__all__ = [
    "AcceptanceTail",
    "Accuracy",
    "BetaFit",
    "ConfidenceInterval",
    "EffectiveSampleSize",
    "KVSaving",
    "MismatchKL",
    "RejectionRate",
    "RepetitionRate",
    "SampledAcceptanceTail",
    "accuracy",
    "confidence_interval",
    "fit_beta",
    "mean_accuracy",
    "pass_at_k",
    "rejection_rate",
    "repetition_rates",
    "rollout_metrics",
    "token_mask_rate",
]
