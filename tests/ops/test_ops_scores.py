"""Importance and redundancy of tensors: the published numbers of each unpadded row, in any slot, and by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import no_kernels
from test_native_scores import importance_of, options, published_redundancy
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sparse_rl_lightning.ops import key_redundancy, window_importance
from sparse_rl_lightning.ops.window_importance import pool_entries


@dataclass
class Cache:
    """A ragged cache whose free memory and absent queries hold NaN."""

    queries: Tensor
    query_positions: Tensor
    keys: Tensor
    valid: Tensor
    positions: Tensor

    def importance(self, **options: Any) -> Tensor:
        with no_kernels():
            return window_importance(
                self.queries, self.query_positions, self.keys, self.valid.sum(-1), self.positions, SCALE, **options
            )

    def redundancy(self, threshold: float = 0.5, block_size: int = 128) -> Tensor:
        with no_kernels(block_size):
            return key_redundancy(self.keys, self.valid.sum(-1), threshold)

    def expected_importance(self, s: int, h: int, **options: Any) -> Tensor:
        live, present = self.valid[s, h], self.query_positions[s] >= 0
        queries = self.queries[s].unflatten(0, (self.keys.shape[1], -1))[h, :, present]
        return importance_of(
            queries.double(), self.query_positions[s, present], self.keys[s, h, live].double(),
            self.positions[s, h, live], SCALE, **{"pooling": "max", "kernel_size": 7, **options},
        )  # fmt: skip

    def expected_redundancy(self, s: int, h: int, threshold: float = 0.5) -> Tensor:
        return published_redundancy(self.keys[s, h, self.valid[s, h]].double(), threshold)


SCALE = 0.37
PAPER = {"window": 3, "exclude_window": True, "group_reduction": "max", "query_reduction": "mean"}


def make_cache(
    seed: int, *, slots: int = 2, heads: int = 2, group: int = 2, num_queries: int = 3, entries: int = 12,
    dim: int = 4, dtype: torch.dtype = torch.float64, kind: str = "random",
) -> Cache:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(slots, heads, entries, dim, generator=g, dtype=torch.float64)
    if kind == "clustered":
        centers = torch.randn(3, dim, generator=g, dtype=torch.float64)
        keys = centers[torch.randint(3, (slots, heads, entries), generator=g)] + 0.05 * keys
    elif kind == "equal":
        keys = keys[:, :, :1].expand_as(keys).clone()
    elif kind == "zeros":
        keys[torch.rand(slots, heads, entries, generator=g) < 0.4] = 0.0
    valid = torch.zeros(slots, heads, entries, dtype=torch.bool)
    positions = torch.full((slots, heads, entries), -(2**31))
    query_positions = torch.full((slots, num_queries), -1)
    for s in range(slots):
        seen = int(torch.randint(1, 2 * entries, (1,), generator=g))
        present = min(seen, num_queries)
        places = torch.randperm(num_queries, generator=g)[:present]
        query_positions[s, places] = torch.arange(seen - present, seen)
        for h in range(heads):
            live = min(seen, int(torch.randint(1, entries + 1, (1,), generator=g)))
            recent = torch.arange(seen - min(live, num_queries), seen)  # the window is never evicted
            older = torch.randperm(seen - len(recent), generator=g)[: live - len(recent)]
            valid[s, h, :live] = True
            positions[s, h, :live] = torch.cat([older, recent]).sort().values
    queries = torch.randn(slots, heads * group, num_queries, dim, generator=g, dtype=torch.float64)
    queries.masked_fill_((query_positions < 0)[:, None, :, None], torch.nan)
    keys.masked_fill_(~valid.unsqueeze(-1), torch.nan)
    return Cache((3 * queries).to(dtype), query_positions, keys.to(dtype), valid, positions)


def assert_rows(result: Tensor, valid: Tensor, expected: Any, atol: float) -> None:
    assert bool((result[~valid] == 0).all())
    for s in range(valid.shape[0]):
        for h in range(valid.shape[1]):
            torch.testing.assert_close(result[s, h, valid[s, h]].double(), expected(s, h), rtol=0, atol=atol)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), slots=st.integers(1, 3), heads=st.integers(1, 2), group=st.sampled_from([1, 2, 3, 8]),
    num_queries=st.integers(1, 4), entries=st.integers(1, 17), choice=options,
    kind=st.sampled_from(["random", "equal", "zeros"]),
)  # fmt: skip
def test_importance_in_float64_is_the_published_one(seed: int, choice: dict[str, Any], **shape: Any) -> None:
    cache = make_cache(seed, **shape)
    result = cache.importance(**choice)
    assert result.dtype == torch.float64
    assert_rows(result, cache.valid, lambda s, h: cache.expected_importance(s, h, **choice), 1e-13)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), entries=st.integers(1, 30), threshold=st.sampled_from([0.5, 0.9, 0.0, -0.3, 1.0]),
    kind=st.sampled_from(["random", "clustered", "equal", "zeros"]), block_size=st.sampled_from([1, 4, 7, 128]),
)  # fmt: skip
def test_redundancy_in_float64_is_the_published_one(
    seed: int, entries: int, threshold: float, kind: str, block_size: int
) -> None:
    cache = make_cache(seed, entries=entries, kind=kind, dim=3)
    result = cache.redundancy(threshold, block_size)
    assert result.dtype == torch.float64
    assert_rows(result, cache.valid, lambda s, h: cache.expected_redundancy(s, h, threshold), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "clustered", "zeros"])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_arithmetic_whatever_the_input(dtype: torch.dtype, kind: str, autocast: bool) -> None:
    cache = make_cache(5, slots=3, entries=40, dim=8, kind=kind, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        importance = cache.importance(**PAPER)
        redundancy = cache.redundancy()
    assert importance.dtype == redundancy.dtype == torch.float32
    assert_rows(importance, cache.valid, lambda s, h: cache.expected_importance(s, h, **PAPER), 1e-6)
    assert_rows(redundancy, cache.valid, cache.expected_redundancy, 1e-6)


def test_importance_worked_by_hand() -> None:
    # One query head, scale 1, keys log 1, log 2, log 5, log 4 and log 8, the last two in the window. The query at
    # position 9 sees all; the one at position 8 does not see the last key.
    keys = torch.tensor([1.0, 2.0, 5.0, 4.0, 8.0]).log().view(1, 1, 5, 1)
    queries, at = torch.ones(1, 1, 2, 1), torch.tensor([[9, 8]])
    positions, lengths = torch.tensor([[[0, 3, 4, 8, 9]]]), torch.tensor([[5]])

    def score(**options: Any) -> list[float]:
        return window_importance(queries, at, keys, lengths, positions, 1.0, window=2, **options).flatten().tolist()

    outside = [1 / 8, 2 / 8, 5 / 8]
    assert score(pooling="none") == pytest.approx([*outside, 0, 0])
    assert score(kernel_size=3) == pytest.approx([2 / 8, 5 / 8, 5 / 8, 0, 0])
    assert score(kernel_size=3, pooling="avg") == pytest.approx([3 / 24, 8 / 24, 7 / 24, 0, 0])
    causal = [1 / 20 + 1 / 12, 2 / 20 + 2 / 12, 5 / 20 + 5 / 12, 0, 0]
    assert score(pooling="none", exclude_window=False, query_reduction="sum") == pytest.approx(causal)
    assert score(pooling="none", exclude_window=False) == pytest.approx([c / 2 for c in causal])


def test_group_reductions_worked_by_hand() -> None:
    # Two query heads see logits (0, log 3) and (log 2, 0): their maximum is (log 2, log 3).
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [7.0, 7.0]]).view(1, 1, 3, 2)
    queries = torch.tensor([[0.0, math.log(3)], [math.log(2), 0.0]]).view(1, 2, 1, 2)
    rest = (torch.tensor([[2]]), keys, torch.tensor([[3]]), torch.arange(3).view(1, 1, 3), 1.0)

    def score(**options: Any) -> list[float]:
        return window_importance(queries, *rest, window=1, **options).flatten().tolist()

    assert score(pooling="none", group_reduction="max") == pytest.approx([2 / 5, 3 / 5, 0])
    mean = [(1 / 4 + 2 / 3) / 2, (3 / 4 + 1 / 3) / 2, 0]
    assert score(pooling="none", group_reduction="mean") == pytest.approx(mean)
    mean_of_pooled = [(3 / 4 + 2 / 3) / 2] * 2 + [0]
    assert score(kernel_size=3, group_reduction="mean") == pytest.approx(mean_of_pooled)


def test_pooling_sees_only_what_is_inside() -> None:
    values = torch.tensor([[-3.0, -1.5, -6.0, torch.nan], [6.0, 9.0, torch.inf, torch.nan]])
    inside = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert pool_entries(values, inside, "max", 3).tolist() == [[-1.5, -1.5, -1.5, 0], [9, 9, 0, 0]]
    assert pool_entries(values, inside, "avg", 3).tolist() == [[-1.5, -3.5, -2.5, 0], [5, 5, 0, 0]]
    assert pool_entries(values, inside, "none", 3).tolist() == [[-3, -1.5, -6, 0], [6, 9, 0, 0]]


def test_redundancy_worked_by_hand() -> None:
    # Cosines of e1, e1, e2, e1, e2, diagonal zeroed. The last similar columns are 3, 3, 4, 1, 2: what remains is
    #   row 0: column 1;  row 1: column 0;  row 3: column 0.
    e1, e2 = [2.0, 0.0], [0.0, 0.5]
    keys = torch.tensor([e1, e1, e2, e1, e2]).view(1, 1, 5, 2)
    assert key_redundancy(keys, torch.tensor([[5]])).flatten().tolist() == pytest.approx([2 / 5, 1 / 5, 0, 0, 0])
    # Nothing is above 0.9 among keys 45 degrees apart: each row spares column 0 and the other cosines stay.
    half = math.sqrt(0.5)
    keys = torch.tensor([[1.0, 0.0], [half, half], [0.0, 1.0]]).view(1, 1, 3, 2)
    rows = key_redundancy(keys, torch.tensor([[3]]), threshold=0.9).flatten().tolist()
    assert rows == pytest.approx([0, 2 * half / 3, half / 3], abs=1e-7)


@pytest.mark.parametrize(("last_key", "num_blocks"), [([1.0, 0.0], 1), ([0.0, 1.0], 8)])
def test_redundancy_search_stops_when_every_row_has_found(last_key: list[float], num_blocks: int) -> None:
    # 60 keys in a slot of 64, in blocks of 8; alike but for the last one, which finds none like it in the second case.
    keys = torch.tensor([[1.0, 0.0]]).repeat(64, 1)
    keys[59] = torch.tensor(last_key)
    with no_kernels(block_size=8), FlopCounterMode(display=False) as counter:
        key_redundancy(keys.view(1, 1, 64, 2), torch.tensor([[60]]))
    assert counter.get_total_flops() == num_blocks * 2 * 64 * 8 * 2
