"""Exact replay: the learner sees what the sampler saw, in one parallel and differentiable pass.

Eviction is permanent, so one number per (layer, KV head, token), its death, determines who could see it. Under the
mask ``key <= query < death`` the learner's log-probabilities equal the sampler's to float precision. In a layer with a
sliding window of W tokens death is ``key + W``, which no record has to say.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import hidden_states, sequence_logprobs
from sparse_rl_lightning.policies.support import check_length
from sparse_rl_lightning.policies.windows import deaths_by_layer
from sparse_rl_lightning.records import EvictionRecord, Rollout
from sparse_rl_lightning.replay.hooks import REPLAY, attention_implementation


def replay_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the rollout's tokens under the sampler's own evictions, with gradient.

    Args:
        model: Policy; with the sampler's weights the result equals ``rollout.sampler_logprobs``.
        rollout: Sequences with their evictions.
        temperature: Temperature of the sampler, 1 for greedy rollouts.

    Returns:
        The log-probabilities (B, T), 0 outside the completions.

    Raises:
        ValueError: If the rollout has no record of its evictions, or a sequence was drawn by several versions of
            the policy (partial rollouts), or exceeds the context beyond which frequencies change.
    """
    return replay_statistics(model, rollout, temperature)[0]


def replay_statistics(
    model: PreTrainedModel,
    rollout: Rollout,
    temperature: float = 1.0,
    chunk_size: int = 512,
    head_in_float32: bool = False,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (B, T) under the sampler's own evictions, with gradient, 0 outside completions.

    Arguments and errors are those of :func:`replay_logprobs`, chunks, precision and candidates ``ids`` those of
    ``sequence_logprobs``.
    """
    mask = rollout.completion_mask
    hidden = replay_states(model, rollout)[:, :-1][mask[:, 1:]]
    head = (temperature, chunk_size, head_in_float32)
    return sequence_logprobs(model, rollout.sequences, mask, *head, hidden=hidden, ids=ids)


def replay_states(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """The decoder's last hidden states (B, T, C) under the sampler's own evictions, as in :func:`replay_logprobs`."""
    death = deaths_by_layer(model.config, replayable(model, rollout))
    with attention_implementation(model, REPLAY):
        return hidden_states(model, rollout.sequences, rollout.routing, death=death)


def replayable(model: PreTrainedModel, rollout: Rollout) -> EvictionRecord:
    """The record of a rollout's evictions, if they can be replayed.

    Raises:
        ValueError: For the reasons of :func:`replay_logprobs`.
    """
    if rollout.evictions is None:
        raise UserError(
            "This rollout has no record of its evictions (rollout.evictions is None): nothing to replay. A module "
            "keeps it with keeps_evictions = True."
        )
    rows = drawn_by_several(rollout).nonzero().flatten().tolist()
    if rows:
        raise UserError(
            f"Sequences {rows} were drawn by several versions of the policy (partial rollouts): no replay reproduces "
            "them. Replay the others, rollout[indices], or switch partial rollouts off."
        )
    check_length(model, rollout.sequences.shape[1])
    return rollout.evictions


def drawn_by_several(rollout: Rollout) -> Tensor:
    """Which sequences (B,) several versions of the policy have drawn, so that no one policy can reproduce them."""
    versions, mask = rollout.policy_versions, rollout.completion_mask
    if versions is None:
        return torch.zeros(len(rollout), dtype=torch.bool, device=mask.device)
    first = versions.masked_fill(~mask, torch.iinfo(torch.int32).max).amin(dim=1)
    last = versions.masked_fill(~mask, -1).amax(dim=1)
    return first < last
