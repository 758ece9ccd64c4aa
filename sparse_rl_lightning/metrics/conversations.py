"""The numbers of a rollout's conversations with an environment; they are logged with those of ``rollout.py``.

=========================================== ============ =====================================================
key                                         unit         meaning
=========================================== ============ =====================================================
turns/mean                                  turns        mean number of the policy's turns in a conversation
turns/max                                   turns        largest
turns/given_tokens                          tokens       mean number given by the environment in a conversation
turns/cut_by_turns                          share        conversations ended by rollout.turns.max_turns
turns/cut_by_length                         share        conversations in which an answer had no room
turns/cut_turns                             turns        turns of the policy that a limit of tokens ended
turns/cut_observations                      answers      answers of the environment that were shortened
turns/failed                                samples      conversations that an error of the environment ended
turns/timeouts                              samples      conversations in which it took too long
kv/evicted/prompt                           share        tokens of prompts evicted at the end, over layers and heads
kv/evicted/drawn                            share        the same of the tokens that the policy drew
kv/evicted/given                            share        the same of the tokens that the environment gave
mismatch/kl_k3/first_turn                   nats/token   KL(sparse || dense) in the first turn
mismatch/kl_k3/later_turns                  nats/token   in the others
=========================================== ============ =====================================================

``turns/failed`` and ``turns/timeouts`` count all that were drawn, those too that down-sampling drops. Tokens that the
environment gave have no log-probs of the sampler, and so no mismatch. The ``mismatch/`` keys need dense
log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.evictions import EvictionRecord
from sparse_rl_lightning.records import Conversation, Rollout

ROLES = ("prompt", "drawn", "given")


def conversation_metrics(rollout: Rollout, conversations: list[Conversation]) -> dict[str, Tensor | float]:
    """All numbers to log about conversations; the module's docstring has the table of keys.

    Args:
        rollout: B sequences.
        conversations: The messages of each.
    """
    count = len(conversations)
    turns = torch.tensor([float(conversation.num_turns) for conversation in conversations])

    def ended(why: str) -> float:
        return float(sum(conversation.end == why for conversation in conversations))

    metrics: dict[str, Tensor | float] = {
        "turns/mean": turns.mean(),
        "turns/max": turns.max(),
        "turns/given_tokens": ((roles_of(rollout) == ROLES.index("given")).sum() / count).float(),
        "turns/cut_by_turns": ended("turns") / count,
        "turns/cut_by_length": ended("length") / count,
        "turns/cut_turns": float(sum(conversation.cut_turns for conversation in conversations)),
        "turns/cut_observations": float(sum(conversation.cut_observations for conversation in conversations)),
    }
    if rollout.evictions is not None:
        metrics |= evicted_by_role(rollout, rollout.evictions)
    if rollout.old_logprobs is not None:
        mask = rollout.completion_mask
        log_ratio = consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, mask)
        is_first = torch.ones_like(mask) if rollout.turns is None else rollout.turns == 1
        for name, tokens in (("first_turn", mask & is_first), ("later_turns", mask & ~is_first)):
            metrics[f"mismatch/kl_k3/{name}"] = mismatch_statistics(log_ratio, tokens)["mismatch/kl_k3"]
    return metrics


def roles_of(rollout: Rollout) -> Tensor:
    """The index in :data:`ROLES` of every token (B, T), -1 for padding."""
    index = torch.arange(rollout.sequences.shape[1], device=rollout.sequences.device)
    roles = torch.full_like(rollout.sequences, -1)
    roles[index < rollout.prompt_lengths[:, None]] = ROLES.index("prompt")
    roles[rollout.completion_mask] = ROLES.index("drawn")
    if rollout.turns is not None:
        roles[(rollout.turns > 0) & ~rollout.completion_mask] = ROLES.index("given")
    return roles


def evicted_by_role(rollout: Rollout, evictions: EvictionRecord) -> dict[str, Tensor]:
    """The share () of each role's tokens that are evicted at the end, as ``kv/evicted/{role}``; 0 without any."""
    roles, heads = roles_of(rollout), evictions.num_layers * evictions.num_heads
    dead = roles.new_zeros(len(ROLES))
    for row, positions in zip(roles, torch.split(evictions.positions, evictions.num_dead.tolist()), strict=True):
        dead += torch.bincount(row[positions.int()], minlength=len(ROLES))  # one sequence's at a time: they are many
    return {
        f"kv/evicted/{name}": dead[role] / ((roles == role).sum() * max(heads, 1)).clamp(min=1)
        for role, name in enumerate(ROLES)
    }
