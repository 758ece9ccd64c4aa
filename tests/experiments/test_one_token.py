"""A rollout made by hand, in which one token is near-impossible for the dense policy: what its ratio does over steps.

Two contexts share most of their features. In one the sampler, half blind, drew a token that the dense policy gives a
probability of e^-18, and the sequence is bad. In the other the same token is right, and fifteen good sequences teach
it. What they teach raises the token in both contexts, so the ratio w = pi / pi_old of the bad one grows by orders of
magnitude, and with it its gradient: min(w A, clip(w) A) = w A is not bounded for A < 0. Clipped to its usual length,
the next step is then that one token's alone, and takes back what was taught.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def test_one_near_impossible_token_takes_the_step_and_every_cure_stops_it() -> None:
    """The cause proposed for naive training's collapse, on a rollout made by hand (docs/measured/gradients.md)."""
    steps = {cure: followed(cure) for cure in ("none", "rejection", "weights", "Sparse-RL", "δ = 2")}
    first = steps["none"][0].norm
    assert steps["none"][0].ratio == 1.0  # nothing is wrong with the first step
    assert max(step.norm for step in steps["none"]) > 50 * first
    assert max(step.ratio for step in steps["none"]) > 1e3
    assert steps["none"][-1].taught < LIKELY  # what was taught is taken back, and more
    for cure in set(steps) - {"none"}:
        assert max(step.norm for step in steps[cure]) < 2 * first, cure
        assert steps[cure][-1].taught > 0.9, cure


def test_start_of_the_hand_made_rollout_is_what_it_says() -> None:
    logprobs = logits_of(start())[:, TOKEN]
    torch.testing.assert_close(logprobs, torch.tensor([RARE, math.log(LIKELY)]).double())
