"""Exact replay: the learner sees what the sampler saw, in one parallel and differentiable pass.

Eviction is permanent, so one number per (layer, KV head, token), its death, tells who could see it. Under the
mask ``key <= query < death`` the learner's log-probabilities equal the sampler's to float precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.rollout.attention import REPLAY, attention_implementation
from sparse_rl_lightning.types import Rollout


def replay_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the rollout's tokens under the sampler's own evictions, with gradient.

    Args:
        model: The policy; with the sampler's weights the result equals ``rollout.sampler_logprobs``.
        rollout: Sequences with their evictions.
        temperature: The sampler's temperature, 1 for greedy rollouts.

    Returns:
        (B, T), 0 outside the completions.

    Raises:
        ValueError: If the rollout carries no record of its evictions, a sequence was drawn by several versions of the
            policy (partial rollouts), or gradient checkpointing is on.
    """
    if rollout.evictions is None:
        raise ValueError("This rollout has no record of its evictions (rollout.evictions is None): nothing to replay.")
    _refuse_several_versions(rollout)
    if model.is_gradient_checkpointing and model.training and torch.is_grad_enabled():
        raise ValueError(
            "replay_logprobs does not work with gradient checkpointing yet: the backward pass would recompute the "
            "layers with another attention. Call model.gradient_checkpointing_disable() first."
        )
    with attention_implementation(model, REPLAY):
        logprobs, _ = sequence_logprobs(
            model, rollout.sequences, rollout.completion_mask, temperature, death=rollout.evictions.death
        )
    return logprobs


def _refuse_several_versions(rollout: Rollout) -> None:
    """No one policy can reproduce a sequence that several have drawn."""
    versions, mask = rollout.policy_versions, rollout.completion_mask
    if versions is None:
        return
    first = versions.masked_fill(~mask, torch.iinfo(torch.int32).max).amin(dim=1)
    last = versions.masked_fill(~mask, -1).amax(dim=1)
    rows = (first < last).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"Sequences {rows} were drawn by several versions of the policy (partial rollouts): no replay reproduces "
            "them. Replay the others, rollout[indices], or switch partial rollouts off."
        )
