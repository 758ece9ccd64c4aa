"""window_importance, key_redundancy and score_entries: kernel = reference = the published algorithms in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import dtypes_for, exclude_keys, head_rows, make_pools, on_each_device, pick_slots, shape_for, shapes
from test_native_attention import both
from torch import Tensor

from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.keyed_random import hash_uniform
from sparse_rl_lightning.ops.window_importance import ring_positions

OPTIONS = ("window", "exclude_window", "group_reduction", "query_reduction", "pooling", "kernel_size")
options = st.fixed_dictionaries(
    {
        "window": st.integers(0, 5),
        "exclude_window": st.booleans(),
        "group_reduction": st.sampled_from(["max", "mean"]),
        "query_reduction": st.sampled_from(["mean", "sum"]),
        "pooling": st.sampled_from(["max", "avg", "none"]),
        "kernel_size": st.sampled_from([1, 3, 7]),
    }
)


IMPORTANCE, REDUNDANCY, SCORES = 15, 7, 15  # places of the results among the arguments


@on_each_device
@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6), shape=shapes, group=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 17]),
    num_queries=st.integers(0, 9), choice=options, infinite=st.booleans(),
)  # fmt: skip
def test_window_importance(
    device: str, seed: int, shape: dict, group: int, num_queries: int, choice: dict[str, Any], infinite: bool
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape)
    if infinite:
        exclude_keys(g, pools)
    layers, slots, heads = pools.lengths.shape
    queries = torch.randn(layers, slots, heads * group, num_queries, shape["dim"], generator=g).to(shape["dtype"])
    queries[..., 0] = queries[..., 0].abs() + 0.1
    seen = torch.randint(0, 2 * shape["capacity"], (slots,), generator=g)
    given_at = torch.randint(-1, 2 * shape["capacity"], (slots, num_queries), generator=g) if seed % 3 else None
    at = ring_positions(seen, num_queries) if given_at is None else given_at
    queries.masked_fill_((at < 0)[None, :, None, :, None], torch.nan)
    width, chosen = int(pools.lengths.max()) + seed % 3, pick_slots(g, slots)
    args = [queries, pools.keys, pools.positions, chosen, seen, pools.offsets, pools.lengths, 0.4,
            *(choice[name] for name in OPTIONS), given_at, torch.full((layers, slots, heads, width), 7.0),
            torch.full((1 + seed % 5, num_queries + 1, width), torch.nan)]  # fmt: skip
    native, reference = both("window_importance", args, device)
    expected = torch.zeros(layers, slots, heads, width, dtype=torch.float64)
    for layer, (row, slot), h in every_head(pools, chosen):
        present = at[slot] >= 0
        expected[layer, row, h, : pools.lengths[layer, slot, h]] = importance_of(
            queries[layer, slot].unflatten(0, (heads, group))[h][:, present].double(), at[slot][present],
            pools.keys[head_rows(pools, layer, slot, h)].double(),
            pools.positions[head_rows(pools, layer, slot, h)], 0.4, **choice,
        )  # fmt: skip
    for result in (native, reference):
        torch.testing.assert_close(result[IMPORTANCE].double(), expected, atol=5e-6, rtol=5e-5)


def every_head(pools: KVPools, chosen: Tensor) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Layer, row and slot, and head of all that is scored."""
    layers, _, heads = pools.lengths.shape
    used = [(row, slot) for row, slot in enumerate(chosen.tolist()) if slot >= 0]
    return itertools.product(range(layers), used, range(heads))


@on_each_device
@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize(("num_queries", "group"), [(8, 7), (20, 2)])
def test_window_importance_of_long_rows(device: str, num_queries: int, group: int, reduction: str) -> None:
    for dtype in dtypes_for(device):
        g = torch.Generator().manual_seed(4)
        pools = make_pools(g, layers=1, slots=2, heads=1, dim=40, capacity=600, dtype=dtype, kind="random")
        queries = torch.randn(1, 2, group, num_queries, 40, generator=g).to(dtype)
        at = torch.randint(-1, 1200, (2, num_queries), generator=g)
        args = [queries, pools.keys, pools.positions, torch.arange(2), torch.zeros(2).long(), pools.offsets,
                pools.lengths, 0.4, 9, False, reduction, "mean", "max", 7, at, torch.empty(1, 2, 1, 600),
                torch.empty(1, num_queries + 1, 600)]  # fmt: skip
        native, reference = both("window_importance", args, device)
        torch.testing.assert_close(native[IMPORTANCE], reference[IMPORTANCE], atol=1e-6, rtol=2e-5)


def importance_of(
    queries: Tensor, at: Tensor, keys: Tensor, positions: Tensor, scale: float, *, window: int, exclude_window: bool,
    group_reduction: str, query_reduction: str, pooling: str, kernel_size: int,
) -> Tensor:  # fmt: skip
    """One head in float64: queries (G, A, D), keys (N, D)."""
    before = max(0, len(keys) - window)
    seen = before if exclude_window else len(keys)
    logits = scale * queries @ keys[:seen].T
    if group_reduction == "max":
        logits = logits.amax(0, keepdim=True)
    hidden = positions[:seen] > at[:, None]
    shares = logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0).masked_fill(hidden, 0.0)
    paid = shares.sum(1)[:, :before] / (max(len(at), 1) if query_reduction == "mean" else 1)
    if pooling == "max" and before:
        paid = F.max_pool1d(paid, kernel_size, 1, kernel_size // 2)
    if pooling == "avg" and before:
        paid = F.avg_pool1d(paid, kernel_size, 1, kernel_size // 2)
    return F.pad(paid.mean(0), (0, len(keys) - before))


def published_redundancy(keys: Tensor, threshold: float) -> Tensor:
    """R-KV's cal_similarity for one head (N, D), before its softmax, in float64."""
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    cosines = unit @ unit.T
    cosines.fill_diagonal_(0.0)
    similar = cosines > threshold
    index = torch.where(similar, torch.arange(len(keys)), 0).amax(-1)
    cosines.scatter_(-1, index[:, None], 0.0)
    return cosines.mean(0)


@on_each_device
@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6), shape=shapes, wide=st.booleans(),
    threshold=st.sampled_from([0.5, 0.5, 0.8, 0.3, -0.2]), mix=st.sampled_from([None, 0.0, 0.1, 1.0]),
)  # fmt: skip
def test_key_redundancy(device: str, seed: int, shape: dict, wide: bool, threshold: float, mix: float | None) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **{**shape, "capacity": 3 * shape["capacity"] if wide else shape["capacity"]})
    check_redundancy(device, pools, threshold, g, mix)


@on_each_device
@pytest.mark.parametrize("kind", ["random", "clustered", "equal", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_redundancy_of_long_rows(device: str, kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    pools = make_pools(g, layers=1, slots=2, heads=1, dim=128, capacity=700, dtype=dtype, kind=kind, full=True)
    check_redundancy(device, pools, 0.5, g, None)


def check_redundancy(device: str, pools: KVPools, threshold: float, g: torch.Generator, mix: float | None) -> None:
    (layers, slots, heads), width = pools.lengths.shape, int(pools.lengths.max())
    shape, chosen = (layers, slots, heads, width), pick_slots(g, slots)
    importance = None if mix is None else torch.rand(shape, generator=g)
    args = [pools.keys, chosen, pools.offsets, pools.lengths, threshold, importance, mix or 0.0,
            torch.full(shape, 7.0), torch.full((1, 3, width), torch.nan)]  # fmt: skip
    native, reference = (result[REDUNDANCY] for result in both("key_redundancy", args, device))
    args[-1] = torch.full((layers * len(chosen) * heads, 3, width), torch.nan)  # all heads at a time
    assert torch.equal(both("key_redundancy", args, device)[0][REDUNDANCY], native)
    assert (native[:, chosen < 0] == 0).all()
    assert (reference[:, chosen < 0] == 0).all()
    for layer, (row, slot), h in every_head(pools, chosen):
        keys = pools.keys[head_rows(pools, layer, slot, h)].double()
        for result in (native, reference):
            assert (result[layer, row, h, len(keys) :] == 0).all()
        cosines = F.normalize(keys, dim=-1) @ F.normalize(keys, dim=-1).T
        if not len(keys) or ((cosines - threshold).abs() < 1e-6).any():
            continue  # float32 may see a pair on the other side of the threshold
        exact = published_redundancy(keys, threshold)
        if importance is not None and mix is not None:
            exact = mix * importance[layer, row, h, : len(keys)].double() - (1 - mix) * exact.softmax(dim=0)
        for result in (native, reference):
            torch.testing.assert_close(result[layer, row, h, : len(keys)].double(), exact, atol=1e-6, rtol=0)


@on_each_device
def test_a_cosine_at_the_threshold_is_not_similar(device: str) -> None:
    keys = torch.zeros(5, 8)
    keys[0, :4], keys[1:, :4] = 1.0, torch.eye(4)  # the first with each of the others: exactly one half
    args = [keys, torch.tensor([0]), torch.zeros(1, 1, 1).long(), torch.tensor([[[5]]], dtype=torch.int32), 0.5, None,
            0.0, torch.zeros(1, 1, 1, 5), torch.zeros(1, 3, 5)]  # fmt: skip
    for result in both("key_redundancy", args, device):
        exact = published_redundancy(keys.double(), 0.5)
        torch.testing.assert_close(result[REDUNDANCY].flatten().double(), exact)


@on_each_device
@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6), shape=shapes, by_age=st.booleans(), by_value=st.booleans(),
    method=st.sampled_from(["position", "random", "key_norm", "key_difference", "mass", "shared"]),
)  # fmt: skip
def test_score_entries(device: str, seed: int, shape: dict, by_age: bool, by_value: bool, method: str) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape)
    (layers, slots, heads), width = pools.lengths.shape, int(pools.lengths.max()) + seed % 3
    keys = [torch.randint(-(2**62), 2**62, (slots,), generator=g) for _ in range(2)]
    state = torch.rand(len(pools.keys), 2, generator=g)
    seen = torch.full((slots,), 2 * shape["capacity"])
    given_scores = torch.randn(layers, slots, heads, width, generator=g) if method == "shared" else None
    chosen, prompts = pick_slots(g, slots), torch.randint(0, shape["capacity"] + 1, (slots,), generator=g)
    args = [pools.keys, pools.values, pools.positions, state, chosen, seen, pools.offsets, pools.lengths, prompts,
            *keys, method, by_age, by_value, given_scores, torch.full((layers, slots, heads, width), 7.0)]  # fmt: skip
    native, reference = (result[SCORES] for result in both("score_entries", args, device))
    expected = torch.zeros(layers, slots, heads, width, dtype=torch.float64)
    for layer, (row, slot), h in every_head(pools, chosen):
        rows = head_rows(pools, layer, slot, h)
        key, value, at = pools.keys[rows].double(), pools.values[rows].double(), pools.positions[rows]
        if method == "key_difference":
            unit = F.normalize(key, dim=-1)
            score = -unit @ F.normalize(unit.sum(dim=0), dim=-1)
        elif method == "mass":
            score = state[rows, 0].double() / ((int(seen[slot]) - at) if by_age else 1)
            score = score * value.norm(dim=-1) if by_value else score
        elif method == "shared":
            score = torch.tensor([shared_score(pools, given_scores, layer, row, slot, int(p)) for p in at])
        elif method == "random":
            own = torch.where(at < prompts[slot], keys[0][slot], keys[1][slot])
            score = hash_uniform(own, layer, h, at.long())
        else:
            score = at if method == "position" else -key.norm(dim=-1)
        expected[layer, row, h, : len(at)] = score
    exact = method in ("position", "random")
    for result in (native, reference):
        torch.testing.assert_close(result.double(), expected, atol=0 if exact else 2e-6, rtol=0 if exact else 2e-6)


def shared_score(pools: KVPools, scores: Tensor | None, layer: int, row: int, slot: int, position: int) -> float:
    """The mean score of a token over the heads that have it."""
    found = []
    for h in range(pools.lengths.shape[2]):
        (where,) = (pools.positions[head_rows(pools, layer, slot, h)] == position).nonzero(as_tuple=True)
        found += [scores[layer, row, h, j].double() for j in where]
    return float(torch.stack(found).mean())
