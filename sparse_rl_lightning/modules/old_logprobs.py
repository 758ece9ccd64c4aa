"""Old log-probs: those of the policy before the update, which the loss and the corrections compare with.

They cost a forward pass over a rollout. The forward passes of the first optimizer step on it are of the same policy, so
its sequences get theirs there, unless a callback or an option needs them earlier (``docs/design.md``).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.callbacks.base import correct, report, rescores_all
from sparse_rl_lightning.learner.block import RolloutBlock
from sparse_rl_lightning.records import Rollout, ScoredRollout


class OldLogprobs:
    """The old log-probs of the rollout that is trained on, and who waits for them.

    Args:
        module: Module that rolls out and trains.
    """

    def __init__(self, module: Any) -> None:  # a SparseGRPO, which imports this file
        self.module = module
        self._unreported: ScoredRollout | None = None  # until the first optimizer step on it

    @torch.no_grad()
    def rescore(self, scored: ScoredRollout) -> None:
        """Compute log-probs of the trained policy (dense, or replayed) with the learner's code, and correct by them.

        Left out are the sequences of the first optimizer step, unless something needs theirs earlier.
        """
        start, rollout, m = time.perf_counter(), scored.rollout, self.module
        device = rollout.sequences.device
        order = m.num_rollouts, m.generator.sampling.seed or 0, device
        if rescores_all(m):
            if m.generator.options.oversampling > 1:  # which of them will be trained on is not known yet
                rows = torch.split(torch.arange(len(rollout), device=device), len(rollout) // m.steps_per_generation)
            else:  # in the micro-batches of training, to round as they do
                rows = m.plan(len(rollout) // m.group_size).later(*order, step=0)
            found = [rollout.widened(m.learner.rescored(m.policy, [rollout[own].trimmed()])) for own in rows]
            rollout.old_logprobs = torch.cat(found)[torch.cat(list(rows)).argsort()]
            correct(m, rollout)
        else:
            for rows in m.plan(len(rollout) // m.group_size).later(*order):
                part = rollout.uncorrected(rows).trimmed()
                part.old_logprobs = m.learner.rescored(m.policy, [part])
                correct(m, part)
                rollout.store(rows, part)
            scored.is_complete = False
        scored.seconds["rescoring"] = time.perf_counter() - start

    def report(self, scored: ScoredRollout) -> None:
        """Report a rollout that has all of them, another one when the last is stored."""
        self._unreported = None if scored.is_complete else scored
        if scored.is_complete:
            report(self.module, scored)

    def complete(self, part: Rollout, logprobs: Tensor) -> None:
        """Take those that a micro-batch lacks from its own pass: nothing was updated since the rollout."""
        if part.old_logprobs is None:
            part.old_logprobs = logprobs.detach()
            correct(self.module, part)

    def store(self, block: RolloutBlock, part: Rollout) -> None:
        """Keep what the last micro-batch's loss has completed, and report the rollout with the last of them."""
        if block.store(part) and self._unreported is not None:
            scored, self._unreported = self._unreported, None
            scored.is_complete = True
            report(self.module, scored)

    def forget(self) -> None:
        """Drop a rollout of an earlier, interrupted fit."""
        self._unreported = None
