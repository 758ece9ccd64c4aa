"""LogSketch: the promised error against numpy's quantiles, exact merging, and its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.metrics.sketch import LogSketch


def count(sketch: LogSketch, numbers: Tensor) -> Tensor:
    return torch.bincount(sketch.bucket(numbers), minlength=sketch.num_buckets)


def exact(numbers: Tensor, share: float) -> float:
    return float(np.percentile(numbers.numpy(), 100 * (1 - share)))


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.floats(0, 1), st.floats(0, 1e-5), st.sampled_from([0.0, 1e-7, 0.1, 0.5, 1.0])), min_size=1),
    st.floats(0, 1),
    st.sampled_from([0.002, 0.005, 0.05, 0.3]),
)
def test_quantiles_are_within_the_promised_error(numbers: list[float], share: float, accuracy: float) -> None:
    sketch, values = LogSketch(accuracy), torch.tensor(numbers, dtype=torch.float64)
    got, want = float(sketch.from_the_top(count(sketch, values), share)), exact(values, share)
    assert abs(got - want) <= accuracy * want * (1 + 1e-9) + sketch.smallest


def test_the_error_comes_close_to_the_promise_and_no_closer_buckets_are_needed() -> None:
    sketch = LogSketch(0.05)
    values = torch.logspace(-6.9, 0, 20001, dtype=torch.float64)
    off = (sketch.numbers()[sketch.bucket(values)] - values).abs() / values
    assert 0.0499 < float(off.max()) <= 0.05 * (1 + 1e-9)
    assert sketch.num_buckets == math.ceil(math.log(1e7) / math.log(1.05 / 0.95)) + 1


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 60), min_size=2, max_size=4))
def test_counts_add_up_to_the_sketch_of_all_numbers(seed: int, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.rand(size, generator=generator, dtype=torch.float64) ** 4 for size in sizes]
    sketch = LogSketch()
    merged = sum(count(sketch, part) for part in parts)
    assert torch.equal(merged, count(sketch, torch.cat(parts)))
    if sum(sizes):
        want = exact(torch.cat(parts), 0.05)
        assert abs(float(sketch.from_the_top(merged, 0.05)) - want) <= 0.005 * want + 1e-7


def test_rows_are_independent_and_an_empty_one_is_nan() -> None:
    sketch = LogSketch()
    rows = [torch.tensor([0.5]), torch.tensor([]), torch.tensor([0.0, 0.0, 1.0])]
    found = sketch.from_the_top(torch.stack([count(sketch, row) for row in rows]), 0.25)
    assert float(found[0]) == pytest.approx(0.5, rel=0.005)
    assert math.isnan(float(found[1]))
    assert float(found[2]) == pytest.approx(0.5, rel=0.005)  # halfway between 1 and 0


def test_numbers_outside_go_to_the_nearest_bucket() -> None:
    sketch = LogSketch()
    assert sketch.bucket(torch.tensor([1 + 1e-6, 1.0, -1e-9, 0.0])).tolist() == [0, 0, *[sketch.num_buckets - 1] * 2]


@pytest.mark.parametrize("options", [{"accuracy": 0.0}, {"accuracy": 1.0}, {"smallest": 0.0}])
def test_wrong_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must lie between 0 and 1"):
        LogSketch(**options)
