"""The objective: numbers of other libraries, single tokens by hand, gradients, KL, and how terms become a scalar.

Both presets by hand, every denominator against a brute-force version, additivity, and bad input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.advantages import group_advantages, informative_groups, nan_deviation
from sparse_rl_lightning.corrections import (
    consistency_log_ratio,
    importance_weights,
    mask_tokens,
    normalize_weights,
    reject_sequences,
)
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.loss import GRPOLoss, KLTokens
from sparse_rl_lightning.losses import aggregate, count_items, kl_penalty, policy_loss
from sparse_rl_lightning.records import Rollout


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
        (1.0, 2.0, {"delta": 0.5}, -1.0, 0.0),  # which is why no delta up to 1 is taken: good samples teach nothing
        (1.0, 2.0, {"delta": 1.3}, -2.0, -2.0),
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


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # d = log(pi_ref / pi); gradients with respect to log pi. That of k1 is the same for any reference
    [
        ("k1", lambda d: -d, lambda d: 1.0),
        ("k2", lambda d: d**2 / 2, lambda d: -d),
        ("k3", lambda d: math.expm1(d) - d, lambda d: -math.expm1(d)),
    ],
)
def test_kl_by_hand(estimator: str, value: Callable[[float], float], gradient: Callable[[float], float]) -> None:
    logprobs, gaps = tensor([[-3.0] * 3]).requires_grad_(), [math.log(2), -math.log(5)]
    references = tensor([[*(gap - 3 for gap in gaps), 5.0]])
    penalty = kl_penalty(logprobs, references, torch.tensor([[True, True, False]]), estimator)
    torch.testing.assert_close(penalty, tensor([[*map(value, gaps), 0.0]]))
    (got,) = torch.autograd.grad(penalty.sum(), logprobs)
    torch.testing.assert_close(got, tensor([[*map(gradient, gaps), 0.0]]))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_sampling_level": "batch"}, "importance_sampling_level='batch'"),
        ({"denominator": "tokens"}, "denominator='tokens'"),
        ({"denominator": ["all"]}, r"denominator=\['all'\]"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, r"delta=2\.0"),
        ({"keep": MASK[:2]}, r"keep must have shape \(3, 4\) to fit mask, got \(2, 4\)"),
        ({"weights": OLD[:, :2]}, r"weights must have shape \(3, 4\) to fit mask, got \(3, 2\)"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, **options)


def test_a_sum_with_a_number_of_items_refuses_unknown_families_too() -> None:
    with pytest.raises(ValueError, match="loss_type='dappo'"):
        aggregate(NEW, MASK, loss_type="dappo", num_items=3)  # type: ignore[arg-type]


def test_bad_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK.long())


LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo")
DENOMINATORS = ("all", "kept_tokens", "kept")
EVERY_AGGREGATION = list(product(LOSS_TYPES, DENOMINATORS))
EVERY_LOSS = list(product(LOSS_TYPES, ("token", "sequence"), DENOMINATORS))


# --- The two presets of Sparse-RL, by hand
#
# w  = [2  1.5  .5  1.1 | .5 1.5 | 1 1],  A = 1 | -1 | 2,  epsilon 0.2
# min(w A, clip(w) A) = [1.2 1.2 .5 1.1 | -.8 -1.5 | 2 2]
# xi = [2   1   .6   1  | 1    3 | 1e-5 1]
# k3 of the reference is Q where pi_ref / pi = 2 (tokens 1 and 3 of sequence 0, token 2 of 1, token 1 of 2), else 0

Q = 1 - math.log(2)
PRESET_MASK = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
STALENESS = tensor([[9, 2, 1.5, 0.5, 1.1], [9, 0.5, 1.5, 9, 9], [9, 1, 1, 9, 9]]).log()
XI = tensor([[9, 2, 1, 0.6, 1], [9, 1, 3, 9, 9], [9, 1e-5, 1, 9, 9]]).log()
REFERENCE = tensor([[9, 2, 1, 2, 1], [9, 1, 2, 9, 9], [9, 2, 1, 9, 9]]).log()
PRESET_OLD = -tensor([[1.0, 2, 3, 4, 5], [2, 2, 2, 2, 2], [12, 12, 1, 1, 1]])
PRESET_NEW = PRESET_OLD + STALENESS
PRESET_ADVANTAGES = tensor([1.0, -1.0, 2.0])
PRESET_LOG_XI = consistency_log_ratio(PRESET_OLD, PRESET_OLD - XI, PRESET_MASK)
BETA = 0.1


def test_preset_paper_by_hand() -> None:
    keep = reject_sequences(PRESET_LOG_XI, PRESET_MASK)[:, None].expand_as(PRESET_MASK)
    weights = importance_weights(PRESET_LOG_XI, PRESET_MASK)
    policy = policy_loss(PRESET_NEW, PRESET_OLD, PRESET_ADVANTAGES, PRESET_MASK, keep=keep, weights=weights)
    # sequence 0: (2*1.2 + 1*1.2 + .6*.5 + 1*1.1) / 4 = 5 / 4;  1: (-.8 - 3*1.5) / 2 = -5.3 / 2;  2: rejected, 0
    expect(policy.loss, -(5 / 4 - 5.3 / 2) / 3)
    kl = aggregate(kl_penalty(PRESET_NEW, PRESET_NEW + REFERENCE, PRESET_MASK), PRESET_MASK)
    expect(policy.loss + BETA * kl, -(5 / 4 - 5.3 / 2) / 3 + BETA * (2 * Q / 4 + Q / 2 + Q / 2) / 3)


def test_preset_official_by_hand() -> None:
    mask, log_xi = PRESET_MASK, PRESET_LOG_XI
    keep = reject_sequences(log_xi, mask)[:, None] & mask_tokens(log_xi, mask, 0.5, 1.5)
    capped = importance_weights(log_xi, mask, "token_truncate", clip_max=1.5)
    weights = normalize_weights(importance_weights(log_xi, mask, "token_mask", 0.5, 1.5), capped, mask)
    # mean of min(xi, 1.5) over all 8 tokens, rejected ones included
    mean = (1.5 + 1 + 0.6 + 1 + 1 + 1.5 + 1e-5 + 1) / 8
    settings = {"keep": keep, "denominator": "kept_tokens"}
    policy = policy_loss(PRESET_NEW, PRESET_OLD, PRESET_ADVANTAGES, mask, weights=weights, **settings)
    # sequence 0 without its first token: (1*1.2 + .6*.5 + 1*1.1) / 3 = 2.6 / 3;  1 without its second: -.8 / 1
    expect(policy.loss, -(2.6 / 3 - 0.8) / mean / 3)
    kl = aggregate(kl_penalty(PRESET_NEW, PRESET_NEW + REFERENCE, mask), mask, **settings)
    # of the four tokens with a penalty only token 3 of sequence 0 is kept
    expect(policy.loss + BETA * kl, -(2.6 / 3 - 0.8) / mean / 3 + BETA * Q / 3 / 3)


TERMS = tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
TERM_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
TERM_KEEP = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)  # sums 4 of 3, 0 of 4, 19 of 2


def brute_force(inputs: dict[str, Tensor], loss_type: str, level: str, denominator: str, delta: float | None) -> float:
    """The module docstring of losses.py once more, in loops over Python floats."""
    sequences, items, epsilon, epsilon_high = [], 0, 0.1, 3.0 if loss_type == "cispo" else 0.3
    rows = {name: value.tolist() for name, value in inputs.items()}
    for i, advantage in enumerate(rows["advantages"]):
        tokens = [t for t, m in enumerate(rows["mask"][i]) if m]
        kept = [t for t in tokens if rows["keep"][i][t]]
        log_w = {t: rows["logprobs"][i][t] - rows["old"][i][t] for t in tokens}
        if level == "sequence":
            log_w = dict.fromkeys(tokens, sum(log_w.values()) / max(len(tokens), 1))
        total = 0.0
        for t in kept:
            w = math.exp(log_w[t])
            term = min(w, epsilon_high) * advantage * rows["logprobs"][i][t]
            if loss_type != "cispo":
                clipped = min(max(w, 1 - epsilon), 1 + epsilon_high)
                term = min(min(w, delta or math.inf) * advantage, clipped * advantage)
            total -= term * rows["weights"][i][t]
        length = len(tokens) if denominator == "all" else len(kept)
        sequences.append(total / max(length, 1) if loss_type == "grpo" else total)
        if loss_type in ("grpo", "dr_grpo"):
            items += 1 if denominator != "kept" or kept else 0
        else:
            dropped_length = {"all": len(tokens), "kept_tokens": len(kept) or len(tokens), "kept": len(kept)}
            items += dropped_length[denominator]
    return sum(sequences) / (items or 1) / (7 if loss_type == "dr_grpo" else 1)


def random_inputs(seed: int, batch: int = 5, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(batch, length, generator=generator, dtype=torch.float64) * 3
    lengths = torch.randint(0, length, (batch, 1), generator=generator)
    keep = torch.rand(batch, length, generator=generator) > 0.3
    keep[1] = False
    return {
        "old": old,
        "logprobs": old + torch.randn(batch, length, generator=generator, dtype=torch.float64) * 0.6,
        "advantages": torch.randn(batch, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(length) > 0) & (torch.arange(length) <= lengths),
        "keep": keep,
        "weights": torch.rand(batch, length, generator=generator, dtype=torch.float64) * 2,
    }


def loss_of(inputs: dict[str, Tensor], loss_type: str, level: str, denominator: str, **options: object) -> Tensor:
    names = ("logprobs", "old", "advantages", "mask", "keep", "weights")
    logprobs, old, advantages, mask, keep, weights = (inputs[name] for name in names)
    return policy_loss(
        logprobs, old, advantages, mask, keep=keep, weights=weights, loss_type=loss_type,
        importance_sampling_level=level, epsilon=0.1, epsilon_high=3.0 if loss_type == "cispo" else 0.3,
        denominator=denominator, max_completion_length=7, **options,
    ).loss  # fmt: skip


@pytest.mark.parametrize(("loss_type", "level", "denominator"), EVERY_LOSS)
def test_loss_agrees_with_brute_force(loss_type: str, level: str, denominator: str) -> None:
    for seed, delta in product(range(4), (None,) if loss_type == "cispo" else (None, 1.6)):
        inputs = random_inputs(seed)
        got = loss_of(inputs, loss_type, level, denominator, delta=delta)
        expect(got, brute_force(inputs, loss_type, level, denominator, delta))


@pytest.mark.parametrize(("loss_type", "denominator"), EVERY_AGGREGATION)
def test_micro_batches_add_up_to_the_whole_step(loss_type: str, denominator: str) -> None:
    inputs = random_inputs(5, batch=7)
    inputs["logprobs"].requires_grad_()
    whole = loss_of(inputs, loss_type, "token", denominator)
    parts = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(0, 1), slice(1, 2), slice(2, 7))]
    counts = [count_items(part["mask"], part["keep"], loss_type, denominator) for part in parts]
    losses = [loss_of(part, loss_type, "token", denominator, num_items=sum(counts)) for part in parts]
    expect(torch.stack(losses).sum(), whole.item())
    (whole_gradient,) = torch.autograd.grad(whole, inputs["logprobs"])
    (added_gradient,) = torch.autograd.grad(torch.stack(losses).sum(), inputs["logprobs"])
    torch.testing.assert_close(added_gradient, whole_gradient, atol=1e-12, rtol=0)


def test_a_smaller_number_of_items_than_one_is_taken_as_given() -> None:
    expect(aggregate(TERMS, TERM_MASK, loss_type="dapo", num_items=0.5), 2 * (1 + 2 + 3 + 5 + 6 + 7 + 8 + 9 + 10))


@pytest.mark.parametrize(("loss_type", "denominator"), EVERY_AGGREGATION)
def test_a_fully_rejected_micro_batch_is_a_zero_attached_to_the_graph(loss_type: str, denominator: str) -> None:
    inputs = random_inputs(3)
    inputs["keep"] = torch.zeros_like(inputs["keep"])
    inputs["logprobs"].requires_grad_()
    loss = loss_of(inputs, loss_type, "token", denominator)
    expect(loss, 0, 0)
    (gradient,) = torch.autograd.grad(loss, inputs["logprobs"])
    assert gradient.count_nonzero() == 0
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "token"), ("grpo", "sequence"), ("cispo", "token")])
def test_rejected_and_padded_tokens_cannot_poison_the_gradient(loss_type: str, level: str) -> None:
    inputs = random_inputs(4)
    clean = loss_of(inputs, loss_type, level, "all")
    outside = ~inputs["mask"]
    inputs["old"] = inputs["old"].masked_fill(outside, -torch.inf)
    inputs["weights"] = inputs["weights"].masked_fill(outside | ~inputs["keep"], torch.nan)
    if level == "token":
        inputs["old"][1] = -1e4  # a rejected sequence whose ratio overflows
    inputs["logprobs"].requires_grad_()
    loss = loss_of(inputs, loss_type, level, "all")
    expect(loss, clean.item())
    (gradient,) = torch.autograd.grad(loss, inputs["logprobs"])
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kl_on", ["completion", "kept"])
def test_the_penalty_divides_by_the_tokens_that_it_is_of(kl_on: KLTokens) -> None:
    """Of 8 tokens, 3 of which are rejected, one of them with its whole sequence."""
    keep = PRESET_MASK.clone()
    keep[0, 1] = keep[2] = False
    part = Rollout(
        PRESET_MASK.long(), torch.ones(3, dtype=torch.int64), PRESET_MASK, PRESET_MASK[:, 1], PRESET_OLD,
        old_logprobs=PRESET_OLD, ref_logprobs=PRESET_OLD + REFERENCE, keep=keep, advantages=torch.zeros(3).double(),
    )  # fmt: skip
    loss = GRPOLoss("dapo", beta=0.5, kl_on=kl_on, denominator="kept", kl_estimator="k2")
    divisors = loss.denominators(part)
    assert (divisors.policy, divisors.penalty, divisors.everything) == (5, 5 if kl_on == "kept" else 8, 8)
    penalty = 0.5 * REFERENCE.square()[keep if kl_on == "kept" else PRESET_MASK]
    output = loss(part, PRESET_OLD, divisors)
    expect(output.loss, 0.5 * float(penalty.mean()))
    expect(output.metrics["kl"], float((0.5 * REFERENCE.square())[PRESET_MASK].mean()))


@pytest.mark.parametrize(
    ("refused", "match", "allowed"),
    [
        ({"beta": 0.1, "kl_estimator": "k1"}, "kl_estimator='k1'.*Set kl_estimator to k3", {"kl_estimator": "k1"}),
        ({"delta": 1.0}, r"delta=1\.0.*above 1 \+ epsilon", {"delta": 1.3}),
        ({"delta": 0.5}, r"delta=0\.5.*or to null", {"delta": None}),
        ({"epsilon": 1.5}, r"epsilon=1\.5.*and epsilon_high to", {"epsilon": 1.0, "epsilon_high": 1.5}),
        ({"epsilon": 1.5, "loss_type": "dapo"}, r"epsilon=1\.5",
         {"epsilon": 1.5, "loss_type": "cispo", "epsilon_high": 5.0}),
    ],
)  # fmt: skip
def test_options_without_the_effect_they_name_are_refused(
    refused: dict[str, Any], match: str, allowed: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=match):
        GRPOLoss(**refused)
    GRPOLoss(**allowed)


NAN = float("nan")
REWARDS = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1])


def expect_advantages(actual: torch.Tensor, numbers: list[float], tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(numbers, dtype=torch.float64), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("eps", "even", "loser", "winner"),
    [(1e-6, 0.8660239, -0.499999, 1.499997), (1e-4, 0.8658754, -0.4999, 1.4997)],  # verl's and TRL's own output
)
def test_group_scale_gives_the_published_numbers(eps: float, even: float, loser: float, winner: float) -> None:
    expected = [even, -even, -even, even, 0, 0, 0, 0, loser, loser, loser, winner]
    expect_advantages(group_advantages(REWARDS, 4, eps=eps), expected, tolerance=2e-7 if eps == 1e-6 else 2e-5)
    assert group_advantages(REWARDS, 4, eps=eps).dtype == torch.float32


def test_group_scale_by_hand_in_float64() -> None:
    # (1, 0, 0, 1): mean 1/2, sum of squares 1, Bessel: std = sqrt(1 / 3)
    even = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    expect_advantages(group_advantages(REWARDS.double(), 4)[:4], [even, -even, -even, even], tolerance=1e-12)


# 7 ones, 5 zeros: sum of squares 7 * 5 / 12, Bessel: std = sqrt(35 / 12 / 11) = 0.514929
@pytest.mark.parametrize(("scale", "std", "tolerance"), [("batch", math.sqrt(35 / 132) + 1e-6, 1e-6), ("none", 1, 0)])
def test_other_scales_divide_by_the_deviation_of_all_rewards_or_by_nothing(
    scale: Any, std: float, tolerance: float
) -> None:
    expected = [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, -0.25, -0.25, -0.25, 0.75]
    expect_advantages(group_advantages(REWARDS, 4, scale), [a / std for a in expected], tolerance)


def test_whole_number_rewards_have_fractional_advantages() -> None:
    expect_advantages(group_advantages(torch.tensor([1, 0, 0, 3]), 4, "none"), [0, -1, -1, 2], tolerance=0)
    expect_advantages(group_advantages(torch.tensor([True, False]), 2, "none"), [0.5, -0.5], tolerance=0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_reward_is_ignored_and_has_advantage_zero(scale: str) -> None:
    # 1, 0, 1 remain: mean 2/3, sum of squares 2/3, Bessel: std = sqrt(1/3); a lone reward says nothing
    rewards = torch.tensor([1, NAN, 0, 1, NAN, NAN, NAN, 1, NAN, NAN, NAN, NAN])
    std = {
        "group": math.sqrt(1 / 3) + 1e-6,
        "batch": math.sqrt((3 * (1 / 4) ** 2 + (3 / 4) ** 2) / 3) + 1e-6,  # 1, 0, 1, 1: mean 3/4
        "none": 1.0,
    }[scale]
    expected = [1 / 3 / std, 0, -2 / 3 / std, 1 / 3 / std] + [0.0] * 8
    expect_advantages(group_advantages(rewards, 4, scale), expected, tolerance=1e-6)
    assert informative_groups(rewards, 4).tolist() == [True, False, False]
    assert nan_deviation(rewards.view(3, 4))[1:].tolist() == [[0.0], [0.0]]


def test_equal_rewards_up_to_rounding_are_not_informative_and_have_advantage_zero() -> None:
    third = torch.tensor(0.3)
    above = torch.nextafter(third, torch.tensor(1.0))
    rewards = torch.stack([third, above, third, third, third, above, *REWARDS[:3]])
    assert informative_groups(rewards, 3).tolist() == [False, False, True]
    assert informative_groups(-rewards, 3).tolist() == [False, False, True]
    assert group_advantages(rewards, 3)[:6].tolist() == [0.0] * 6


def test_small_and_offset_differences_are_informative() -> None:
    rewards = torch.tensor([0.0, 1e-9, -2.0, -2.001, 100.0, 100.001, 0.0, 0.0])
    assert informative_groups(rewards, 2).tolist() == [True, True, True, False]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6), st.floats(-5, 5, width=32))
def test_advantages_sum_to_zero_in_a_group_and_ignore_a_constant(rewards: list[float], shift: float) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(values, 3, "none")
    torch.testing.assert_close(advantages.view(2, 3).sum(1), torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(group_advantages(values + shift, 3, "none"), advantages, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("size", "scale", "match"),
    [(1, "group", "num_generations=1"), (1, "batch", "num_generations=1"), (1, "none", "num_generations=1"),
     (5, "group", r"num_generations=5.*\(12,\)"), (4, "std", "scale_rewards='std'")],
)  # fmt: skip
def test_broken_groups_and_unknown_scales_are_refused(size: int, scale: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        group_advantages(REWARDS, size, scale)
    if size == 5:
        with pytest.raises(ValueError, match=match):
            informative_groups(REWARDS, size)
