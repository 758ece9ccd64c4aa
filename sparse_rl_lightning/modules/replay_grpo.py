"""ReplayGRPO: SparseGRPO with a learner that can see exactly what the sampler saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.loss import Items
from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout

ReplayObjective = Literal["sparse", "dense", "mixed"]


class ReplayGRPO(SparseGRPO):
    """GRPO that replays the sampler's evictions, so that sampling with another policy needs no guess.

    Eviction is permanent, so one forward pass under the record of a rollout's evictions gives the probabilities the
    sampler drew with, and their gradient. What to do with them is the ``replay_objective``:

    - ``sparse``: the staleness ratio w = pi_theta / pi_old has both policies replayed. It trains the policy with the
      compressed cache; the ratio xi of SparseGRPO is 1 up to rounding, so the correction callbacks find nothing to do.
      The KL penalty compares with the replayed reference policy.
    - ``dense``: SparseGRPO's objective, but xi = pi_old,dense / pi_old,replay: both from the learner's own kernels, so
      that rounding in the sampler is no mismatch. Without correction callbacks it is the same as SparseGRPO.
    - ``mixed``: ``alpha`` x sparse + (1 - ``alpha``) x dense, two forward passes per micro-batch. What callbacks reject
      or reweight concerns the dense term; so does the KL penalty.

    Args:
        policy: As in :class:`SparseGRPO`, like all other arguments not listed here. Its ``attn_implementation`` must
            not be flash attention, which takes no mask.
        replay_objective: ``sparse``, ``dense`` or ``mixed``.
        alpha: Weight of the sparse term of ``mixed``, between 0 and 1.
        **kwargs: Arguments of :class:`SparseGRPO`.

    Raises:
        ValueError: If an argument is out of range, there is a retriever, ``dense`` and ``mixed`` get
            ``rescore=False``, or the policy is to run flash attention.
    """

    replays = keeps_evictions = True

    def __init__(
        self, *args: Any, replay_objective: ReplayObjective = "sparse", alpha: float = 0.5, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if replay_objective not in get_args(ReplayObjective):
            raise UserError(
                f"replay_objective must be one of {get_args(ReplayObjective)}, got "
                f"replay_objective={replay_objective!r}."
            )
        if self.retriever is not None:
            raise UserError(
                f"ReplayGRPO replays evictions, and {type(self.retriever).__name__} evicts nothing: which pages a "
                "query reads changes with every query. Set model.retriever to null, or train with SparseGRPO."
            )
        if not 0 <= alpha <= 1:
            raise UserError(f"alpha is the share of the sparse term, between 0 and 1; got alpha={alpha}.")
        if replay_objective != "sparse" and not self.rescore:
            raise UserError(
                f"replay_objective={replay_objective!r} needs the log-probs of the dense policy: set model.rescore to "
                "true, or choose replay_objective='sparse'."
            )
        self.replay_objective = replay_objective
        self.alpha = alpha
        self.keeps_evictions = replay_objective != "dense"  # whose loss looks at old log-probs only

    @torch.no_grad()
    def _rescore(self, scored: ScoredRollout) -> None:
        """Log-probs of the policy before the update: replayed, dense, or both."""
        super()._rescore(scored)
        if self.replay_objective != "sparse":  # otherwise what was computed is replayed
            self._replay_old(scored)

    def _logprobs(self, policy: PreTrainedModel, part: Rollout) -> tuple[Tensor, Tensor]:
        if self.replay_objective == "sparse":
            return self._sparse_logprobs(policy, part)
        return super()._logprobs(policy, part)

    def _policy_loss(self, part: Rollout, items: Items, logprobs: Tensor) -> LossOutput:
        output = super()._policy_loss(part, items, logprobs)
        if self.replay_objective != "mixed":
            return output
        replayed, _ = self.replayed(part)
        own = replace(part, old_logprobs=part.replay_logprobs, keep=None, weights=None, weight_reference=None)
        # nothing is rejected in the sparse term, so everything counts
        term = replace(self.objective, beta=0.0, off_policy_delta=None)(own, Items(items.everything, None), replayed)
        metrics = {f"sparse/{name}": value for name, value in term.metrics.items()}
        loss = self.alpha * term.loss + (1 - self.alpha) * output.loss
        return LossOutput(loss, {**output.metrics, **metrics})
