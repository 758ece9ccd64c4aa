"""How terms become a scalar: both presets by hand, every denominator, a brute-force version, additivity."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

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

LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo")
DENOMINATORS = ("all", "kept_tokens", "kept")
EVERY_AGGREGATION = list(product(LOSS_TYPES, DENOMINATORS))
EVERY_LOSS = list(product(LOSS_TYPES, ("token", "sequence"), DENOMINATORS))


def tensor(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def expect(actual: Tensor, number: float, tolerance: float = 1e-12) -> None:
    assert actual.shape == ()
    assert actual.item() == pytest.approx(number, abs=tolerance)


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


# --- Denominators and families, by hand and by brute force

TERMS = tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
TERM_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
TERM_KEEP = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)  # sums 4 of 3, 0 of 4, 19 of 2


@pytest.mark.parametrize(
    ("loss_type", "denominator", "number"),
    [
        ("grpo", "all", (4 / 3 + 0 + 19 / 2) / 3),
        ("grpo", "kept_tokens", (4 / 2 + 0 + 19 / 2) / 3),
        ("grpo", "kept", (4 / 2 + 19 / 2) / 2),
        ("dapo", "all", 23 / 9),
        ("dapo", "kept_tokens", 23 / (2 + 4 + 2)),
        ("dapo", "kept", 23 / 4),
        ("dr_grpo", "all", 23 / 3 / 10),
        ("dr_grpo", "kept_tokens", 23 / 3 / 10),
        ("dr_grpo", "kept", 23 / 2 / 10),
    ],
)
def test_each_denominator_by_hand(loss_type: str, denominator: str, number: float) -> None:
    expect(aggregate(TERMS, TERM_MASK, TERM_KEEP, loss_type, denominator, max_completion_length=10), number)


def test_without_rejection_the_denominators_agree() -> None:
    for loss_type in LOSS_TYPES:
        losses = [aggregate(TERMS, TERM_MASK, None, loss_type, d, 10).item() for d in DENOMINATORS]
        assert losses[0] == losses[1] == losses[2]


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
    names = ("old", "logprobs", "advantages", "mask", "keep", "weights")
    old, logprobs, advantages, mask, keep, weights = (inputs[name] for name in names)
    return policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        keep=keep,
        weights=weights,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=0.1,
        epsilon_high=3.0 if loss_type == "cispo" else 0.3,
        denominator=denominator,
        max_completion_length=7,
        **options,
    ).loss


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


def test_terms_that_are_not_kept_are_never_used() -> None:
    terms = TERMS.masked_fill(~(TERM_MASK & TERM_KEEP), torch.nan)
    expect(aggregate(terms, TERM_MASK, TERM_KEEP, "dapo"), 23 / 9)


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


def test_why_they_have_none() -> None:
    """Derivatives where learner and sampler are one policy: none of good samples, or the same for any reference."""
    mask, logprobs = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[-1.0]], requires_grad=True)

    def slope(loss: Tensor) -> float:
        return float(torch.autograd.grad(loss, logprobs)[0])

    for delta, want in ((0.5, 0.0), (1.3, -1.0)):
        assert slope(policy_loss(logprobs, logprobs.detach(), torch.ones(1), mask, delta=delta).loss) == want
    for estimator, differs in (("k1", False), ("k2", True), ("k3", True)):
        near, far = (
            slope(kl_penalty(logprobs, torch.tensor([[ref]]), mask, estimator).sum())  # type: ignore[arg-type]
            for ref in (-1.5, -4.0)
        )
        assert (near != far) == differs
