"""Old log-probs: those of the policy before the update, which the loss and the corrections compare with.

They cost a forward pass over a rollout. The forward passes of the first optimizer step on it are of the same policy, so
its sequences get theirs there, unless a callback or an option needs them earlier (``docs/design.md``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutModule, correct, report, rescores_all
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock
from sparse_rl_lightning.records import Rollout, ScoredRollout


class OldLogprobs:
    """The old log-probs of the rollout that is trained on, and who waits for them.

    Args:
        module: Module that rolls out and trains.
    """

    def __init__(self, module: RolloutModule) -> None:
        self.module = module
        self.forget()

    def forget(self) -> None:
        """Drop a rollout of an earlier, interrupted fit."""
        self.is_complete = True  # False until the first optimizer step brings those of its sequences
        self._unreported: ScoredRollout | None = None

    @torch.no_grad()
    def rescore(self, scored: ScoredRollout) -> None:
        """Compute log-probs of the trained policy (dense, or replayed) with the learner's code, and correct by them.

        Left out are the sequences of the first optimizer step, unless something needs theirs earlier.
        """
        start, rollout, m = time.perf_counter(), scored.rollout, self.module
        device = rollout.sequences.device
        order = m.num_rollouts, m.generator.sampling.seed or 0, device
        self.is_complete = rescores_all(m)
        if self.is_complete:
            if m.generator.options.oversampling > 1:  # which of them will be trained on is not known yet
                in_order = torch.arange(len(rollout), device=device)
                rows: Sequence[Tensor] = torch.split(in_order, len(rollout) // m.steps_per_generation)
            else:  # in the micro-batches of training, to round as they do
                rows = m.plan(len(rollout) // m.group_size).later(*order, step=0)
            values = [rollout.widened(m.learner.rescored(m.policy, rollout[index].trimmed())) for index in rows]
            rollout.old_logprobs = torch.cat(values)[torch.cat(list(rows)).argsort()]
            correct(m, rollout)
        else:
            for index in m.plan(len(rollout) // m.group_size).later(*order):
                micro_batch = _uncorrected(rollout[index]).trimmed()
                micro_batch.old_logprobs = m.learner.rescored(m.policy, micro_batch)
                correct(m, micro_batch)
                _store(rollout, index, micro_batch)
        scored.seconds["rescoring"] = time.perf_counter() - start

    def report(self, scored: ScoredRollout) -> None:
        """Report a rollout that has all of them; another one when the last is stored."""
        self._unreported = None if self.is_complete else scored
        if self.is_complete:
            report(self.module, scored)

    def lacking(self, micro_batch: Rollout) -> Rollout:
        """A micro-batch as its loss gets it: without them, if its own pass is to bring them."""
        return micro_batch if self.is_complete else _uncorrected(micro_batch)

    def complete(self, micro_batch: Rollout, logprobs: Tensor) -> None:
        """Take those that a micro-batch lacks from its own pass: nothing was updated since the rollout."""
        if micro_batch.old_logprobs is None:
            micro_batch.old_logprobs = logprobs.detach()
            correct(self.module, micro_batch)

    def store(self, block: RolloutBlock, micro_batch: Rollout) -> None:
        """Keep what the last micro-batch's loss has completed, and report the rollout with the last of them."""
        if self.is_complete:
            return
        if micro_batch.old_logprobs is None:
            raise UserError("micro_batch_loss must set part.old_logprobs where it is None, as SparseGRPO's does.")
        _store(block.rollout, block.served, micro_batch)
        self.is_complete = block.cursor >= block.plan.accumulate
        if self.is_complete and self._unreported is not None:  # it is None of a checkpoint's rollout
            report(self.module, self._unreported)
            self._unreported = None

    def state(self, plan: BlockPlan) -> dict[str, Any]:
        """Whether they are complete, for a checkpoint."""
        return {"is_complete": self.is_complete, "accumulate": plan.accumulate}

    def load(self, state: dict[str, Any], plan: BlockPlan) -> None:
        """Continue with the rest of a checkpoint's rollout.

        Raises:
            ValueError: If they would become complete after another number of micro-batches.
        """
        self.is_complete = state.get("is_complete", True)
        before = state.get("accumulate", plan.accumulate)
        if not self.is_complete and before != plan.accumulate:
            raise UserError(
                f"The checkpoint is from within a rollout's first optimizer step of {before} micro-batches, and "
                f"accumulate_grad_batches is {plan.accumulate} now: resume with {before}, or from another checkpoint."
            )


def _uncorrected(rollout: Rollout) -> Rollout:
    """Sequences without dense log-probs and corrections, which others of their rollout may have."""
    return replace(rollout, old_logprobs=None, weights=None, weight_reference=None)


def _store(rollout: Rollout, index: Tensor, source: Rollout) -> None:
    """Take over dense log-probs, and all that callbacks may edit, of the sequences at ``index`` from ``source``.

    Sequences whose source has no weights count with a weight of 1.
    """
    for name in ("old_logprobs", "advantages", "keep", "weights", "weight_reference"):
        value: Tensor | None = getattr(source, name)
        if value is None:
            continue
        if getattr(rollout, name) is None:
            setattr(rollout, name, rollout.completion_mask.to(value.dtype) * (name != "old_logprobs"))
        stored: Tensor = getattr(rollout, name)
        stored = stored[..., : value.shape[-1]] if value.ndim > 1 else stored  # the source may have less padding
        stored[index] = value
