"""Metrics: pure functions on one rollout, and accuracy over problems."""

from __future__ import annotations

from sparse_rl_lightning.metrics.accuracy import (
    Accuracy,
    ConfidenceInterval,
    accuracy,
    confidence_interval,
    mean_accuracy,
    pass_at_k,
)
from sparse_rl_lightning.metrics.rollout import rejection_rate, repetition_rates, rollout_metrics, token_mask_rate

__all__ = [
    "Accuracy",
    "ConfidenceInterval",
    "accuracy",
    "confidence_interval",
    "mean_accuracy",
    "pass_at_k",
    "rejection_rate",
    "repetition_rates",
    "rollout_metrics",
    "token_mask_rate",
]
