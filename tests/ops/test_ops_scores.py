"""Importance and redundancy against plain loops over one unpadded row, as the published batch-1 algorithms run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import no_kernels
from torch import Tensor

from sparse_rl_lightning.ops import key_redundancy, window_importance
from sparse_rl_lightning.ops.window_importance import pool_entries

Rows = list[list[float]]


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def pooled(values: list[float], pooling: str, kernel: int) -> list[float]:
    half = kernel // 2
    near = [values[max(0, n - half) : n + half + 1] for n in range(len(values))]
    return {"max": [max(v) for v in near], "avg": [sum(v) / kernel for v in near], "none": values}[pooling]


def importance_of_row(
    query_heads: list[Rows], query_positions: list[int], keys: Rows, positions: list[int], scale: float, window: int,
    exclude_window: bool, group_reduction: str, query_reduction: str, pooling: str, kernel: int,
) -> list[float]:  # fmt: skip
    """One KV head of one sequence, live entries only; ``query_heads`` is its group, absent queries left out."""
    before = max(0, len(keys) - window)
    columns = range(before) if exclude_window else range(len(keys))
    logits = [[[scale * dot(q, keys[n]) for n in columns] for q in head] for head in query_heads]
    if group_reduction == "max":
        highest = [[max(h[a][n] for h in logits) for n in columns] for a in range(len(query_positions))]
        logits = [highest]
    per_head = []
    for head in logits:
        total = [0.0] * before
        for a, row in enumerate(head):
            exps = [math.exp(x) if positions[n] <= query_positions[a] else 0.0 for n, x in enumerate(row)]
            for n in range(before):
                total[n] += exps[n] / (sum(exps) or 1.0)
        count = max(1, len(query_positions)) if query_reduction == "mean" else 1
        per_head.append(pooled([t / count for t in total], pooling, kernel))
    mean = [sum(head[n] for head in per_head) / len(per_head) for n in range(before)]
    return mean + [0.0] * (len(keys) - before)


def redundancy_of_row(keys: Rows, threshold: float) -> list[float]:
    """R-KV's matrix of cosines, its last similar entries zeroed, averaged over the rows."""
    n = len(keys)
    unit = [[x / (math.sqrt(dot(k, k)) + 1e-8) for x in k] for k in keys]
    cosines = [[0.0 if i == j else dot(unit[i], unit[j]) for j in range(n)] for i in range(n)]
    for row in cosines:
        last = max([j for j in range(n) if row[j] > threshold], default=0)
        row[last] = 0.0
    return [sum(row[j] for row in cosines) / n for j in range(n)]


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

    def alone(self, one: slice) -> Cache:
        """Some slots without the first KV head of two."""
        return Cache(self.queries[one, self.queries.shape[1] // 2 :], self.query_positions[one], self.keys[one, 1:],
                     self.valid[one, 1:], self.positions[one, 1:])  # fmt: skip

    def expected_importance(self, s: int, h: int, **options: Any) -> list[float]:
        live, present = self.valid[s, h], self.query_positions[s] >= 0
        group = self.queries[s].unflatten(0, (self.keys.shape[1], -1))[h, :, present]
        return importance_of_row(
            group.tolist(), self.query_positions[s, present].tolist(), self.keys[s, h, live].tolist(),
            self.positions[s, h, live].tolist(), SCALE, **options,
        )  # fmt: skip

    def expected_redundancy(self, s: int, h: int, threshold: float = 0.5) -> list[float]:
        return redundancy_of_row(self.keys[s, h, self.valid[s, h]].tolist(), threshold)


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
            row = torch.tensor(expected(s, h), dtype=torch.float64)
            torch.testing.assert_close(result[s, h, valid[s, h]].double(), row, rtol=0, atol=atol)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 3, 8]), st.integers(1, 4), st.integers(1, 17)
    ),
    options=st.fixed_dictionaries(
        {
            "window": st.integers(1, 4),
            "exclude_window": st.booleans(),
            "group_reduction": st.sampled_from(["max", "mean"]),
            "query_reduction": st.sampled_from(["mean", "sum"]),
            "pooling": st.sampled_from(["max", "avg", "none"]),
        }
    ),
    kernel=st.sampled_from([1, 3, 5, 7]),
    kind=st.sampled_from(["random", "equal", "zeros"]),
)
def test_importance_equals_loops(
    seed: int, shape: tuple[int, ...], options: dict[str, Any], kernel: int, kind: str
) -> None:
    slots, heads, group, num_queries, entries = shape
    cache = make_cache(seed, slots=slots, heads=heads, group=group, num_queries=num_queries, entries=entries, kind=kind)
    result = cache.importance(**options, kernel_size=kernel)
    assert result.dtype == torch.float64
    assert_rows(result, cache.valid, lambda s, h: cache.expected_importance(s, h, **options, kernel=kernel), 1e-13)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    entries=st.integers(1, 30),
    threshold=st.sampled_from([0.5, 0.5, 0.9, 0.0, -0.3, 1.0]),
    kind=st.sampled_from(["random", "clustered", "zeros"]),
    block_size=st.sampled_from([1, 4, 7, 128]),
)
def test_redundancy_equals_loops(seed: int, entries: int, threshold: float, kind: str, block_size: int) -> None:
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
    exact = {**PAPER, "pooling": "max", "kernel": 7}
    assert_rows(importance, cache.valid, lambda s, h: cache.expected_importance(s, h, **exact), 1e-6)
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


def test_no_queries_and_nothing_outside_the_window_give_zeros() -> None:
    cache = make_cache(0)
    cache.query_positions.fill_(-1)
    assert bool((cache.importance(**PAPER) == 0).all())
    cache = make_cache(0)
    assert bool((cache.importance(**{**PAPER, "window": 12}) == 0).all())


def test_results_do_not_depend_on_other_rows_or_on_the_size_of_the_slot() -> None:
    cache = make_cache(3, slots=3, heads=2, entries=14, kind="clustered")
    longer = torch.nn.functional.pad(cache.keys, (0, 0, 0, 6), value=torch.inf)
    valid = torch.nn.functional.pad(cache.valid, (0, 6), value=False)
    positions = torch.nn.functional.pad(cache.positions, (0, 6), value=2)
    wide = Cache(cache.queries, cache.query_positions, longer, valid, positions)
    for pooling in ("max", "avg"):
        whole = cache.importance(**PAPER, pooling=pooling)
        close(wide.importance(**PAPER, pooling=pooling)[..., :14], whole)
        for s in range(3):
            one = slice(s, s + 1)
            close(cache.alone(one).importance(**PAPER, pooling=pooling), whole[one, 1:])
    whole = cache.redundancy(block_size=4)
    close(wide.redundancy(block_size=5)[..., :14], whole)
    for s in range(3):
        close(cache.alone(slice(s, s + 1)).redundancy(), whole[s : s + 1, 1:])


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_pooling_sees_only_what_is_inside() -> None:
    values = torch.tensor([[-3.0, -1.5, -6.0, torch.nan], [6.0, 9.0, torch.inf, torch.nan]])
    inside = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert pool_entries(values, inside, "max", 3).tolist() == [[-1.5, -1.5, -1.5, 0], [9, 9, 0, 0]]
    assert pool_entries(values, inside, "avg", 3).tolist() == [[-1.5, -3.5, -2.5, 0], [5, 5, 0, 0]]
    assert pool_entries(values, inside, "none", 3).tolist() == [[-3, -1.5, -6, 0], [6, 9, 0, 0]]


@pytest.mark.parametrize(
    "wrong", [{"pooling": "mean"}, {"group_reduction": "sum"}, {"query_reduction": "max"}, {"kernel_size": 4}]
)
def test_unknown_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_cache(0).importance(**{**PAPER, **wrong})
