"""SamplerSupport: probabilities among the tokens that truncation left to the sampler, for sampler and learner alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.callbacks.base import RolloutModule, rollout_module
from sparse_rl_lightning.callbacks.corrections.candidates import ReadsCandidates, token_and_most_likely
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.forward import Candidates, Learner
from sparse_rl_lightning.records import Rollout, ScoredRollout


class SamplerSupport(ReadsCandidates):
    """Normalize the learner's probabilities over the tokens that top-k, top-p or min-p left to the sampler.

    With a truncated distribution the sampler draws from some of the vocabulary, and the ratio of whole distributions
    compares what was never drawn from. Here the sampler's log-probs and the learner's, dense, replayed and of the
    reference policy, are normalized over the same tokens, the learner's with gradient. They are recorded for every
    token as how many of the sampler's ``top`` most likely ones there are. Of more than ``top`` these count, and the
    token itself. Logged: ``support/mean``, how many could be drawn, and ``support/cut``, the share of tokens for which
    these were more than are known.

    Args:
        top: Number of most likely tokens that the sampler reports, at most the vocabulary, on a GPU 256; best no less
            than ``sampling.top_k``.
    """

    def __init__(self, top: int = 256) -> None:
        super().__init__(top)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module a learner that normalizes over the support, and ask the sampler for its most likely tokens.

        Raises:
            ValueError: If nothing is truncated, or something else than truncation forbids tokens.
        """
        module = rollout_module(pl_module, self)
        sampling = module.generator.sampling
        if sampling.repetition_penalty != 1 or sampling.min_completion_length:
            raise UserError(
                "SamplerSupport: with repetition_penalty or min_completion_length the sampler draws from other tokens "
                "than the most likely ones. Set them to 1 and 0."
            )
        if not sampling.truncates:
            raise UserError(
                "SamplerSupport: model.sampling truncates nothing, so that every token could be drawn. Set top_p, "
                "top_k or min_p, or leave the callback out."
            )
        self.install(module, SupportLearner, top=self.top)

    def on_rollout_drawn(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Normalize the sampler's log-probs over the same tokens; log how many could be drawn."""
        rollout = scored.rollout
        assert rollout.topk_logprobs is not None
        assert rollout.support is not None
        most_likely = rollout.topk_logprobs[..., : self.top].to(rollout.sampler_logprobs)
        logprobs = torch.cat([rollout.sampler_logprobs[..., None], most_likely], dim=-1)
        rollout.sampler_logprobs, rollout.behavior_logprobs = among_support(logprobs, rollout), None
        sizes = rollout.support[rollout.completion_mask].float()
        logged = {"support/mean": sizes.mean(), "support/cut": (sizes > most_likely.shape[-1]).float().mean()}
        module.log_dict(logged, batch_size=len(rollout))


@dataclass(frozen=True)
class SupportLearner(Learner):
    """A learner whose log-probs are of the tokens that the sampler could have drawn, where a rollout says which.

    Args:
        top: How many of the sampler's most likely tokens are counted.
    """

    top: int = 256

    def dense(self, policy: PreTrainedModel, rollout: Rollout, ids: Candidates | None = None) -> tuple[Tensor, ...]:
        """Log-probs among the support, and entropies of whole distributions, (B, T) under the full cache."""
        if ids is not None or rollout.support is None:
            return super().dense(policy, rollout, ids)
        logprobs, entropy = super().dense(policy, rollout, partial(token_and_most_likely, top=self.top))
        return among_support(logprobs, rollout), entropy

    def replayed(self, policy: PreTrainedModel, rollout: Rollout, ids: Candidates | None = None) -> tuple[Tensor, ...]:
        """The same as the sampler saw the sequences."""
        if ids is not None or rollout.support is None:
            return super().replayed(policy, rollout, ids)
        logprobs, entropy = super().replayed(policy, rollout, partial(token_and_most_likely, top=self.top))
        return among_support(logprobs, rollout), entropy


def among_support(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """Log-probs (B, T) of tokens among those that could be drawn, from theirs and the most likely ones' (B, T, 1 + K).

    A token itself counts whether it is among the K or not, and once.
    """
    assert rollout.topk_ids is not None
    assert rollout.support is not None
    most_likely, sizes = rollout.topk_ids[..., : logprobs.shape[-1] - 1].to(logprobs.device), rollout.support[..., None]
    inside = torch.arange(most_likely.shape[-1], device=logprobs.device) < sizes
    inside &= most_likely != rollout.sequences[..., None]
    counted = torch.cat([torch.ones_like(inside[..., :1]), inside], dim=-1)
    total = logprobs.masked_fill(~counted, -torch.inf).logsumexp(dim=-1)
    return torch.where(rollout.support > 0, logprobs[..., 0] - total, logprobs[..., 0])
