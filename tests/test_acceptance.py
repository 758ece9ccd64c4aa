"""Acceptance of two distributions: by hand, against total variation, within its top-k bounds, and of real rollouts.

Its tail by length bin: against numpy, and where there is nothing to measure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.acceptance import (
    AcceptanceTail,
    acceptance_bounds,
    exact_acceptance,
    percentile,
    rollout_acceptance,
    sampled_acceptance,
    tail_target,
)
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.hooks import REPLAY, attention_implementation
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
VOCABULARY = 23


def logprobs(seed: int, size: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, size, generator=generator, dtype=torch.float64) * scale).log_softmax(-1)


def test_exact_by_hand() -> None:
    torch.testing.assert_close(exact_acceptance(P.log(), Q.log()), torch.tensor(0.7, dtype=torch.float64))
    one_hot = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert exact_acceptance(one_hot[0], one_hot[1]) == 0
    assert exact_acceptance(one_hot[0], one_hot[0]) == 1


def test_bounds_by_hand() -> None:
    # Known tokens 0 and 1: 0.2 + 0.3; left over 0.2 of p and 0.5 of q.
    expected = torch.tensor([0.5, 0.7], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(acceptance_bounds(P[:2].log(), Q[:2].log())), expected)
    torch.testing.assert_close(torch.stack(acceptance_bounds(Q[:2].log(), P[:2].log())), expected)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(0.1, 8.0), st.data())
def test_bounds_enclose_the_exact_acceptance(seed: int, size: int, scale: float, data: st.DataObject) -> None:
    dense, sparse = logprobs(seed, size, scale), logprobs(seed + 1, size, scale)
    exact = exact_acceptance(dense, sparse)
    torch.testing.assert_close(exact, 1 - (dense.exp() - sparse.exp()).abs().sum(-1) / 2)
    top, ids = sparse.topk(data.draw(st.integers(1, size)), dim=-1)
    lower, upper = acceptance_bounds(dense.gather(-1, ids), top)
    assert bool((lower <= exact + 1e-12).all())
    assert bool((exact <= upper + 1e-12).all())
    assert bool((upper <= 1).all())
    for bound in acceptance_bounds(dense, sparse):  # the whole vocabulary
        torch.testing.assert_close(bound, exact)


def test_rounding_never_turns_the_bounds_around_or_leaves_one() -> None:
    top = logprobs(0, 3000, 1.0).float() + 1e-6  # sums to a little more than 1, as float32 sums may
    lower, upper = acceptance_bounds(top, top)
    assert bool(((lower <= upper) & (upper <= 1)).all())


def test_sampled_acceptance_estimates_the_mean_and_not_the_tail() -> None:
    dense, sparse = P.log(), Q.log()
    by_token = sampled_acceptance(dense, sparse)
    torch.testing.assert_close(by_token, torch.tensor([1.0, 1.0, 0.4], dtype=torch.float64))
    torch.testing.assert_close((Q * by_token).sum(), exact_acceptance(dense, sparse))


def test_the_published_target_under_ones_own_ceiling() -> None:
    assert tail_target(0.945) == pytest.approx(0.86)
    assert tail_target(1.0) == pytest.approx(0.86 / 0.945)
    assert tail_target(0.5, target=0.92) == pytest.approx(0.92 * 0.5 / 0.945)


def sampled(compressor: Any, top_logprobs: int, temperature: float = 0.8) -> tuple[Any, Rollout]:
    model = tiny_model("qwen3", vocab_size=VOCABULARY, hidden_size=32, initializer_range=0.25)
    params = SamplingParams(
        num_generations=2, max_completion_length=20, temperature=temperature, top_logprobs=top_logprobs, seed=5
    )
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13]]
    return model, RolloutSampler(model, compressor, end_token_ids=[2]).generate(prompts, params)


def by_brute_force(model: Any, rollout: Rollout, temperature: float) -> Tensor:
    """(B, T) in float64 from all logits: of the full cache, and under the evictions of each sequence alone."""
    wide, exact = model.double(), torch.zeros(rollout.sequences.shape, dtype=torch.float64)
    for row in range(len(rollout)):
        part = rollout[row : row + 1]
        dense = wide(part.sequences).logits[0]
        with attention_implementation(wide, REPLAY):
            sparse = wide(part.sequences, death=part.evictions.death).logits[0]
        p, q = ((logits / temperature).log_softmax(-1).exp() for logits in (dense, sparse))
        exact[row, 1:] = torch.minimum(p, q).sum(-1)[:-1]
    return exact * rollout.completion_mask


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_bounds_of_a_rollout_enclose_what_all_logits_say(temperature: float) -> None:
    compressor = SnapKV(budget=6, buffer=2, num_sinks=1, window=2)
    for top in (1, 4, VOCABULARY):
        model, rollout = sampled(compressor, top, temperature)
        lower, upper = rollout_acceptance(model, rollout, temperature or 1.0, chunk_size=7)
        exact, mask = by_brute_force(model, rollout, temperature or 1.0), rollout.completion_mask
        assert float(exact[mask].min()) < 0.9, "nothing was compressed"
        assert bool((lower <= exact + 1e-5).all())
        assert bool((exact <= upper + 1e-5).all())
        assert lower[~mask].count_nonzero() == upper[~mask].count_nonzero() == 0
        if top == VOCABULARY:
            torch.testing.assert_close(lower.double(), exact, atol=2e-5, rtol=0)
            torch.testing.assert_close(upper.double(), exact, atol=2e-5, rtol=0)
        else:
            assert float((upper - lower).max()) > 0.01


def test_with_the_full_cache_the_acceptance_is_one() -> None:
    model, rollout = sampled(FullKV(), VOCABULARY)
    lower, _ = rollout_acceptance(model, rollout, 0.8)
    torch.testing.assert_close(lower[rollout.completion_mask], torch.ones(int(rollout.completion_mask.sum())))


def test_a_rollout_without_the_samplers_tokens_is_refused() -> None:
    model, rollout = sampled(FullKV(), 0)
    with pytest.raises(ValueError, match="Sample with top_logprobs=20"):
        rollout_acceptance(model, rollout)


SIZES: dict[str, Any] = {"bin_size": 4, "num_bins": 4}
NAMES = ["0-4", "4-8", "8-12", "12+"]


def batch(seed: int, rows: int = 5, width: int = 21) -> tuple[Tensor, Tensor]:
    """Acceptance (B, T) with a tail, and ragged completion masks behind prompts."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(width)
    starts, ends = (torch.randint(1, width, (rows, 1), generator=generator) for _ in range(2))
    touched = torch.rand(rows, width, generator=generator) < 0.6
    values = torch.where(touched, torch.rand(rows, width, generator=generator) ** 0.1, 1.0)
    return values, (index >= starts) & (index < torch.maximum(ends, starts + 1))


def expected(values: Tensor, mask: Tensor, share: float = 0.05) -> dict[str, Any]:
    """The same by the book: lists and numpy."""
    bins: list[list[float]] = [[] for _ in range(4)]
    for row, t in mask.nonzero().tolist():
        bins[min(t // 4, 3)].append(float(values[row, t]))
    every = [value for own in bins for value in own]
    return {
        "by_length": {name: np.percentile(own, 100 * share) for name, own in zip(NAMES, bins, strict=True) if own},
        "tokens": {name: len(own) for name, own in zip(NAMES, bins, strict=True) if own},
        "overall": np.percentile(every, 100 * share),
        "mean": np.mean(every),
        "near_one": np.mean(np.array(every) > 0.999),
    }


def assert_agrees(found: AcceptanceTail, want: dict[str, Any]) -> None:
    assert found.tokens == want["tokens"]
    for name in ("by_length", "overall", "mean", "near_one"):
        assert getattr(found, name) == pytest.approx(want[name], rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_the_tail_is_numpys(seed: int, share: float) -> None:
    values, mask = batch(seed)
    assert_agrees(AcceptanceTail.of(values, mask, **SIZES, share=share), expected(values, mask, share))


@settings(max_examples=40)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_are_numpys(numbers: list[float], share: float) -> None:
    wanted = np.percentile(np.array(numbers), 100 * share)
    assert percentile(torch.tensor(numbers), share) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_bins_by_tokens_before_and_their_names() -> None:
    values, mask = torch.zeros(1, 90_000), torch.zeros(1, 90_000, dtype=torch.bool)
    for t, value in ((1999, 0.25), (2000, 0.5), (89_999, 0.75)):
        values[0, t], mask[0, t] = value, True
    assert AcceptanceTail.of(values, mask).by_length == {"0-2000": 0.25, "2000-4000": 0.5, "38000+": 0.75}


def test_nothing_seen_is_nan_and_no_error() -> None:
    found = AcceptanceTail.of(torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.bool), **SIZES)
    assert found.by_length == found.tokens == {}
    assert all(math.isnan(value) for value in (found.overall, found.mean, found.near_one))


def test_the_sampled_tokens_are_another_quantity() -> None:
    generator = torch.Generator().manual_seed(1)
    _, mask = batch(7)
    dense, sparse = (-3 * torch.rand(mask.shape, generator=generator) for _ in range(2))
    found = AcceptanceTail.of(sampled_acceptance(dense, sparse), mask, **SIZES)
    assert_agrees(found, expected((dense - sparse).exp().clamp(max=1), mask))


def test_what_is_not_finite_is_refused_where_it_counts() -> None:
    values, mask = batch(0)
    values[~mask] = math.nan
    AcceptanceTail.of(values, mask, **SIZES)
    values[mask.nonzero()[0, 0], mask.nonzero()[0, 1]] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        AcceptanceTail.of(values, mask, **SIZES)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"bin_size": 0}, "bin_size=0"), ({"num_bins": 0}, "num_bins=0"), ({"share": 2.0}, "share=2.0")],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AcceptanceTail.of(*batch(0), **options)
