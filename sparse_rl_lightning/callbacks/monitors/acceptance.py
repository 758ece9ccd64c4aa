"""AcceptanceMonitor: token-wise agreement of the sparse policy with the dense one, and its upper limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from sparse_rl_lightning.acceptance import BIN_SIZE, NUM_BINS, AcceptanceTail, sampled_acceptance, tail_target
from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, rollout_module
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import Rollout, Rows, ScoredRollout


@dataclass(frozen=True)
class TailReport:
    """The last measurement, for callbacks that act on it."""

    index: int  # number of the rollout
    tail: dict[str, float]  # 5th percentile of the lower bound by length bin, without bins that have no tokens
    tokens: dict[str, int]  # number of tokens in each of these bins
    ceiling: float | None  # the same percentile between dense policies, None if it was not measured

    @classmethod
    def mean(cls, reports: Sequence[TailReport]) -> TailReport:
        """Those of several ranks together: of percentiles their mean by tokens, which is not that of all tokens."""
        if len(reports) == 1:
            return reports[0]
        tokens = Counter[str]()
        for report in reports:
            tokens.update(report.tokens)
        tail = {name: sum(r.tail[name] * r.tokens[name] for r in reports if name in r.tail) for name in tokens}
        ceilings = [report.ceiling for report in reports if report.ceiling is not None]
        return cls(
            reports[0].index, {name: total / tokens[name] for name, total in tail.items()}, dict(tokens),
            fmean(ceilings) if ceilings else None,
        )  # fmt: skip


class AcceptanceMonitor(RolloutCallback):
    """Log the 5th percentile of the acceptance by length bin (Sparrow, arXiv 2606.08446) together with its ceiling.

    The acceptance of a token is the overlap of the dense and the sparse policy's distributions where it was drawn. The
    sampler reports its ``top_k`` most likely tokens, the learner's log-probabilities of the same tokens come from one
    forward pass, and both bound it. The ceiling is the same statistic for a small rollout with the full cache: below 1
    only by rounding and the truncation to ``top_k``. Logged for every rollout that is measured:

    =============================== ========= ========================================================================
    key                             unit      meaning
    =============================== ========= ========================================================================
    acceptance/p05/{bin}            share     5th percentile of the lower bound, by tokens before (0-2000, ..., 38000+)
    acceptance/p05                  share     the same over all tokens
    acceptance/mean                 share     mean of the lower bound
    acceptance/near_one             share     tokens whose lower bound exceeds 0.999
    acceptance/p05_upper/{bin}      share     5th percentile of the upper bound, likewise
    acceptance/p05_upper            share     the same over all tokens
    acceptance/mean_upper           share     mean of the upper bound
    acceptance/near_one_upper       share     tokens whose upper bound exceeds 0.999
    acceptance/sampled_p05          share     5th percentile of min(1, dense / sparse) of the tokens drawn
    acceptance/sampled_mean         share     its mean, an estimate of the mean acceptance
    acceptance/ceiling_p05          share     p05 between dense policies, lower bound
    acceptance/ceiling_p05_upper    share     the same, upper bound
    acceptance/target               share     0.86 x the ceiling / 0.945, Sparrow's target under its own ceiling
    =============================== ========= ========================================================================

    Bins without tokens are left out, and the ``sampled_`` keys where the learner replays. A rollout that is measured is
    rescored as a whole. Tokens of partial rollouts count if the newest policy drew the whole sequence. Runs are the
    same with this callback and without it.

    Args:
        every_n_rollouts: Interval of measurements in rollouts, starting with the first.
        top_k: Number of most likely tokens that the sampler reports; at most the vocabulary, on a GPU 256.
        bin_size: Number of tokens per length bin.
        num_bins: Number of bins; the last has no end.
        ceiling_prompts: Number of prompts of the small rollout with the full cache, one sample each; 0 measures no
            ceiling.
        ceiling_every_n_rollouts: Number of rollouts between measurements of the ceiling, which hardly changes in
            training.

    Raises:
        ValueError: If an argument is out of range; at the start of ``fit``, if the module does not roll out.
    """

    def __init__(
        self,
        every_n_rollouts: int = 10,
        top_k: int = 20,
        bin_size: int = BIN_SIZE,
        num_bins: int = NUM_BINS,
        ceiling_prompts: int = 8,
        ceiling_every_n_rollouts: int = 100,
    ) -> None:
        for name, value, least in (
            ("every_n_rollouts", every_n_rollouts, 1), ("top_k", top_k, 1), ("bin_size", bin_size, 1),
            ("num_bins", num_bins, 1), ("ceiling_prompts", ceiling_prompts, 0),
            ("ceiling_every_n_rollouts", ceiling_every_n_rollouts, 1),
        ):  # fmt: skip
            check_number(name, value, least=least, owner="AcceptanceMonitor")
        self.every_n_rollouts = every_n_rollouts
        self.top_k = top_k
        self.bin_size = bin_size
        self.num_bins = num_bins
        self.ceiling_prompts = ceiling_prompts
        self.ceiling_every_n_rollouts = ceiling_every_n_rollouts
        self.report: TailReport | None = None
        self._ceiling: dict[str, float] = {}  # lower and upper
        self._ceiling_index = 0  # number of the rollout at which it was measured

    # ---------------------------------------------------------------- request to the sampler

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Request the report already now, so that a dry run of the worst case includes it."""
        module = rollout_module(pl_module, self)
        module.generator.top[id(self)] = self._top(module)

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Request the report only for measured rollouts, since it takes memory; partial rollouts keep it."""
        due = not module.num_rollouts % self.every_n_rollouts or module.generator.partial is not None
        module.generator.top[id(self)] = self._top(module) if due else 0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop requesting the report."""
        generator = getattr(pl_module, "generator", None)  # fit may have refused the module
        if generator is not None:
            generator.top.pop(id(self), None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop requesting it after a fit that failed, too."""
        self.teardown(trainer, pl_module, "fit")

    def _top(self, module: RolloutModule) -> int:
        return min(self.top_k, int(module.policy.config.vocab_size))

    # ---------------------------------------------------------------- measurement

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Run the policy on rollouts that are measured, before anything of an update is in memory."""
        return not module.num_rollouts % self.every_n_rollouts

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Measure and log, if it is this rollout's turn."""
        if scored.index % self.every_n_rollouts:
            return
        rollout = drawn_by_newest(module, scored.rollout)
        if not len(rollout):
            return
        self._measure_ceiling(module, scored)
        lower, upper = acceptance_of(module, rollout)
        logged, tokens = self._tails(lower, upper, rollout, module.learner.replays)
        logged |= {f"acceptance/ceiling_{name}": value for name, value in self._ceiling.items()}
        ceiling = self._ceiling.get("p05")
        if ceiling is not None:
            logged["acceptance/target"] = tail_target(ceiling)
        self.report = TailReport(
            scored.index, {name: logged[f"acceptance/p05/{name}"] for name in tokens}, tokens, ceiling
        )
        self.measured = scored.index, logged
        module.log_dict(logged, batch_size=len(rollout))

    def _tails(
        self, lower: Tensor, upper: Tensor, rollout: Rollout, replays: bool
    ) -> tuple[dict[str, float], dict[str, int]]:
        """The numbers to log, and the number of tokens in each length bin that has any."""
        mask = rollout.completion_mask
        logged: dict[str, float] = {}
        for suffix, bound in (("", lower), ("_upper", upper)):
            tail = AcceptanceTail.of(bound, mask, self.bin_size, self.num_bins)
            logged |= {f"acceptance/p05{suffix}/{name}": value for name, value in tail.by_length.items()}
            logged |= {
                f"acceptance/p05{suffix}": tail.overall,
                f"acceptance/mean{suffix}": tail.mean,
                f"acceptance/near_one{suffix}": tail.near_one,
            }
        if rollout.old_logprobs is not None and not replays:
            drawn = AcceptanceTail.of(sampled_acceptance(rollout.old_logprobs, rollout.sampler_logprobs), mask)
            logged |= {"acceptance/sampled_p05": drawn.overall, "acceptance/sampled_mean": drawn.mean}
        return logged, tail.tokens

    def _measure_ceiling(self, module: RolloutModule, scored: ScoredRollout) -> None:
        """Draw with the full cache and score in the same way, if due."""
        due = not self._ceiling or scored.index - self._ceiling_index >= self.ceiling_every_n_rollouts
        if not self.ceiling_prompts or not due:
            return
        assert scored.rollout.topk_ids is not None
        top = scored.rollout.topk_ids.shape[-1]  # bounds are as tight as this is large
        params = replace(module.generator.sampling, num_generations=1, top_logprobs=top)
        rows = scored.asked[: self.ceiling_prompts]
        rollout = module.generator.generate(rows, params, dense=True, index=scored.index).rollout
        module.generator.sampler(dense=True).release()  # it is small, but a run may have no memory to spare
        bounds = zip(("p05", "p05_upper"), acceptance_of(module, rollout), strict=True)
        ceiling = {name: AcceptanceTail.of(bound, rollout.completion_mask).overall for name, bound in bounds}
        if not math.isnan(ceiling["p05"]):
            self._ceiling, self._ceiling_index = ceiling, scored.index

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The ceiling, so that a resumed run does not measure it anew."""
        return {"ceiling": dict(self._ceiling), "ceiling_index": self._ceiling_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the ceiling."""
        self._ceiling, self._ceiling_index = dict(state_dict["ceiling"]), state_dict["ceiling_index"]


@torch.no_grad()
def acceptance_of(module: RolloutModule, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Compute lower and upper bound (B, T) of the acceptance, for a rollout of the module's current policy.

    Raises:
        ValueError: If the rollout has no most likely tokens of the sampler.
    """
    policy, parts = module.policy, rollout.parts(module.steps_per_generation)
    with eval_mode(policy):
        pairs = [module.learner.acceptance(policy, piece) for piece in parts]
    lower, upper = (torch.cat(bounds) for bounds in zip(*pairs, strict=True))
    return lower, upper


def drawn_by_newest(module: RolloutModule, rollout: Rollout) -> Rollout:
    """Select sequences that the module's current policy drew from their first token on: all but in partial rollouts.

    Tokens of older versions differ from the learner by staleness too, and later tokens by the keys they left behind.
    """
    versions, mask = rollout.policy_versions, rollout.completion_mask
    partial = module.generator.partial
    if versions is None or partial is None or partial.session is None:
        return rollout
    return rollout[(versions == partial.session.version).logical_or(~mask).all(dim=1)]
