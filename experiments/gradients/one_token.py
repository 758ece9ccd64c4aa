"""A rollout made by hand, in which one token is near-impossible for the dense policy: what its ratio does over steps.

Two contexts share most of their features. In one the sampler, half blind, drew a token that the dense policy gives a
probability of e^-18, and the sequence is bad. In the other the same token is right, and fifteen good sequences teach
it. What they teach raises the token in both contexts, so the ratio w = pi / pi_old of the bad one grows by orders of
magnitude, and with it its gradient: min(w A, clip(w) A) = w A is not bounded for A < 0. Clipped to its usual length,
the next step is then that one token's alone, and takes back what was taught.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.tables import Table
from sparse_rl_lightning.corrections import consistency_log_ratio, importance_weights, reject_sequences
from sparse_rl_lightning.losses import policy_loss

STEPS, RATE, CLIP = 6, 1.0, 1.0
VOCABULARY, TOKEN, RARE, LIKELY = 8, 3, -18.0, 0.1
GOOD = 15  # sequences, beside the bad one
CONTEXTS = torch.tensor([[4.0, 0.0, 0.4], [4.0, 0.4, 0.0]], dtype=torch.float64)  # the bad one's, the good ones'


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    norm: float  # of the gradient, before the clip
    ratio: float  # of the near-impossible token
    taught: float  # probability of the token where it is right


def cures(log_ratio: Tensor, mask: Tensor) -> dict[str, dict[str, Any]]:
    """Arguments of the loss by cure."""
    keep, weights = mask & reject_sequences(log_ratio, mask)[:, None], importance_weights(log_ratio, mask, clip_max=1.5)
    return {
        "none": {}, "rejection": {"keep": keep}, "weights": {"weights": weights},
        "Sparse-RL": {"keep": keep, "weights": weights}, "δ = 2": {"delta": 2.0},
    }  # fmt: skip


def logits_of(table: Tensor) -> Tensor:
    """Log-probs (2, V) of both contexts under a linear policy (3, V)."""
    return (CONTEXTS @ table).log_softmax(dim=1)


def start() -> Tensor:
    """The policy (3, V) before the steps: the token has its two probabilities, all others are alike."""
    wanted = torch.zeros(2, VOCABULARY, dtype=torch.float64)
    others = VOCABULARY - 1
    wanted[0, TOKEN] = RARE + torch.log(torch.tensor(float(others), dtype=torch.float64))
    wanted[1, TOKEN] = torch.log(torch.tensor(LIKELY / (1 - LIKELY) * others, dtype=torch.float64))
    return torch.linalg.lstsq(CONTEXTS, wanted, driver="gelsd").solution


def followed(cure: str) -> list[Step]:
    """Optimizer steps (Adam, clipped) on the rollout under a cure."""
    table = start().requires_grad_()
    places = torch.tensor([0] + [1] * GOOD)
    mask, advantages = torch.ones(1 + GOOD, 1, dtype=torch.bool), torch.tensor([-1.0] + [1.0] * GOOD).double()
    old = logits_of(table).detach()[places, TOKEN][:, None]
    drawn = old.clone()
    drawn[0] = torch.log(torch.tensor(0.5))  # by the sampler
    options = cures(consistency_log_ratio(old, drawn, mask), mask)[cure]
    optimizer = torch.optim.Adam([table], lr=RATE, betas=(0.9, 0.98))
    steps = []
    for _ in range(STEPS):
        logprobs = logits_of(table)[places, TOKEN][:, None]
        ratio = float((logprobs - old).detach().exp()[0])
        optimizer.zero_grad()
        policy_loss(logprobs, old, advantages, mask, **options).loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_([table], CLIP))
        optimizer.step()
        steps.append(Step(norm, ratio, float(logits_of(table).detach()[1, TOKEN].exp())))
    return steps


def explosion_table() -> Table:
    """Cures by the norm of every step's gradient, the largest ratio, and what was learned."""
    table = Table("", ["cure", *(f"step {step + 1}" for step in range(STEPS)), "largest w", "token where it is right"])
    for cure in cures(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)):
        steps = followed(cure)
        norms = [f"{step.norm:.2g}" for step in steps]
        table.add(cure, *norms, f"{max(step.ratio for step in steps):.2g}", f"{LIKELY:.2f} → {steps[-1].taught:.2f}")
    return table


if __name__ == "__main__":
    print(explosion_table().untitled)
