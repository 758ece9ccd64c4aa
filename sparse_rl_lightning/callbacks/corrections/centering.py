"""ScoreCentering: take from each token's score what the sampler's tokens have on average (arXiv 2609.20807).

A token's gradient is A f(p / q) grad log p. Drawn from q, and not from the learner's p, it has a mean even where every
advantage A is the same: the drift, which pulls p to where q puts its mass. Centered, it is A (f(p / q) grad log p -
E_q[f(p / q) grad log p]). The formula is :func:`~sparse_rl_lightning.corrections.expected_scores`; learner and loss get
it as subclasses, which the callback puts in place of those of the module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.callbacks.base import (
    CorrectionCallback,
    RolloutCallback,
    RolloutModule,
    rollout_callbacks,
    rollout_module,
)
from sparse_rl_lightning.callbacks.corrections.candidates import ReadsCandidates, token_and_most_likely
from sparse_rl_lightning.callbacks.corrections.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.corrections.reweighting import ImportanceReweighting
from sparse_rl_lightning.corrections import Weigh, expected_scores
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.forward import Candidates, Learner
from sparse_rl_lightning.learner.loss import Denominators, GRPOLoss
from sparse_rl_lightning.losses import aggregate
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout


def uniform(log_ratio: Tensor, logprobs: Tensor) -> Tensor:
    """Weight 1 for every token."""
    return torch.ones_like(log_ratio)


@dataclass(frozen=True)
class CenteredLearner(Learner):
    """A learner whose dense pass also returns the expected scores (B, T), where a rollout has the sampler's tokens.

    Args:
        top: How many of the sampler's most likely tokens.
        weigh: Weights that the loss gives to tokens.
    """

    top: int = 128
    weigh: Weigh = uniform

    def dense(self, policy: PreTrainedModel, rollout: Rollout, ids: Candidates | None = None) -> tuple[Tensor, ...]:
        """Log-probs, entropies and expected scores (B, T) under the full cache."""
        if ids is not None or rollout.topk_logprobs is None or not torch.is_grad_enabled():
            return super().dense(policy, rollout, ids)
        logprobs, entropy = super().dense(policy, rollout, partial(token_and_most_likely, top=self.top))
        mask, sampler_logprobs = rollout.completion_mask, rollout.topk_logprobs[..., : self.top]
        known = sampler_logprobs[mask.to(sampler_logprobs.device)].to(logprobs)
        scores = expected_scores(logprobs[..., 1:][mask], known, self.weigh)
        return logprobs[..., 0], entropy, torch.zeros_like(entropy).masked_scatter(mask, scores)


class CenteredLoss(GRPOLoss):
    """The loss, of whose kept tokens each also has its advantage times the expected score."""

    def __call__(
        self, micro_batch: Rollout, logprobs: Tensor, denominators: Denominators, scores: Tensor | None = None
    ) -> LossOutput:
        """The share of the step's loss; ``scores`` (B, T) are None where the sampler's tokens are not known."""
        output = super().__call__(micro_batch, logprobs, denominators)
        if scores is None:
            return output
        assert micro_batch.advantages is not None
        term = aggregate(
            micro_batch.advantages[:, None] * scores, self.mask(micro_batch), micro_batch.keep, self.loss_type,
            self.denominator, denominators.max_completion_length, denominators.policy,
        )  # fmt: skip
        return LossOutput(output.loss + term, output.metrics)


class ScoreCentering(ReadsCandidates, CorrectionCallback):
    """Subtract from each token's score the mean score of the sampler's tokens, so that a lasting gap moves nothing.

    Samples of another policy than the learner's have a drift: on average they push the learner to where the sampler
    puts its mass, whatever the reward. Score centering (arXiv 2609.20807) takes it away, exactly for the sampler's
    ``top`` most likely tokens, and for all others as if the sampler had a multiple of the learner's probabilities.
    Bounded weights of tokens (``ImportanceReweighting``, ``TIS``, ``IcePop``, ``CIS``) go with it::

        - class_path: ScoreCentering
        - class_path: ImportanceReweighting
          init_args: {clip_max: 1.5}

    The mean is exact in a rollout's first optimizer step. In later ones, which are told, it is that of the current
    policy without the clip: off by each token's staleness ratio. Every sampled token takes 8 x ``top`` bytes of the
    host's memory, in the rollout and in checkpoints. Logged: ``centering/covered``, the sampler's mean probability of
    these tokens together.

    Args:
        top: Number of most likely tokens that the sampler reports, at most the vocabulary, on a GPU 256.
    """

    corrects = True

    def __init__(self, top: int = 128) -> None:
        super().__init__(top)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module a learner and a loss that center, and ask the sampler for its most likely tokens.

        Raises:
            ValueError: If the module, an option or another correction does not go with it.
        """
        module = rollout_module(pl_module, self)
        loss = check_centered(module)
        weigh = common_weights(rollout_callbacks(module))
        steps = module.steps_per_generation * module.num_iterations // trainer.accumulate_grad_batches
        if steps > 1:
            rank_zero_info(
                f"ScoreCentering: a rollout has {steps} optimizer steps, of which the first is centered exactly and "
                "the others without the clip."
            )
        self.install(module, CenteredLearner, top=self.top, weigh=weigh)
        module.loss = CenteredLoss(**asdict(loss))

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Log how much of the sampler's distribution is known."""
        logprobs, mask = scored.rollout.topk_logprobs, scored.rollout.completion_mask.cpu()
        assert logprobs is not None
        # row by row: all at once would be there twice
        known = sum(float(row[tokens, : self.top].exp().sum()) for row, tokens in zip(logprobs, mask, strict=True))
        module.log("centering/covered", known / max(1, int(mask.sum())), batch_size=len(scored.completions))


def check_centered(module: RolloutModule) -> GRPOLoss:
    """The module's loss, if its tokens can be centered.

    Raises:
        ValueError: If not, by the name of what does not go with it.
    """
    loss, sampling = module.loss, module.generator.sampling
    wrong = {
        f"{type(module).__name__} replays everything, and what it learns from has no drift: remove it": (
            module.learner.replays
        ),
        f"model.loss is {type(loss).__name__}, of which it does not know how terms add up: use GRPOLoss": (
            type(loss) is not GRPOLoss
        ),
        "model.loss.importance_sampling_level is 'sequence', and it is for tokens: set it to token": (
            getattr(loss, "importance_sampling_level", "token") != "token"
        ),
        "model.loss.off_policy_delta leaves out sequences in the loss, which it does not see: set it to null": (
            getattr(loss, "off_policy_delta", None) is not None
        ),
        "model.loss.epsilon_high is below 1, and cispo caps what has not moved yet: raise it": (
            getattr(loss, "loss_type", "") == "cispo" and (getattr(loss, "epsilon_high", 1) or 1) < 1
        ),
        f"a part of the distribution is never drawn, and it is for {sampling.whole_distribution()}": (
            sampling.truncates
        ),
    }
    for reason, applies in wrong.items():
        if applies:
            raise UserError(f"ScoreCentering: {reason}.")
    assert isinstance(loss, GRPOLoss)
    return loss


def common_weights(callbacks: Iterable[RolloutCallback]) -> Weigh:
    """The weights that a run's corrections give to tokens: those of the one that weighs, else 1.

    Raises:
        ValueError: If they are not of single tokens, or tokens are left out, whose place in the mean is then not known.
    """
    weigh: Weigh = uniform
    for callback in callbacks:
        for piece in getattr(callback, "parts", (callback,)):
            if isinstance(piece, SparsityAwareRejection) and piece.bounds is not None and piece.level == "token":
                raise UserError(
                    "ScoreCentering: SparsityAwareRejection leaves out tokens by low and high. Set both to null, and "
                    "give IcePop, which gives such tokens the weight 0."
                )
            if not piece.corrects or isinstance(piece, (ScoreCentering, SparsityAwareRejection)):
                continue
            if not isinstance(piece, ImportanceReweighting) or piece.normalize != "none" or piece.mode[:5] != "token":
                raise UserError(
                    f"ScoreCentering: {type(piece).__name__} does not weigh each token by itself, as TIS, IcePop, CIS "
                    "and ImportanceReweighting with a token mode and normalize none do. Leave one of the two out."
                )
            weigh = partial(_weighed, piece)
    return weigh


def _weighed(reweighting: ImportanceReweighting, log_ratio: Tensor, logprobs: Tensor) -> Tensor:
    return reweighting.weigh(log_ratio, logprobs, torch.ones_like(log_ratio, dtype=torch.bool))
