"""Calls of rollout callbacks around a rollout's log-probs: who needs them early, corrections, and the report."""

from __future__ import annotations

from typing import cast

import torch
from lightning.pytorch import LightningModule

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule
from sparse_rl_lightning.distributed.ranks import mean_over_ranks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.metrics.rollout import rollout_metrics
from sparse_rl_lightning.policies.modes import has_dropout
from sparse_rl_lightning.records import Rollout, ScoredRollout


def rollout_callbacks(module: RolloutModule) -> list[RolloutCallback]:
    """The trainer's callbacks that see rollouts, in its order; none without a trainer, in a script."""
    trainer = cast(LightningModule, module)._trainer
    return [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, RolloutCallback)]


def rescores_all(module: RolloutModule) -> bool:
    """Whether even the first optimizer step on a rollout needs log-probs from before it (``docs/learner.md``).

    Those of its own forward passes are of the same policy, but come too late for numbers of the whole rollout, and with
    dropout they are of another distribution.
    """
    return (
        cast(LightningModule, module)._trainer is None  # in a script no step is to come
        or module.generator.options.oversampling > 1
        or module.loss.counts_kept
        or has_dropout(module.policy)
        or any(callback.needs_rescoring(module) for callback in rollout_callbacks(module))
    )


@torch.no_grad()
def correct(module: RolloutModule, part: Rollout) -> None:
    """Let callbacks reject and reweight sequences that have dense log-probs."""
    for callback in rollout_callbacks(module):
        callback.correct(module.trainer, module, part)


def report(module: RolloutModule, scored: ScoredRollout) -> None:
    """Show a rollout to callbacks, log its numbers, and drop what the loss does not read.

    Raises:
        ValueError: If a callback edits what the loss may have read already.
    """
    for callback in rollout_callbacks(module):
        before = _versions(scored.rollout)
        callback.on_rollout_scored(module.trainer, module, scored)
        if _versions(scored.rollout) != before:
            raise UserError(
                f"{type(callback).__name__}.on_rollout_scored changed keep, weights or advantages, which the loss may "
                "have read already. Change them in correct(trainer, module, part)."
            )
    metrics = rollout_metrics(scored) | module.generator.metrics(scored.rollout)
    trainer = cast(LightningModule, module)._trainer  # none in a script
    ranks = 1 if trainer is None else trainer.world_size
    module.log_dict(mean_over_ranks(metrics, ranks), batch_size=len(scored.completions))
    scored.rollout.topk_ids = scored.rollout.topk_logprobs = None
    scored.rollout.evictions = scored.rollout.evictions if module.keeps_evictions else None


def _versions(rollout: Rollout) -> list[tuple[int, int]]:
    """Numbers that change when one of the tensors that the loss reads is replaced or written."""
    read = (rollout.keep, rollout.weights, rollout.advantages)
    return [(id(value), value._version) for value in read if value is not None]
