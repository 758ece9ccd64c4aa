"""How far a sparse policy is from the dense one at the tokens that it drew, from whole distributions.

The sparse distributions are those of replay, which are the sampler's but for rounding.

Letters: N tokens of completions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.acceptance import exact_acceptance
from sparse_rl_lightning.logprobs import hidden_states
from sparse_rl_lightning.output_head import LogitScaling, output_head
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.logprobs import replay_states

REJECTED_BELOW = 1e-4
"""The ratio dense / sparse of a token at which Sparse-RL rejects its sequence (arXiv 2601.10079, section 4.2)."""
CHUNK = 256
"""Tokens whose distributions exist at the same time."""


@dataclass(frozen=True)
class Mismatch:
    """Both policies token by token, sequence after sequence.

    Args:
        acceptance: Overlap of both distributions (N,).
        kl: KL(sparse || dense) (N,), in nats.
        agrees: Whether both have the same most likely token (N,).
        log_kept: Log of the probability (N,) that the sparse policy draws no token with a ratio below 1e-4.
        replay_difference: Distance (N,) of the drawn token's log-probability from the sampler's.
    """

    acceptance: Tensor
    kl: Tensor
    agrees: Tensor
    log_kept: Tensor
    replay_difference: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, rollout: Rollout, temperature: float) -> Mismatch:
        """That of a rollout with a record of its evictions; greedy distributions are compared at temperature 1."""
        mask, temperature = rollout.completion_mask, temperature or 1.0
        with torch.no_grad():
            both = hidden_states(model, rollout.sequences, rollout.routing), replay_states(model, rollout)
            dense, sparse = (torch.split(states[:, :-1][mask[:, 1:]], CHUNK) for states in both)
            drawn = (torch.split(values[mask], CHUNK) for values in (rollout.sequences, rollout.sampler_logprobs))
            head, scaling = output_head(model), LogitScaling.of(model.config)

            def logprobs(states: Tensor) -> Tensor:
                return torch.log_softmax(scaling(head(states)).float() / temperature, dim=-1)

            chunks = zip(dense, sparse, *drawn, strict=True)
            return cls.join([_compared(logprobs(p), logprobs(q), ids, sampled) for p, q, ids, sampled in chunks])

    @classmethod
    def join(cls, mismatches: Sequence[Mismatch]) -> Mismatch:
        """That of all batches, in the memory of the host."""
        return cls(*(torch.cat([getattr(mismatch, f.name) for mismatch in mismatches]).cpu() for f in fields(cls)))


def _compared(dense: Tensor, sparse: Tensor, ids: Tensor, sampled: Tensor) -> Mismatch:
    """From log-probabilities (n, V) of both policies, and the tokens (n,) that were drawn with the sampler's (n,)."""
    chances = sparse.exp()
    low = (chances * (dense - sparse < math.log(REJECTED_BELOW))).sum(dim=-1).double()
    return Mismatch(
        acceptance=exact_acceptance(dense, sparse),
        kl=(chances * (sparse - dense)).sum(dim=-1),
        agrees=dense.argmax(dim=-1) == sparse.argmax(dim=-1),
        log_kept=torch.log1p(-low.clamp(max=1 - 1e-12)),
        replay_difference=(sparse.gather(-1, ids[:, None])[:, 0] - sampled).abs(),
    )
