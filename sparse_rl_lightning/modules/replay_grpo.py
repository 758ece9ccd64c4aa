"""ReplayGRPO: SparseGRPO with a learner that can see exactly what the sampler saw."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.learner.loss import Denominators
from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO
from sparse_rl_lightning.policies.sharding import is_sharded
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout

ReplayObjective = Literal["sparse", "dense", "mixed", "rejected"]


class ReplayGRPO(SparseGRPO):
    """GRPO that replays the sampler's evictions, so that sampling with another policy needs no approximation.

    Eviction is permanent, so one forward pass under the record of a rollout's evictions gives the probabilities the
    sampler drew with, and their gradient. Their use is the ``replay_objective``:

    - ``sparse``: both policies of the staleness ratio w = pi_theta / pi_old are replayed. It trains the policy with the
      compressed cache; the ratio xi of SparseGRPO is 1 up to rounding, so the correction callbacks have no effect.
      The KL penalty compares with the replayed reference policy.
    - ``dense``: SparseGRPO's objective, but xi = pi_old,dense / pi_old,replay: both from the learner's own kernels, so
      that rounding in the sampler is not a mismatch. Without correction callbacks it is the same as SparseGRPO.
    - ``mixed``: ``alpha`` x sparse + (1 - ``alpha``) x dense, two forward passes per micro-batch. What callbacks reject
      or reweight concerns the dense term; so does the KL penalty.
    - ``rejected``: the dense objective, and for the sequences that callbacks reject as a whole the sparse one, a second
      forward pass over these alone. What the compressed policy does wrong is thereby unlearned instead of left out.

    Args:
        policy: Policy as in :class:`SparseGRPO`, like all other arguments not listed here. Its ``attn_implementation``
            must not be flash attention, which takes no mask.
        replay_objective: Objective, ``sparse``, ``dense``, ``mixed`` or ``rejected``.
        alpha: Weight of the sparse term of ``mixed``, between 0 and 1.
        **kwargs: Arguments of :class:`SparseGRPO`.

    Raises:
        ValueError: If an argument is out of range, there is a retriever, or the policy would run flash attention.
    """

    keeps_evictions = True

    def __init__(
        self, *args: Any, replay_objective: ReplayObjective = "sparse", alpha: float = 0.5, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_choice("replay_objective", replay_objective, ReplayObjective)
        retriever = self.generator.retriever
        if retriever is not None:
            raise UserError(
                f"ReplayGRPO replays evictions, and {type(retriever).__name__} evicts nothing: which pages a "
                "query reads changes with every query. Set model.retriever to null, or train with SparseGRPO."
            )
        check_number("alpha", alpha, least=0, most=1)
        check_partial(self)
        check_attention(self, self.policy_source.attn_implementation)
        self.replay_objective = replay_objective
        self.alpha = alpha
        self.keeps_evictions = replay_objective != "dense"  # whose loss reads only old log-probs
        self.corrects = self.corrects or replay_objective in ("sparse", "mixed")
        if replay_objective in ("mixed", "rejected"):
            self.loss.second_term()  # which not every loss has
        self.learns_from_rejected = replay_objective in ("mixed", "rejected")
        self.learner = replace(self.learner, replays=replay_objective == "sparse")

    def on_policy_loaded(self) -> None:
        """Load the policy as SparseGRPO does; refuse attention that takes no mask."""
        super().on_policy_loaded()
        check_attention(self, self.policy.config._attn_implementation)

    def rescore(self, scored: ScoredRollout) -> None:
        """Compute log-probs of the policy before the update: replayed, dense, or both."""
        if self.replay_objective != "sparse":  # otherwise the log-probs computed are replayed ones
            replay_old(self, scored)
        super().rescore(scored)

    def micro_batch_loss(self, part: Rollout, denominators: Denominators) -> LossOutput:
        """SparseGRPO's loss with the log-probs that the objective replays, or both terms of ``mixed``."""
        output = super().micro_batch_loss(part, denominators)
        if self.replay_objective == "mixed":
            term = self._sparse_term(part, part, denominators)
            total = self.alpha * term.loss + (1 - self.alpha) * output.loss
        elif self.replay_objective == "rejected" and len(rejected := part[_rejected_sequences(part)]):
            term = self._sparse_term(rejected, part, denominators)
            total = term.loss + output.loss
        else:
            return output
        metrics = {f"sparse/{name}": value for name, value in term.metrics.items()}
        return LossOutput(total, {**output.metrics, **metrics})

    def check_strategy(self) -> None:
        """Refuse a second pass that only ranks with rejected sequences make, where all must make the same ones."""
        super().check_strategy()
        if self.replay_objective == "rejected" and is_sharded(self.policy):
            raise UserError(
                "replay_objective='rejected' replays what each rank has rejected, but ranks that share weights "
                "(ZeRO-3, FSDP2) must pass through the model equally often. Use ZeRO-2, or replay_objective: mixed."
            )

    def _sparse_term(self, sequences: Rollout, micro_batch: Rollout, denominators: Denominators) -> LossOutput:
        """The sparse objective of some sequences of a micro-batch, nothing rejected, as its share of the step."""
        replayed, _ = self.replayed(sequences)
        sequences = replace(
            sequences, old_logprobs=sequences.replay_logprobs, keep=None, weights=None, weight_reference=None
        )
        loss = self.loss.second_term()
        everything = denominators.everything
        if everything is None:  # bnpo: the micro-batch by itself
            everything = loss.mask(micro_batch).sum()
        return loss(sequences, replayed, replace(denominators, policy=everything, penalty=None))


def _rejected_sequences(rollout: Rollout) -> Tensor:
    """Indices of the sequences that have tokens, none of which is kept."""
    mask = rollout.completion_mask
    kept = mask if rollout.keep is None else mask & rollout.keep
    return (mask.any(dim=1) & ~kept.any(dim=1)).nonzero().squeeze(1)


def replay_old(module: SparseGRPO, scored: ScoredRollout) -> None:
    """Compute log-probs of the sparse policy before the update, with the learner's own kernels."""
    start, rollout = time.perf_counter(), scored.rollout
    pieces = rollout.trimmed_parts(module.steps_per_generation)
    logprobs = [module.learner.rescored(module.policy, piece, replayed=True) for piece in pieces]
    rollout.replay_logprobs = torch.cat([rollout.widened(values) for values in logprobs])
    scored.seconds["replay"] = time.perf_counter() - start


def check_partial(module: SparseGRPO) -> None:
    """Refuse partial rollouts.

    Raises:
        ValueError: If the module's rollouts are partial.
    """
    if module.generator.partial is not None:
        raise UserError(
            f"rollout.partial_rollout_steps={module.generator.partial.max_steps} does not work with "
            f"{type(module).__name__}: no replay reproduces a sequence that several versions of the policy drew. Use "
            "SparseGRPO, or model.rollout.partial_rollout_steps to null."
        )


def check_attention(module: SparseGRPO, name: str | None) -> None:
    """Refuse attention under which nothing can be replayed.

    Args:
        module: Module that replays.
        name: Name of the policy's ``attn_implementation``, if known.

    Raises:
        ValueError: If it takes no mask.
    """
    if name is not None and "flash" in name:
        raise UserError(
            f"{type(module).__name__} attends under the sampler's evictions, and attn_implementation={name!r} takes "
            "no such mask (and dense log-probs of other kernels would bring rounding back into xi). Set the "
            "policy's attn_implementation to 'sdpa', or train with SparseGRPO."
        )
