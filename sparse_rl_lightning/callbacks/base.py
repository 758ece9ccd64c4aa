"""RolloutCallback: hooks around a rollout, besides Lightning's; RolloutModule: all that they may use of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.advantages import AdvantageEstimator
from sparse_rl_lightning.corrections import consistency_log_ratio
from sparse_rl_lightning.distributed.ranks import mean_over_ranks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.learner.loss import Denominators, Loss
from sparse_rl_lightning.metrics.rollout import rollout_metrics
from sparse_rl_lightning.policies.modes import has_dropout
from sparse_rl_lightning.records import LossOutput, Rollout, Rows, ScoredRollout
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.rollout import Progress, SamplingParams
from sparse_rl_lightning.rollout.generator import Generator


class RolloutCallback(Callback):
    """A callback for rollouts: it changes what counts in :meth:`correct` and sees the result in the other hooks."""

    is_active = True
    """Whether rollouts call it; False for one that has nothing to do in this run."""
    keeps_candidates = False
    """Whether the sampler's most likely tokens stay with a rollout until its last loss."""
    measured: tuple[int, Mapping[str, float]] | None = None
    """The newest rollout that it measured, if not every one, and the values by key, for the record of the run."""

    @property
    def corrects(self) -> bool:
        """Whether the callback changes ``keep``, ``weights`` or ``advantages``."""
        return type(self).correct is not RolloutCallback.correct

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Whether the coming rollout must have all its dense log-probs before the first loss.

        True costs a forward pass over the sequences of the first optimizer step, which otherwise get their log-probs
        from its own passes. A callback that needs it is shown whole rollouts only: one that corrects, unless it says
        that it looks at every sequence by itself, or one that runs the policy in :meth:`on_rollout_scored`.
        """
        return self.corrects

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Called before the prompts ``rows`` of a new block are rolled out."""

    def on_rollout_progress(self, trainer: Trainer, module: RolloutModule, progress: Progress) -> None:
        """Called after every decode step of a training rollout."""

    def on_rollout_drawn(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Called when a rollout is drawn and decoded, before it is rescored."""

    def correct(self, trainer: Trainer, module: RolloutModule, part: Rollout) -> None:
        """Called once for every sequence, when it has dense log-probs and advantages, before its first loss.

        Edit ``part.keep`` and ``part.weights`` (1 before the first callback) by multiplying, so that callbacks combine.
        The part is the whole rollout if :meth:`needs_rescoring` asks for that, and otherwise may be a micro-batch.
        """

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Called when a rollout has dense log-probs, rewards, advantages and corrections, to be read only.

        That is before its first optimizer step: when all is rescored before the first loss, otherwise after the
        forward passes of that step.
        """

    def on_run_warning(self, trainer: Trainer, text: str) -> None:
        """Called when a callback warns about the course of the run."""


class RolloutModule(Protocol):
    """A LightningModule that rolls out, such as SparseGRPO.

    Besides these members it has everything of Lightning's own: parameters, device, logging.
    """

    policy: PreTrainedModel
    """The policy, loaded when the fit starts."""
    generator: Generator
    """Generator; lengths may change between rollouts, budgets by ``raise_budget``; ``top`` has wishes of callbacks."""
    rewards: Rewards
    learner: Learner
    loss: Loss
    advantage_estimator: AdvantageEstimator | None
    val_sampling: SamplingParams
    group_size: int
    """The number of samples of each prompt that are trained on."""
    keeps_evictions: bool
    """Whether the loss reads the record of evictions."""
    corrects: bool
    """Whether the module accounts for sequences drawn from less than the whole cache, as by replay."""
    learns_from_rejected: bool
    """Whether sequences that callbacks reject as a whole are trained all the same, under replay."""
    block: RolloutBlock | None
    """The rollout that is trained on."""
    num_rollouts: int
    steps_per_generation: int
    """Number of micro-batches in a rollout."""
    num_iterations: int
    """Number of passes of the policy over a rollout."""
    _trainer: Trainer | None
    """The trainer, None in a script."""

    @property
    def trainer(self) -> Trainer:
        """The trainer that fits the module."""

    @property
    def seeds(self) -> dict[str, int]:
        """The seeds of all that is drawn, by the keys that set them."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    def starts_rollout(self) -> bool:
        """Whether the next training step begins with a rollout."""

    def plan(self, num_prompts: int) -> BlockPlan:
        """Plan the optimizer steps of a rollout of ``num_prompts`` prompts."""

    def denominators(self, window: Rollout) -> Denominators:
        """The divisors of an optimizer step's sums, over all ranks."""

    def micro_batch_loss(self, part: Rollout, denominators: Denominators) -> LossOutput:
        """Run the learner's forward pass and compute the loss."""

    def replayed(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies (B, T) of the sparse policy, with the evictions of the sampler."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages (B,) of rewards (B,); NaN rewards count in no baseline and get 0."""

    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        """Log-probabilities (B, T) of the reference policy."""

    def buffers(self) -> Iterator[Tensor]:
        """All buffers of the module."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the module."""

    def log(self, name: str, value: Any, *, batch_size: int | None = None) -> None:
        """Log a number."""

    def log_dict(self, dictionary: Mapping[str, Any], *, batch_size: int | None = None) -> None:
        """Log several numbers."""


def rollout_module(module: LightningModule, owner: object) -> RolloutModule:
    """Return the module if it rolls out.

    Args:
        module: Module passed to a hook of Lightning.
        owner: Callback that needs the module, for the error.

    Raises:
        ValueError: If it does not.
    """
    if not isinstance(getattr(module, "generator", None), Generator):
        raise UserError(
            f"{type(owner).__name__}: {type(module).__name__} does not roll out. Use it with SparseGRPO, or remove it "
            "from trainer.callbacks."
        )
    return cast(RolloutModule, module)


def warn_of_run(trainer: Trainer, text: str) -> None:
    """Warn about the course of a run, and notify the callbacks that keep its record."""
    rank_zero_warn(text, stacklevel=6)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it where no type says so
        if isinstance(callback, RolloutCallback):
            callback.on_run_warning(trainer, text)


def rollout_callbacks(module: RolloutModule) -> list[RolloutCallback]:
    """The trainer's callbacks that see rollouts, in its order; none without a trainer, in a script."""
    callbacks = getattr(module._trainer, "callbacks", [])
    return [callback for callback in callbacks if isinstance(callback, RolloutCallback) and callback.is_active]


def corrections_of(module: RolloutModule) -> list[str]:
    """Names of what accounts for sequences drawn from less than the whole cache: module, loss, and callbacks."""
    pieces: list[Any] = [*[module] * module.corrects, *[module.loss] * module.loss.corrects]
    return [type(piece).__name__ for piece in [*pieces, *(c for c in rollout_callbacks(module) if c.corrects)]]


def rescores_all(module: RolloutModule) -> bool:
    """Whether even the first optimizer step on a rollout needs log-probs from before it (``docs/design.md``).

    Those of its own forward passes are of the same policy, but come too late for numbers of the whole rollout, and with
    dropout they are of another distribution.
    """
    return (
        module._trainer is None  # in a script no step is to come
        or module._trainer.accumulate_grad_batches > module.steps_per_generation  # the step meets sequences twice
        or module.generator.options.oversampling > 1
        or module.loss.counts_kept
        or (not module.learner.options.disable_dropout and has_dropout(module.policy))
        or any(callback.needs_rescoring(module) for callback in rollout_callbacks(module))
    )


def correct(module: RolloutModule, rollout: Rollout) -> None:
    """Let callbacks reject and reweight sequences that have dense log-probs."""
    correct_by(rollout_callbacks(module), module._trainer, module, rollout)


@torch.no_grad()
def correct_by(callbacks: Sequence[RolloutCallback], trainer: Any, module: Any, rollout: Rollout) -> None:
    """Let these callbacks edit sequences whose weights are 1; weights that none of them changes are None again."""
    unit_weights = None
    if rollout.weights is None and any(callback.corrects for callback in callbacks):
        unit_weights = rollout.weights = rollout.completion_mask.to(rollout.sampler_logprobs.dtype)
    for callback in callbacks:
        callback.correct(trainer, module, rollout)
    if rollout.weights is unit_weights and unit_weights is not None and unit_weights._version == 0:
        rollout.weights = None


def report(module: RolloutModule, scored: ScoredRollout) -> None:
    """Show a rollout to callbacks, log its numbers, and drop what the loss does not read.

    Raises:
        ValueError: If a callback edits what the loss may have read already.
    """
    callbacks = rollout_callbacks(module)
    keeps_candidates = module._trainer is None or any(callback.keeps_candidates for callback in callbacks)
    for callback in callbacks:
        before = _versions(scored.rollout)
        callback.on_rollout_scored(module.trainer, module, scored)
        if _versions(scored.rollout) != before:
            raise UserError(
                f"{type(callback).__name__}.on_rollout_scored changed keep, weights or advantages, which the loss may "
                "have read already. Change them in correct(trainer, module, part)."
            )
    metrics, partial = rollout_metrics(scored), module.generator.partial
    if partial is not None:
        metrics |= partial.metrics(scored.rollout)
    if module._trainer is not None and module._trainer.world_size > 1:
        metrics = dict(mean_over_ranks(metrics, module._trainer.world_size))
    module.log_dict(metrics, batch_size=len(scored.completions))
    if not keeps_candidates:
        scored.rollout.topk_ids = scored.rollout.topk_logprobs = scored.rollout.support = None
    scored.rollout.evictions = scored.rollout.evictions if module.keeps_evictions else None


def _versions(rollout: Rollout) -> list[tuple[int, int]]:
    """Numbers that change when one of the tensors that the loss reads is replaced or written."""
    read = (rollout.keep, rollout.weights, rollout.advantages)
    return [(id(value), value._version) for value in read if value is not None]


NO_TOKENS = (torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.bool))
"""Log-ratios and mask of an empty rollout, on which the pure functions check their other arguments."""


class CorrectionCallback(RolloutCallback):
    """A callback that edits a rollout by the ratio xi of dense to sparse probability."""

    weighs = False
    """Whether it multiplies ``weights``, which only one callback may do: two would weight by the ratio twice."""

    _warned = False  # of truncated distributions

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second correction of the same kind."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it where no type says so
        for correction in [c for c in callbacks if isinstance(c, CorrectionCallback) and c is not self]:
            if type(correction) is type(self) or (correction.weighs and self.weighs):
                raise UserError(
                    f"trainer.callbacks: {type(correction).__name__} and {type(self).__name__} are two corrections of "
                    "one kind, which would be applied one after the other. Keep one of them."
                )

    def needs_rescoring(self, module: RolloutModule) -> bool:
        """Look at every sequence by itself."""
        return False

    def log_ratio(self, rollout: Rollout) -> Tensor:
        """The log-ratios log xi (B, T) of sequences with dense log-probs, 0 outside the completions."""
        assert rollout.old_logprobs is not None
        if rollout.behavior_logprobs is not None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{type(self).__name__}: the rollouts are drawn from truncated distributions, but the ratio xi "
                "compares whole distributions and ignores the truncation. Sample with "
                f"{SamplingParams.whole_distribution()}, or add SamplerSupport, for an exact correction."
            )
        return consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, rollout.completion_mask)
