"""AcceptanceMonitor: how close the sparse policy stays to the dense one, token by token, and how close it could be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from sparse_rl_lightning.acceptance import BIN_SIZE, NUM_BINS, AcceptanceTail, sampled_acceptance, tail_target
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.callbacks.protocol import RolloutModule, rollout_module
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import Rollout, Rows, ScoredRollout


@dataclass(frozen=True)
class TailReport:
    """What was measured last, for callbacks that act on it."""

    index: int  # number of the rollout
    tail: dict[str, float]  # 5th percentile of the lower bound by length bin, those without tokens left out
    tokens: dict[str, int]  # of each of these bins
    ceiling: float | None  # the same percentile between dense policies, None where it was not measured
    logged: dict[str, float] = field(default_factory=dict)  # all keys


class AcceptanceMonitor(RolloutCallback):
    """Log the 5th percentile of the acceptance by length bin (Sparrow, arXiv 2606.08446) beside its own ceiling.

    The acceptance of a token is the overlap of the dense and the sparse policy's distributions where it was drawn. The
    sampler reports its ``top_k`` most likely tokens, the learner's log-probs of the same tokens come from one forward
    pass, and both bound it. The ceiling is the same statistic for a small rollout with the full cache: what rounding
    and truncation to ``top_k`` leave of 1. Logged for every rollout that is measured:

    =============================== ========= ========================================================================
    key                             unit      meaning
    =============================== ========= ========================================================================
    acceptance/p05/{bin}            share     5th percentile of the lower bound, by tokens before (0-2000, ..., 38000+)
    acceptance/p05                  share     of all tokens
    acceptance/mean                 share     mean of the lower bound
    acceptance/near_one             share     tokens whose lower bound exceeds 0.999
    acceptance/p05_upper/{bin}      share     5th percentile of the upper bound, likewise
    acceptance/p05_upper            share     of all tokens
    acceptance/mean_upper           share     mean of the upper bound
    acceptance/near_one_upper       share     tokens whose upper bound exceeds 0.999
    acceptance/sampled_p05          share     5th percentile of min(1, dense / sparse) of the tokens drawn
    acceptance/sampled_mean         share     its mean, which estimates that of the acceptance
    acceptance/ceiling_p05          share     p05 between dense policies, lower bound
    acceptance/ceiling_p05_upper    share     the same, upper bound
    acceptance/target               share     0.86 x the ceiling / 0.945, Sparrow's target under its own ceiling
    =============================== ========= ========================================================================

    Bins without tokens are left out. The sampled keys need dense rescoring. Tokens of partial rollouts count where the
    newest policy drew the whole sequence. Runs are the same with this callback and without it.

    Args:
        every_n_rollouts: Measure the first rollout and every n-th after it.
        top_k: Most likely tokens that the sampler reports; of a smaller vocabulary, all.
        bin_size: Tokens per length bin.
        num_bins: Bins; the last has no end.
        ceiling_prompts: Prompts of the small rollout with the full cache, one sample each; 0 measures no ceiling.
        ceiling_every_n_rollouts: Rollouts until the ceiling is measured again; it hardly moves in training.

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
            if value < least:
                raise UserError(f"AcceptanceMonitor: {name} must be at least {least}, got {name}={value}.")
        self.every_n_rollouts = every_n_rollouts
        self.top_k = top_k
        self.bin_size = bin_size
        self.num_bins = num_bins
        self.ceiling_prompts = ceiling_prompts
        self.ceiling_every_n_rollouts = ceiling_every_n_rollouts
        self.report: TailReport | None = None
        self._ceiling: dict[str, float] = {}  # lower and upper
        self._ceiling_index = 0  # the rollout it was measured at
        self._own_top: int | None = None  # what the module asks its sampler for by itself

    # ---------------------------------------------------------------- asking the sampler

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that do not roll out."""
        if stage == "fit":
            rollout_module(pl_module, self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask already now, so that a dry run of the largest case includes it."""
        self._ask(rollout_module(pl_module, self), wanted=True)

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Ask only where the rollout is measured: the report takes memory. A session of partial rollouts asks once."""
        due = not module.num_rollouts % self.every_n_rollouts
        self._ask(module, wanted=due or module.generator.partial is not None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask no more."""
        if self._own_top is not None:
            self._ask(rollout_module(pl_module, self), wanted=False)
            self._own_top = None

    def _ask(self, module: RolloutModule, wanted: bool) -> None:
        generator = module.generator
        if self._own_top is None:
            self._own_top = generator.sampling.top_logprobs
        top = max(self._own_top, self._top(module)) if wanted else self._own_top
        generator.sampling = replace(generator.sampling, top_logprobs=top)

    def _top(self, module: RolloutModule) -> int:
        return min(self.top_k, int(module.policy.config.vocab_size))

    # ---------------------------------------------------------------- measuring

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Measure and log, if it is this rollout's turn."""
        if scored.index % self.every_n_rollouts:
            return
        rollout = drawn_by_newest(module, scored.rollout)
        if not len(rollout):
            return
        self._measure_ceiling(module, scored)
        lower, upper = acceptance_of(module, rollout)
        logged, tokens = self._tails(lower, upper, rollout)
        logged |= {f"acceptance/ceiling_{name}": value for name, value in self._ceiling.items()}
        ceiling = self._ceiling.get("p05")
        if ceiling is not None:
            logged["acceptance/target"] = tail_target(ceiling)
        self.report = TailReport(
            scored.index, {name: logged[f"acceptance/p05/{name}"] for name in tokens}, tokens, ceiling, logged
        )
        module.log_dict(logged, batch_size=len(rollout))

    def _tails(self, lower: Tensor, upper: Tensor, rollout: Rollout) -> tuple[dict[str, float], dict[str, int]]:
        """The numbers to log, and how many tokens each length bin has that has any."""
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
        if rollout.old_logprobs is not None:
            drawn = AcceptanceTail.of(sampled_acceptance(rollout.old_logprobs, rollout.sampler_logprobs), mask)
            logged |= {"acceptance/sampled_p05": drawn.overall, "acceptance/sampled_mean": drawn.mean}
        return logged, tail.tokens

    def _measure_ceiling(self, module: RolloutModule, scored: ScoredRollout) -> None:
        """Draw with the full cache and score alike, when it is due."""
        due = not self._ceiling or scored.index - self._ceiling_index >= self.ceiling_every_n_rollouts
        if not self.ceiling_prompts or not due:
            return
        params = replace(module.generator.sampling, num_generations=1, top_logprobs=self._top(module))
        rows = scored.rows[: self.ceiling_prompts]
        rollout = module.generator.generate(rows, params, dense=True, index=scored.index).rollout
        module.generator.sampler(dense=True).release()  # it is small, but a run may have no memory to spare
        bounds = zip(("p05", "p05_upper"), acceptance_of(module, rollout), strict=True)
        found = {name: AcceptanceTail.of(bound, rollout.completion_mask).overall for name, bound in bounds}
        if not math.isnan(found["p05"]):
            self._ceiling, self._ceiling_index = found, scored.index

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The ceiling, so that a resumed run does not measure it anew."""
        return {"ceiling": dict(self._ceiling), "ceiling_index": self._ceiling_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the ceiling."""
        self._ceiling, self._ceiling_index = dict(state_dict["ceiling"]), state_dict["ceiling_index"]


@torch.no_grad()
def acceptance_of(module: RolloutModule, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Lower and upper bound (B, T) of the acceptance of a rollout of the module's present policy.

    Args:
        module: A SparseGRPO or a subclass.
        rollout: With the sampler's most likely tokens.

    Raises:
        ValueError: If the rollout carries no such tokens.
    """
    policy, parts = module.policy, rollout.parts(module.learner.steps_per_generation)
    with eval_mode(policy):
        pairs = [module.learner.acceptance(policy, part) for part in parts]
    lower, upper = (torch.cat(bounds) for bounds in zip(*pairs, strict=True))
    return lower, upper


def drawn_by_newest(module: RolloutModule, rollout: Rollout) -> Rollout:
    """The sequences that the module's present policy drew from their first token on: all but in partial rollouts.

    What an older version drew differs from the learner by staleness too, and later tokens by the keys it left behind.
    """
    versions, mask = rollout.policy_versions, rollout.completion_mask
    partial = module.generator.partial
    if versions is None or partial is None or partial.session is None:
        return rollout
    return rollout[(versions == partial.session.version).logical_or(~mask).all(dim=1)]
