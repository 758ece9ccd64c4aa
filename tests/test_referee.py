"""Losses, weights and advantages against polgrad, an implementation of the published formulas by somebody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.corrections import importance_weights
from sparse_rl_lightning.learner.loss import GRPOLoss
from sparse_rl_lightning.losses import kl_penalty
from sparse_rl_lightning.records import Rollout

polgrad = pytest.importorskip("polgrad", reason="the referee is a package of the extra dev")
from polgrad.advantages import GroupNormConfig, grpo_advantages  # noqa: E402
from polgrad.aggregate import Aggregation  # noqa: E402
from polgrad.kl import KLEstimator, KLLossConfig, kl_estimate  # noqa: E402
from polgrad.losses import (  # noqa: E402
    ClipConfig,
    ISCorrectionConfig,
    PolicyLossConfig,
    RatioKind,
    SurrogateKind,
    policy_loss,
)

LENGTH = 11
MEANS = {
    "grpo": Aggregation.SEQ_MEAN_TOKEN_MEAN, "dapo": Aggregation.TOKEN_MEAN, "bnpo": Aggregation.TOKEN_MEAN,
    "dr_grpo": Aggregation.TOKEN_SUM_NORM, "cispo": Aggregation.TOKEN_MEAN,
}  # fmt: skip


def batch(seed: int) -> dict[str, Tensor]:
    """Six sequences of different lengths in float64, whose ratios pass every bound."""
    dice = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(6, 9, generator=dice, dtype=torch.float64)
    noise = torch.randn(3, 6, 9, generator=dice, dtype=torch.float64) * 0.6
    lengths = torch.tensor([9, 8, 5, 3, 1, 7])
    mask = torch.arange(9) < lengths[:, None]
    shifted = {name: old + each for name, each in zip(("logprobs", "rollout", "ref"), noise, strict=True)}
    advantages = torch.randn(6, generator=dice, dtype=torch.float64)
    return shifted | {"old": old, "mask": mask, "advantages": advantages}


def ours(loss: GRPOLoss, values: dict[str, Tensor], weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss and gradient by the log-probabilities."""
    mask, logprobs = values["mask"], values["logprobs"].clone().requires_grad_()
    fields = {"old_logprobs": values["old"], "ref_logprobs": values["ref"], "sampler_logprobs": values["rollout"]}
    part = Rollout(
        sequences=mask.long(), prompt_lengths=torch.zeros(6, dtype=torch.long), completion_mask=mask,
        finished=mask.any(dim=1), advantages=values["advantages"], keep=None, weights=weights, **fields,
    )  # fmt: skip
    result = loss(part, logprobs, loss.denominators(part, LENGTH)).loss
    return result.detach(), torch.autograd.grad(result, logprobs)[0]


def theirs(config: PolicyLossConfig, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logprobs = values["logprobs"].clone().requires_grad_()
    result = policy_loss(
        config, logprobs=logprobs, old_logprobs=values["old"], advantages=values["advantages"],
        response_mask=values["mask"], ref_logprobs=values["ref"], rollout_logprobs=values["rollout"],
    ).loss  # fmt: skip
    return result.detach(), torch.autograd.grad(result, logprobs)[0]


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss_type", "level"), [*((name, "token") for name in MEANS), *((name, "sequence") for name in list(MEANS)[:-1])]
)
def test_losses_are_the_referees(loss_type: Any, level: Any, beta: float, cap: float | None) -> None:
    values = batch(len(loss_type))
    cispo = loss_type == "cispo"  # its cap is epsilon_high itself here, and 1 + eps_high there
    loss = GRPOLoss(loss_type, level, 0.2, 2.0 if cispo else 0.28, beta=beta)
    weights = None
    if cap is not None:
        weights = importance_weights(values["old"] - values["rollout"], values["mask"], "token_truncate", clip_max=cap)
    config = PolicyLossConfig(
        ratio=RatioKind.TOKEN if level == "token" else RatioKind.SEQUENCE,
        surrogate=SurrogateKind.CISPO if cispo else SurrogateKind.PG_CLIP,
        clip=ClipConfig(None, 1.0) if cispo else ClipConfig(0.2, 0.28),
        aggregation=MEANS[loss_type],
        norm_len=LENGTH if loss_type == "dr_grpo" else None,
        is_correction=None if cap is None else ISCorrectionConfig(cap),
        kl=KLLossConfig(KLEstimator.K3, beta) if beta else None,
    )
    for mine, referee in zip(ours(loss, values, weights), theirs(config, values), strict=True):
        torch.testing.assert_close(mine, referee, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_penalties_are_the_referees(name: Any) -> None:
    values = batch(1)
    expected = kl_estimate(values["logprobs"], values["ref"], KLEstimator(name), response_mask=values["mask"])
    torch.testing.assert_close(kl_penalty(values["logprobs"], values["ref"], values["mask"], name), expected)


@pytest.mark.parametrize(("scale", "theirs_scale"), [("group", "std"), ("none", "none")])
def test_advantages_are_the_referees(scale: Any, theirs_scale: Any) -> None:
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = torch.arange(3).repeat_interleave(4)
    expected = grpo_advantages(rewards, groups, GroupNormConfig(scale=theirs_scale, eps=1e-6))
    torch.testing.assert_close(group_advantages(rewards, 4, scale), expected, rtol=1e-9, atol=0)
