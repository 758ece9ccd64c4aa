"""The tail of the acceptance by length bin: against numpy, and where there is nothing to measure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.acceptance import AcceptanceTail, percentile, sampled_acceptance

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
