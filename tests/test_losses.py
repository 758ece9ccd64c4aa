"""The objective's pieces: numbers of other libraries, single tokens by hand, gradients, KL, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.corrections import consistency_log_ratio, importance_weights
from sparse_rl_lightning.losses import aggregate, kl_penalty, policy_loss


def tensor(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


NEW = tensor([[-0.5, -1, -0.2, -0.7], [-1.2, -0.3, -0.9, -0.4], [-0.6, -0.8, -0.1, -2]])
OLD = tensor([[-0.7, -0.9, -0.2, -0.3], [-1, -0.8, -0.9, -0.1], [-0.6, -0.3, -0.5, -1]])
SAMPLER = tensor([[-0.9, -0.4, -0.2, -0.3], [-1, -2.3, -0.8, -0.1], [-0.5, -0.3, -0.6, -1]])
REF = tensor([[-0.6, -1.1, -0.3, -0.7], [-1, -0.5, -0.9, -0.2], [-0.9, -0.8, -0.1, -1.5]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
ADVANTAGES = tensor([1.0, -1.0, 0.5])


def expect(actual: Tensor, number: float, tolerance: float = 1e-12) -> None:
    assert actual.shape == ()
    assert actual.item() == pytest.approx(number, abs=tolerance)


# --- Published numbers: what other libraries gave on the same inputs


@pytest.mark.parametrize(("loss_type", "number"), [("dapo", 0.0399277), ("bnpo", 0.0399277), ("grpo", -0.1232385)])
def test_losses_of_other_libraries(loss_type: str, number: float) -> None:
    expect(policy_loss(NEW, OLD, ADVANTAGES, MASK, loss_type=loss_type).loss, number, 1e-7)


def test_truncated_weights_times_token_mean_of_other_libraries() -> None:
    weights = importance_weights(consistency_log_ratio(OLD, SAMPLER, MASK), MASK, "token_truncate", clip_max=2.0)
    expect(policy_loss(NEW, OLD, ADVANTAGES, MASK, weights=weights, loss_type="dapo").loss, 0.2278702, 1e-7)


@pytest.mark.parametrize(("estimator", "number"), [("k1", 0.0444444), ("k2", 0.0133333), ("k3", 0.0129852)])
def test_kl_of_other_libraries(estimator: str, number: float) -> None:
    expect(aggregate(kl_penalty(NEW, REF, MASK, estimator), MASK, loss_type="dapo"), number, 1e-7)


def test_clip_fractions_of_other_libraries() -> None:
    metrics = policy_loss(NEW, OLD, ADVANTAGES, MASK).metrics
    expect(metrics["clip_ratio/low_mean"], 1 / 9, 1e-7)
    expect(metrics["clip_ratio/high_mean"], 1 / 9, 1e-7)
    expect(metrics["clip_ratio/region_mean"], 2 / 9, 1e-7)
    expect(metrics["kept_fraction"], 1)


# --- Single pieces of the objective


def one_token(ratio: float, advantage: float, **options: object) -> tuple[float, float]:
    """Loss of a single token with this staleness ratio, and its gradient with respect to the log-probability."""
    old = tensor([[-1.0]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss = policy_loss(logprobs, old, tensor([advantage]), torch.ones(1, 1, dtype=torch.bool), **options).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient"),
    [
        (1.0, 2.0, {}, -2.0, -2.0),  # good tokens become likelier: descent raises the log-probability
        (1.0, -2.0, {}, 2.0, 2.0),
        (1.1, 2.0, {}, -2.2, -2.2),
        (1.5, 2.0, {}, -2.4, 0.0),  # clipped high
        (0.5, 2.0, {}, -1.0, -1.0),
        (0.5, -2.0, {}, 1.6, 0.0),  # clipped low
        (1.5, -2.0, {}, 3.0, 3.0),  # moving back is never clipped
        (1.5, 2.0, {"epsilon_high": 0.6}, -3.0, -3.0),
        (0.5, -2.0, {"epsilon_high": 0.6}, 1.6, 0.0),
        (9.0, -2.0, {"delta": 4.0}, 8.0, 0.0),  # two-sided clip
        (9.0, -2.0, {"delta": 10.0}, 18.0, 18.0),
        (9.0, 2.0, {"delta": 4.0}, -2.4, 0.0),
        (2.0, 3.0, {"weights": tensor([[0.5]])}, -1.8, 0.0),
        (1.0, 3.0, {"weights": tensor([[0.5]])}, -1.5, -1.5),
    ],
)
def test_one_token_by_hand(
    ratio: float, advantage: float, options: dict[str, object], loss: float, gradient: float
) -> None:
    assert one_token(ratio, advantage, **options) == pytest.approx((loss, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "cap", "gradient"), [(2.0, 3.0, 5.0, -6.0), (9.0, 3.0, 5.0, -15.0), (9.0, -3.0, 5.0, 15.0)]
)
def test_cispo_caps_the_weight_and_never_the_gradient(
    ratio: float, advantage: float, cap: float, gradient: float
) -> None:
    loss, got = one_token(ratio, advantage, loss_type="cispo", epsilon_high=cap)
    assert got == pytest.approx(gradient, abs=1e-12)
    assert loss == pytest.approx(gradient * (math.log(ratio) - 1), abs=1e-12)


def test_gspo_uses_the_geometric_mean_of_the_ratios_and_spreads_the_gradient() -> None:
    # ratios 2 and 0.5 have geometric mean 1; as tokens both would be clipped for some advantage. The other
    # sequence has 1.5 and 1.5: clipped. A third has no tokens.
    old = torch.zeros(3, 4, dtype=torch.float64)
    logprobs = tensor([[9, 2, 0.5, 9], [9, 1.5, 1.5, 9], [9, 9, 9, 9]]).log().requires_grad_()
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    out = policy_loss(logprobs, old, tensor([3.0, 1.0, 1.0]), mask, importance_sampling_level="sequence")
    expect(out.loss, -(3 + 1.2) / 3)
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    torch.testing.assert_close(gradient, tensor([[0, -0.5, -0.5, 0], [0] * 4, [0] * 4]))
    expect(out.metrics["clip_ratio/high_mean"], 1 / 2)
    expect(out.metrics["clip_ratio/low_mean"], 0)


def test_clip_metrics_count_each_side_for_its_sign_only() -> None:
    # ratios above 1.2: e^0.2, e^0.5; below 0.8: e^-0.3, e^-0.5
    for sign, low, high in ((1.0, 0.0, 2 / 9), (-1.0, 2 / 9, 0.0), (0.0, 0.0, 0.0)):
        metrics = policy_loss(NEW, OLD, torch.full_like(ADVANTAGES, sign), MASK).metrics
        expect(metrics["clip_ratio/low_mean"], low, 1e-7)
        expect(metrics["clip_ratio/high_mean"], high, 1e-7)


def test_clip_metrics_read_all_completion_tokens_whatever_is_kept() -> None:
    keep = torch.zeros_like(MASK)
    metrics = policy_loss(NEW, OLD, ADVANTAGES, MASK, keep=keep).metrics
    expect(metrics["clip_ratio/region_mean"], 2 / 9, 1e-7)
    expect(metrics["kept_fraction"], 0)


def test_cispo_clip_metric_counts_capped_good_tokens() -> None:
    # ratios of good tokens: e^0.2, e^-0.1, 1 and 1, e^-0.5; only the first exceeds 1.1
    metrics = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss_type="cispo", epsilon_high=1.1).metrics
    expect(metrics["clip_ratio/high_mean"], 1 / 9, 1e-7)
    expect(metrics["clip_ratio/low_mean"], 0)
    metrics = policy_loss(NEW, OLD, ADVANTAGES, MASK, loss_type="cispo", epsilon_high=0.7).metrics
    expect(metrics["clip_ratio/high_mean"], 4 / 9, 1e-7)  # all but e^-0.5, and nothing outside the mask


# --- Gradients and safety


def test_weights_carry_no_gradient_and_rejected_tokens_get_none() -> None:
    logprobs, weights = NEW.clone().requires_grad_(), torch.full_like(NEW, 0.5).requires_grad_()
    keep = torch.ones_like(MASK)
    keep[1], keep[0, 1] = False, False
    policy_loss(logprobs, OLD, ADVANTAGES, MASK, keep=keep, weights=weights).loss.backward()
    assert weights.grad is None
    gradient = logprobs.grad
    # token 0 of sequence 0 is clipped (e^0.2 > 1.2); token 2 has w = 1: -0.5 * 1 / 3 / 3
    expected = torch.zeros_like(NEW)
    expected[0, 2] = -0.5 / 3 / 3
    expected[2, 0], expected[2, 1] = -0.5 * 0.5 / 2 / 3, -0.5 * 0.5 * math.exp(-0.5) / 2 / 3
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


def test_an_overflowing_ratio_is_clipped_without_nan() -> None:
    old = torch.full((1, 1), -1000.0)
    logprobs = torch.full((1, 1), -1.0, requires_grad=True)
    loss = policy_loss(logprobs, old, torch.ones(1), torch.ones(1, 1, dtype=torch.bool)).loss
    expect(loss, -1.2, 1e-6)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.item() == 0


# --- KL penalty


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # pi_ref / pi = 2: d = ln 2; gradients with respect to log pi: 1, -d, 1 - e^d
    [
        ("k1", -math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, -math.log(2)),
        ("k3", 1 - math.log(2), -1.0),
    ],
)
def test_kl_by_hand(estimator: str, value: float, gradient: float) -> None:
    logprobs = tensor([[-3.0, -3.0]]).requires_grad_()
    penalty = kl_penalty(logprobs, tensor([[-3 + math.log(2), 5.0]]), torch.tensor([[True, False]]), estimator)
    torch.testing.assert_close(penalty, tensor([[value, 0.0]]))
    (got,) = torch.autograd.grad(penalty.sum(), logprobs)
    torch.testing.assert_close(got, tensor([[gradient, 0.0]]))


def test_k3_of_extreme_differences_is_finite_and_still_pulls_back() -> None:
    logprobs = torch.tensor([[-1000.0, -1.0]], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([[-1.0, -1000.0]]), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(penalty[0, 0].item(), math.expm1(20) - 20, rtol=1e-6, atol=0)
    torch.testing.assert_close(penalty[0, 1].item(), 998.0)
    (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
    assert gradient.tolist() == [[0.0, 1.0]]


def test_shares_of_a_single_token_are_whole() -> None:
    ratio, mask = tensor([[0.5, 0.0]]), torch.tensor([[True, False]])
    assert policy_loss(ratio, torch.zeros_like(ratio), tensor([1.0]), mask).metrics["clip_ratio/high_mean"] == 1


# --- Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"importance_sampling_level": "batch"}, "importance_sampling_level='batch'"),
        ({"denominator": "tokens"}, "denominator='tokens'"),
        ({"denominator": ["all"]}, r"denominator=\['all'\]"),
        ({"loss_type": "cispo"}, "pass epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, r"delta=2\.0"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"keep": MASK[:2]}, r"keep must have shape \(3, 4\) to fit mask, got \(2, 4\)"),
        ({"weights": OLD[:, :2]}, r"weights must have shape \(3, 4\) to fit mask, got \(3, 2\)"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, **options)


def test_bad_masks_and_estimators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages must have shape \(3,\) to fit mask, got \(3, 1\)"):
        policy_loss(NEW, OLD, ADVANTAGES[:, None], MASK)
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK.long())
    with pytest.raises(ValueError, match="estimator='k4'"):
        kl_penalty(NEW, REF, MASK, "k4")  # type: ignore[arg-type]
