"""Rejection, token masks, weights and mismatch statistics: numbers of other libraries and worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.corrections import (
    consistency_log_ratio,
    importance_weights,
    mask_tokens,
    mismatch_statistics,
    normalize_weights,
    reject_sequences,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
OLD = torch.tensor([[-0.7, -0.9, -0.2, -0.3], [-1, -0.8, -0.9, -0.1], [-0.6, -0.3, -0.5, -1]], dtype=torch.float64)
SAMPLER = torch.tensor([[-0.9, -0.4, -0.2, -0.3], [-1, -2.3, -0.8, -0.1], [-0.5, -0.3, -0.6, -1]], dtype=torch.float64)


def logs(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def expect(actual: Tensor, numbers: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(numbers, dtype=torch.float64), atol=tolerance, rtol=0)


def test_log_ratio_is_dense_minus_sparse_inside_the_mask_and_detached() -> None:
    old = OLD.clone().requires_grad_()
    log_ratio = consistency_log_ratio(old, SAMPLER, MASK)
    expect(log_ratio, [[0.2, -0.5, 0, 0], [0, 1.5, -0.1, 0], [-0.1, 0, 0, 0]])
    assert log_ratio[2, 2] == 0  # 0.1 outside the mask
    assert not log_ratio.requires_grad


def test_log_ratio_outside_the_mask_is_zero_even_of_infinite_inputs() -> None:
    minus_infinity = torch.full((1, 2), -torch.inf)
    expect(consistency_log_ratio(minus_infinity, minus_infinity, torch.zeros(1, 2, dtype=torch.bool)), [[0.0, 0.0]])


def test_token_truncate_gives_the_published_weights() -> None:
    weights = importance_weights(consistency_log_ratio(OLD, SAMPLER, MASK), MASK, "token_truncate", clip_max=2.0)
    expected = [[1.2214, 0.60653, 1, 0], [1, 2, 0.904837, 1], [0.904837, 1, 0, 0]]  # verl's and slime's own output
    expect(weights, expected, tolerance=5e-6)


def test_rejection_is_one_sided_and_reads_only_the_mask() -> None:
    log_ratio = logs([[1, 1, 0.99e-4, 1], [1, 1.01e-4, 1, 1], [1, 1e9, 1, 1], [1, 1, 1, 1e-9]])
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[3, 3] = False
    assert reject_sequences(log_ratio, mask).tolist() == [False, True, True, True]
    assert reject_sequences(log_ratio, mask, threshold=1e-3).tolist() == [False, False, True, True]
    assert reject_sequences(torch.full((1, 2), -torch.inf), mask[:1, :2]).tolist() == [False]


def test_mask_tokens_keeps_what_is_within_both_bounds() -> None:
    log_ratio = logs([[0.49, 0.51, 1.49, 1.51]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert mask_tokens(log_ratio, mask, 0.5, 1.5).tolist() == [[False, True, True, False]]
    assert mask_tokens(log_ratio, mask, 0.0, 1.5).tolist() == [[True, True, True, False]]
    assert mask_tokens(log_ratio, mask, 0.5, math.inf).tolist() == [[False, True, True, True]]
    assert mask_tokens(log_ratio, ~mask, 0.5, 1.5).tolist() == [[False] * 4]


# One sequence with ratios 2, 1/8, 1 (and 8 outside the mask): product 1/4, geometric mean 4 ** (-1/3) = 0.629961;
# another with ratios 3, 3: product 9, geometric mean 3.
RATIOS = logs([[2, 0.125, 1, 8], [3, 3, 8, 8]])
RATIO_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
GEOMETRIC = 4 ** (-1 / 3)


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "first", "second"),
    [
        ("token_truncate", None, None, [2, 0.125, 1, 0], [3, 3, 0, 0]),
        ("token_truncate", 0.5, 2.5, [2, 0.5, 1, 0], [2.5, 2.5, 0, 0]),
        ("token_mask", 0.5, 2.5, [2, 0, 1, 0], [0, 0, 0, 0]),
        ("token_truncate", 1.0, 1.0, [1, 1, 1, 0], [1, 1, 0, 0]),
        ("token_mask", None, 2.5, [2, 0.125, 1, 0], [0, 0, 0, 0]),
        ("sequence_truncate", None, None, [0.25] * 3 + [0], [9, 9, 0, 0]),
        ("sequence_truncate", 0.5, 4.0, [0.5] * 3 + [0], [4, 4, 0, 0]),
        ("sequence_mask", 0.5, 10.0, [0] * 4, [9, 9, 0, 0]),
        ("sequence_mask", None, 4.0, [0.25] * 3 + [0], [0] * 4),
        ("geometric_truncate", None, 2.0, [GEOMETRIC] * 3 + [0], [2, 2, 0, 0]),
        ("geometric_mask", 0.7, 3.5, [0] * 4, [3, 3, 0, 0]),
    ],
)
def test_every_mode_by_hand(
    mode: str, clip_min: float | None, clip_max: float | None, first: list[float], second: list[float]
) -> None:
    expect(importance_weights(RATIOS, RATIO_MASK, mode, clip_min, clip_max), [first, second])


def test_extreme_ratios_are_clamped_before_exp_not_after_the_sum() -> None:
    log_ratio = torch.tensor([[100.0, -100.0, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    expected = torch.tensor([[20.0, -20.0, 1.0]]).exp()
    torch.testing.assert_close(importance_weights(log_ratio, mask), expected)
    sequence = importance_weights(log_ratio, mask, "sequence_truncate")  # 100 - 100 + 1
    torch.testing.assert_close(sequence, torch.full((1, 3), math.e))


def test_normalized_weights_have_mean_one_over_all_tokens_given() -> None:
    weights = importance_weights(RATIOS, RATIO_MASK, "token_mask", clip_max=2.5, normalize=True)
    # 2, 1/8, 1, 0, 0 over five tokens: mean 0.625
    expect(weights, [[3.2, 0.2, 1.6, 0], [0, 0, 0, 0]])


def test_normalizing_by_another_mean_as_the_authors_code_does() -> None:
    # xi 2, 1, 0.6 | 1, 3: inside [0.5, 1.5] remain 1, 0.6, 1; mean of min(xi, 1.5) = (1.5+1+0.6+1+1.5)/5 = 1.12
    log_ratio = logs([[2, 1, 0.6], [1, 3, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    weights = importance_weights(log_ratio, mask, "token_mask", 0.5, 1.5)
    capped = importance_weights(log_ratio, mask, "token_truncate", clip_max=1.5)
    expected = [[0, 1 / 1.12, 0.6 / 1.12], [1 / 1.12, 0, 0]]
    expect(normalize_weights(weights, capped, mask), expected)
    expect(normalize_weights(weights, capped.masked_fill(~mask, 100), mask), expected)


def test_nothing_to_normalize_by_leaves_finite_weights() -> None:
    zeros = torch.zeros(2, 3)
    for mask in (zeros.bool(), ~zeros.bool()):
        assert normalize_weights(zeros, zeros, mask).tolist() == zeros.tolist()


def test_weights_carry_no_gradient() -> None:
    log_ratio = RATIOS.clone().requires_grad_()
    assert not importance_weights(log_ratio, RATIO_MASK, "sequence_truncate", normalize=True).requires_grad


def test_statistics_by_hand() -> None:
    # Tokens 2, 1/8, 1, 3, 3 of two sequences; everything outside the mask is 8 and must not be seen.
    got = {name: value.item() for name, value in mismatch_statistics(RATIOS, RATIO_MASK).items()}
    assert got == pytest.approx(
        {
            "mismatch/kl_k1": -math.log(2 / 8 * 9) / 5,  # mean of -log xi
            "mismatch/kl_k3": 9.125 / 5 - 1 - math.log(2 / 8 * 9) / 5,  # mean xi - 1 - mean log xi
            "mismatch/ratio_p05": 0.125,
            "mismatch/ess": 9.125**2 / (5 * (4 + 1 / 64 + 1 + 9 + 9)),
            "mismatch/low_ratio_tokens": 0,
            "mismatch/low_ratio_sequences": 0,
            "sampling/importance_sampling_ratio/min": 0.125,
            "sampling/importance_sampling_ratio/mean": 9.125 / 5,
            "sampling/importance_sampling_ratio/max": 3,
            "sampling/sampling_logp_difference/mean": math.log(2 * 8 * 9) / 5,
            "sampling/sampling_logp_difference/max": math.log(8),
        },
        abs=1e-12,
    )


def test_percentile_is_the_nearest_rank() -> None:
    log_ratio = torch.arange(1, 101, dtype=torch.float64).flip(0).reshape(4, 25).log() / 10
    mask = torch.ones(4, 25, dtype=torch.bool)
    expect(mismatch_statistics(log_ratio, mask)["mismatch/ratio_p05"], 5**0.1)  # the 5th smallest of 100


def test_low_ratios_are_counted_per_token_and_per_sequence() -> None:
    log_ratio = logs([[1e-5, 1e-6, 1, 1], [1, 1, 1, 1e-5], [1, 2, 3, 1], [1, 1, 1, 1]])
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1, 3] = mask[3] = False  # the last has no tokens
    got = mismatch_statistics(log_ratio, mask)
    expect(got["mismatch/low_ratio_tokens"], 2 / 11, tolerance=1e-7)
    expect(got["mismatch/low_ratio_sequences"], 1 / 3, tolerance=1e-7)
    assert reject_sequences(log_ratio, mask).tolist() == [False, True, True, True]


def test_statistics_of_no_token_are_those_of_a_match() -> None:
    got = mismatch_statistics(RATIOS, torch.zeros_like(RATIO_MASK))
    assert got["mismatch/kl_k3"] == 0
    assert got["mismatch/ess"] == 1
    assert got["sampling/importance_sampling_ratio/min"] == 1


def test_kl_estimates_point_from_sampler_to_dense() -> None:
    sampler = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    dense = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64)
    # Seven, two and one tokens: exactly the sampler's own frequencies, so the mean is the expectation.
    log_ratio = (dense / sampler).log().repeat_interleave(torch.tensor([7, 2, 1]))[None]
    got = mismatch_statistics(log_ratio, torch.ones(1, 10, dtype=torch.bool))
    expected = (sampler * (sampler / dense).log()).sum().item()
    expect(got["mismatch/kl_k1"], expected)
    expect(got["mismatch/kl_k3"], expected)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-15, 15), min_size=8, max_size=8))
def test_statistics_stay_in_their_ranges(values: list[float]) -> None:
    got = mismatch_statistics(torch.tensor(values).view(2, 4), torch.ones(2, 4, dtype=torch.bool))
    assert 0 < got["mismatch/ess"] <= 1 + 1e-6
    assert got["mismatch/kl_k3"] >= 0
    assert got["sampling/importance_sampling_ratio/min"] <= got["mismatch/ratio_p05"]


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=0\.0"):
        reject_sequences(RATIOS, RATIO_MASK, 0.0)
    with pytest.raises(ValueError, match=r"low=1\.5, high=0\.5"):
        mask_tokens(RATIOS, RATIO_MASK, 1.5, 0.5)
    with pytest.raises(ValueError, match="mode='token'"):
        importance_weights(RATIOS, RATIO_MASK, "token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_min=2"):
        importance_weights(RATIOS, RATIO_MASK, clip_min=2, clip_max=1)


def test_statistics_of_huge_ratios_do_not_overflow() -> None:
    found = mismatch_statistics(torch.tensor([[200.0, -300.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert {name for name, value in found.items() if not bool(torch.as_tensor(value).isfinite().all())} == set()
