"""MismatchSplit: the shares of compression, rounding and routing in the mismatch."""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule
from sparse_rl_lightning.callbacks.monitors.acceptance import drawn_by_newest
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import Rollout, ScoredRollout

ROUNDING = 1e-8
"""k3 of log-probabilities that are equal to four digits: no reason to warn, at any compression."""
NAMES = {"mismatch/kl_k1": "kl_k1", "mismatch/kl_k3": "kl_k3", "mismatch/ratio_p05": "ratio_p05"}


class MismatchSplit(RolloutCallback):
    """Split the sampler's mismatch in two: rounding (sampler to replay) and compression (replay to dense).

    The sampler and the learner differ because entries were evicted, and because they compute the same numbers in
    another order and precision. Under the sampler's own evictions only the second remains. Each part is logged as
    ``kl_k1``, ``kl_k3`` (never negative) and the 5th percentile of the ratio of probabilities, replayed / sampler's and
    dense / replayed. Costs two forward passes over a rollout, without gradient.

    Where choices of experts are recorded (``rollout.record_routing``) both passes reuse them, and a third pass shows
    what free routers would add: ``routing``, replayed with free routers / replayed. Otherwise that is part of rounding.

    Sequences of an older policy, or of several (partial rollouts), differ by staleness too and are left out; if
    none remain, nothing is logged.

    Args:
        every_n_rollouts: Interval of measurements in rollouts, starting with the first.
        tolerance: Share of the compression's k3 above which the rounding's k3 leads to a warning: then rejection and
            reweighting act in part on rounding, not eviction. ``ReplayGRPO`` keeps it out, and is not warned.

    Raises:
        ValueError: If an argument is not positive, or the module samples with a retriever.
    """

    def __init__(self, every_n_rollouts: int = 10, tolerance: float = 0.1) -> None:
        check_number("every_n_rollouts", every_n_rollouts, least=1)
        check_number("tolerance", tolerance, above=0)
        self.every_n_rollouts = every_n_rollouts
        self.tolerance = tolerance
        self._warned = False

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Run the policy on rollouts that are measured, before anything of an update is in memory."""
        return not module.num_rollouts % self.every_n_rollouts

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Measure and log, if it is this rollout's turn."""
        if scored.index % self.every_n_rollouts:
            return
        if scored.rollout.evictions is None:
            raise UserError(
                "MismatchSplit replays evictions, and this rollout has no record of any: a retriever reads other pages "
                "at every query. Remove the callback, or set model.retriever to null."
            )
        rollout = drawn_by_newest(module, scored.rollout)
        if not len(rollout):
            return
        split = mismatch_split(module, rollout)
        self.measured = scored.index, {name: float(value) for name, value in split.items()}
        module.log_dict(split, batch_size=len(rollout))
        if not module.learner.replays and scored.rollout.replay_logprobs is None:  # whose ratio has no rounding in it
            self._warn(split)

    def _warn(self, split: dict[str, Tensor]) -> None:
        rounding, compression = (float(split[f"mismatch_split/{name}/kl_k3"]) for name in ("rounding", "compression"))
        if rounding <= self.tolerance * compression or rounding < ROUNDING or self._warned:
            return
        self._warned = True
        rank_zero_warn(
            f"MismatchSplit: rounding moves the sampler by k3 = {rounding:.2g} nats per token, compression by "
            f"{compression:.2g}: more than the share of {self.tolerance:g} that tolerance allows. Corrections act on "
            "both. Use ReplayGRPO with replay_objective='dense', which keeps rounding out of the ratio, or more "
            "precise weights or KV memory."
        )


@torch.no_grad()
def mismatch_split(module: RolloutModule, rollout: Rollout) -> dict[str, Tensor]:
    """Compute the scalars of :class:`MismatchSplit` for a rollout, with its evictions, of the current policy."""
    policy, learner = module.policy, module.learner
    parts = rollout.parts(module.steps_per_generation)
    with eval_mode(policy):
        replay = torch.cat([module.replayed(piece)[0] for piece in parts])
        dense = torch.cat([learner.dense(policy, piece)[0] for piece in parts])
        pairs = [("rounding", replay, rollout.sampler_logprobs), ("compression", dense, replay)]
        if rollout.routing is not None:
            free = torch.cat([module.replayed(replace(piece, routing=None))[0] for piece in parts])
            pairs.append(("routing", free, replay))
    split = {}
    for name, new, old in pairs:
        mask = rollout.completion_mask
        statistics = mismatch_statistics(consistency_log_ratio(new, old, mask), mask)
        split.update({f"mismatch_split/{name}/{short}": statistics[long] for long, short in NAMES.items()})
    return split
