"""Score centering against enumeration: a vocabulary of 7 in float64, where every expectation is a sum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.callbacks.corrections.centering import uniform
from sparse_rl_lightning.corrections import Weigh, calibrated_weights, expected_scores

V = 7


def calibrated(log_ratio: Tensor, logprobs: Tensor) -> Tensor:
    return calibrated_weights(log_ratio, logprobs, torch.ones_like(log_ratio, dtype=torch.bool), 0.5)


WEIGHTS: dict[str, Weigh] = {
    "none": uniform,
    "truncated": lambda log_ratio, _: log_ratio.exp().clamp(max=1.1),
    "masked": lambda log_ratio, _: log_ratio.exp() * ((log_ratio.exp() >= 0.9) & (log_ratio.exp() <= 1.2)),
}


def distributions(seed: int, gap: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits (3, V) of a learner, with gradient, and log-probabilities of a sampler that is so far from it."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, 3, V, generator=generator, dtype=torch.float64)
    return (2 * logits).requires_grad_(), (2 * logits + gap * noise).log_softmax(-1)


def gradient(score: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(score.sum(), logits, retain_graph=True)[0]


def drift(logits: Tensor, sampler: Tensor, weigh: Weigh) -> Tensor:
    """The gradient (3, V) that tokens of the sampler have on average, token by token."""
    logprobs, total = logits.log_softmax(-1), torch.zeros_like(logits)
    weights = weigh(logprobs.detach() - sampler, logprobs.detach())
    for token in range(V):
        by_token = gradient(logprobs[:, token], logits)
        total = total + (sampler.exp() * weights)[:, token, None] * by_token
    return total


@pytest.mark.parametrize("name", [*WEIGHTS, "calibrated"])
@pytest.mark.parametrize("seed", range(4))
def test_with_the_whole_vocabulary_it_is_the_drift(seed: int, name: str) -> None:
    logits, sampler = distributions(seed)
    weigh = calibrated if name == "calibrated" else WEIGHTS[name]
    order = sampler.argsort(dim=-1, descending=True)
    ours = expected_scores(logits.log_softmax(-1).gather(-1, order), sampler.gather(-1, order), weigh)
    truth = drift(logits, sampler, weigh)
    assert truth.abs().max() > 0.05
    torch.testing.assert_close(gradient(ours, logits), truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WEIGHTS)
def test_others_that_are_a_multiple_are_exact_too(name: str) -> None:
    """The three least likely tokens have 0.8 times their probability, so that the four others are given it."""
    logits, _ = distributions(0)
    dense = logits.detach().log_softmax(-1)
    order = dense.argsort(dim=-1, descending=True)
    rest = order[:, 4:]
    sparse = dense.exp().scatter(-1, rest, 0.8 * dense.exp().gather(-1, rest))
    missing = 1 - sparse.sum(dim=-1, keepdim=True)
    sparse = sparse.scatter_add(-1, order[:, :1], missing)
    known = order[:, :4]
    ours = expected_scores(logits.log_softmax(-1).gather(-1, known), sparse.log().gather(-1, known), WEIGHTS[name])
    truth = drift(logits, sparse.log(), WEIGHTS[name])
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(gradient(ours, logits), truth, rtol=0, atol=2e-5)  # of what counts as rounding


@pytest.mark.parametrize("known", [1, 4, V])
def test_it_is_nothing_where_the_sampler_is_the_learner(known: int) -> None:
    logits, _ = distributions(1)
    order = logits.detach().argsort(dim=-1, descending=True)[:, :known]
    logprobs = logits.log_softmax(-1).gather(-1, order)
    score = expected_scores(logprobs, logprobs.detach(), uniform)
    torch.testing.assert_close(gradient(score, logits), torch.zeros_like(logits), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sure_tokens_have_no_rounding_for_a_tail(dtype: torch.dtype) -> None:
    """All but 1e-9 of both distributions is known: what is left of a sum of float32 says nothing of the others."""
    logits = torch.tensor([[30.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]], dtype=dtype, requires_grad=True)
    sampler = (logits.detach() + torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0, 0.0, 2.0], dtype=dtype)).log_softmax(-1)
    ours = expected_scores(logits.log_softmax(-1)[:, :4], sampler[:, :4], uniform)
    assert gradient(ours, logits).abs().max() < 1e-6


def test_a_lasting_gap_does_not_move_the_policy() -> None:
    """REINFORCE with a reward that is always 1: naive training follows the sampler, centered training stands still."""
    start, sampler = distributions(2)
    for name, moves in (("naive", True), ("centered", False)):
        logits = start.detach().clone().requires_grad_()
        for _ in range(50):
            expected = drift(logits, sampler, uniform)
            centered = gradient(expected_scores(logits.log_softmax(-1), sampler, uniform), logits)
            with torch.no_grad():
                logits += 0.5 * (expected if name == "naive" else expected - centered)
        moved = (logits.detach().softmax(-1) - start.detach().softmax(-1)).abs().max()
        assert (moved > 0.1) == moves
        assert (moved < 1e-9) != moves


def test_a_part_of_a_large_vocabulary_is_close_to_all_of_it() -> None:
    """128 of 49,152 tokens, as a language model has them: most of the mass is known, of the rest the ratio."""
    generator = torch.Generator().manual_seed(0)
    shape = 4, 49_152
    ranks = torch.arange(1, shape[1] + 1, dtype=torch.float64)
    logits = (-1.5 * ranks.log() + 0.3 * torch.randn(shape, generator=generator)).requires_grad_()
    sampler = (logits.detach() + 0.3 * torch.randn(shape, generator=generator)).log_softmax(-1)
    log_probs = logits.log_softmax(-1)

    def of_most_likely(known: int) -> Tensor:
        order = sampler.topk(known).indices
        score = expected_scores(log_probs.gather(-1, order), sampler.gather(-1, order), WEIGHTS["truncated"])
        return gradient(score, logits)

    whole = of_most_likely(shape[1])
    errors = [((of_most_likely(known) - whole).norm() / whole.norm()).item() for known in (8, 128, 2048)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.2 < errors[0]


def published(sampler: Tensor, dense: Tensor, known: list[int], weigh: Any) -> Tensor:
    """The coefficients of log p as others write them: q f(p / q) - alpha f(1 / alpha) p, alpha = (1 - Q) / (1 - P).

    vime's ``score_centering.py`` and the paper's Eq. 8 with its head H; computed here number by number.
    """
    q, p = sampler.exp()[known].tolist(), dense.exp()[known].tolist()
    alpha = (1 - sum(q)) / (1 - sum(p))
    return torch.tensor(
        [each * weigh(mine / each) - alpha * weigh(1 / alpha) * mine for each, mine in zip(q, p, strict=True)],
        dtype=sampler.dtype,
    )


@pytest.mark.parametrize("cap", [math.inf, 1.5])
def test_it_has_the_published_coefficients(cap: float) -> None:
    dense = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.03, 0.006, 0.004], dtype=torch.float64).log()
    sampler = torch.tensor([0.3, 0.45, 0.1, 0.05, 0.05, 0.03, 0.02], dtype=torch.float64).log()
    known = [0, 1, 2]
    logprobs = dense[known][None].requires_grad_()

    def weigh(log_ratio: Tensor, _: Tensor) -> Tensor:
        return log_ratio.exp().clamp(max=cap) if math.isfinite(cap) else torch.ones_like(log_ratio)

    def number(ratio: float) -> float:
        return min(ratio, cap) if math.isfinite(cap) else 1.0

    ours = torch.autograd.grad(expected_scores(logprobs, sampler[known][None], weigh).sum(), logprobs)[0]
    torch.testing.assert_close(ours[0], published(sampler, dense, known, number), rtol=0, atol=1e-4)
