"""Overlap of two distributions: by hand, against total variation, and within its top-k bounds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl_lightning.metrics.overlap import distribution_overlap, overlap_bounds

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def logprobs(seed: int, size: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, size, generator=generator, dtype=torch.float64) * scale).log_softmax(-1)


def test_overlap_by_hand() -> None:
    torch.testing.assert_close(distribution_overlap(P.log(), Q.log()), torch.tensor(0.7, dtype=torch.float64))
    one_hot = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert distribution_overlap(one_hot[0], one_hot[1]) == 0
    assert distribution_overlap(one_hot[0], one_hot[0]) == 1


def test_bounds_by_hand() -> None:
    # Known tokens 0 and 1: 0.2 + 0.3; left over 0.2 of p and 0.5 of q.
    expected = torch.tensor([0.5, 0.7], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(overlap_bounds(P[:2].log(), Q[:2].log())), expected)
    torch.testing.assert_close(torch.stack(overlap_bounds(Q[:2].log(), P[:2].log())), expected)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(0.1, 8.0), st.data())
def test_bounds_enclose_the_exact_overlap(seed: int, size: int, scale: float, data: st.DataObject) -> None:
    logp, logq = logprobs(seed, size, scale), logprobs(seed + 1, size, scale)
    exact = distribution_overlap(logp, logq)
    torch.testing.assert_close(exact, 1 - (logp.exp() - logq.exp()).abs().sum(-1) / 2)
    top, ids = logp.topk(data.draw(st.integers(1, size)), dim=-1)
    lower, upper = overlap_bounds(top, logq.gather(-1, ids))
    assert bool((lower <= exact + 1e-12).all())
    assert bool((exact <= upper + 1e-12).all())
    assert bool((upper <= 1 + 1e-12).all())


def test_bounds_close_on_the_exact_value_with_the_whole_vocabulary() -> None:
    logp, logq = logprobs(0, 9, 2.0), logprobs(1, 9, 2.0)
    lower, upper = overlap_bounds(logp, logq)
    torch.testing.assert_close(lower, distribution_overlap(logp, logq))
    torch.testing.assert_close(upper, lower)


def test_rounding_never_puts_the_upper_bound_below_the_lower() -> None:
    top = logprobs(0, 3000, 1.0).float() + 1e-6  # sums to a little more than 1, as float32 sums may
    lower, upper = overlap_bounds(top, top)
    assert bool((upper >= lower).all())
