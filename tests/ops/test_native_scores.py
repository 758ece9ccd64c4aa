"""window_importance and key_redundancy: kernel = reference = the published algorithms in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import (
    dense_heads_of,
    dtypes_for,
    exclude_keys,
    head_rows,
    make_pools,
    on_each_device,
    shape_for,
    shapes,
)
from test_native_attention import both
from torch import Tensor

from sparse_rl_lightning.ops import KVPools

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


@on_each_device
@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6), shape=shapes, group=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    num_queries=st.integers(0, 9), choice=options, infinite=st.booleans(),
)  # fmt: skip
def test_window_importance(
    device: str, seed: int, shape: dict, group: int, num_queries: int, choice: dict[str, Any], infinite: bool
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape).layer(0)
    if infinite:
        exclude_keys(g, pools)
    slots, heads = pools.lengths.shape
    queries = torch.randn(slots, heads * group, num_queries, shape["dim"], generator=g).to(shape["dtype"])
    queries[..., 0] = queries[..., 0].abs() + 0.1
    at = torch.randint(-1, 2 * shape["capacity"], (slots, num_queries), generator=g)
    queries.masked_fill_((at < 0)[:, None, :, None], torch.nan)
    width = int(pools.lengths.max()) + seed % 3
    scores = torch.full((slots, heads, width), 7.0)
    scratch = torch.full((slots, heads, num_queries + 1, width), torch.nan)
    keys, positions, lengths = dense_heads_of(pools, width, strided=bool(seed % 2))
    args = [queries, at, keys, positions, lengths, 0.4, *(choice[name] for name in OPTIONS), scores, scratch]
    native, reference = both("window_importance", args, device)
    expected = torch.zeros(slots, heads, width, dtype=torch.float64)
    for slot in range(slots):
        for h in range(heads):
            rows = head_rows(pools, slot, h)
            present = at[slot] >= 0
            expected[slot, h, : pools.lengths[slot, h]] = importance_of(
                queries[slot].unflatten(0, (heads, group))[h][:, present].double(), at[slot][present],
                pools.keys[rows].double(), pools.positions[rows], 0.4, **choice,
            )  # fmt: skip
    for result in (native, reference):
        torch.testing.assert_close(result[12].double(), expected, atol=5e-6, rtol=5e-5)


@on_each_device
@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize(("num_queries", "group"), [(8, 7), (20, 2)])
def test_window_importance_of_long_rows(device: str, num_queries: int, group: int, reduction: str) -> None:
    for dtype in dtypes_for(device):
        g = torch.Generator().manual_seed(4)
        pools = make_pools(g, layers=1, slots=2, heads=1, dim=40, capacity=600, dtype=dtype, kind="random").layer(0)
        queries = torch.randn(2, group, num_queries, 40, generator=g).to(dtype)
        at = torch.randint(-1, 1200, (2, num_queries), generator=g)
        args = [queries, at, *dense_heads_of(pools, 600), 0.4, 9, False, reduction, "mean", "max", 7,
                torch.empty(2, 1, 600), torch.empty(2, 1, num_queries + 1, 600)]  # fmt: skip
        native, reference = both("window_importance", args, device)
        torch.testing.assert_close(native[12], reference[12], atol=1e-6, rtol=2e-5)


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
    seed=st.integers(0, 10**6), shape=shapes, wide=st.booleans(), threshold=st.sampled_from([0.5, 0.5, 0.8, 0.3, -0.2])
)
def test_key_redundancy(device: str, seed: int, shape: dict, wide: bool, threshold: float) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **{**shape, "capacity": 3 * shape["capacity"] if wide else shape["capacity"]}).layer(0)
    check_redundancy(device, pools, threshold, strided=wide)


@on_each_device
@pytest.mark.parametrize("kind", ["random", "clustered", "equal", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_redundancy_of_long_rows(device: str, kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    pools = make_pools(g, layers=1, slots=2, heads=1, dim=128, capacity=700, dtype=dtype, kind=kind, full=True).layer(0)
    check_redundancy(device, pools, 0.5)


def check_redundancy(device: str, pools: KVPools, threshold: float, strided: bool = False) -> None:
    (slots, heads), width = pools.lengths.shape, int(pools.lengths.max())
    keys, _, lengths = dense_heads_of(pools, width, strided=strided)
    args = [keys, lengths, threshold, torch.full((slots, heads, width), 7.0),
            torch.full((slots, heads, 2, width), torch.nan)]  # fmt: skip
    native, reference = both("key_redundancy", args, device)
    for slot in range(slots):
        for h in range(heads):
            length = int(pools.lengths[slot, h])
            if length:
                keys = pools.keys[head_rows(pools, slot, h)].double()
                cosines = F.normalize(keys, dim=-1) @ F.normalize(keys, dim=-1).T
                if ((cosines - threshold).abs() < 1e-6).any():
                    continue  # float32 may see a pair on the other side of the threshold
                exact = published_redundancy(keys, threshold)
                torch.testing.assert_close(native[3][slot, h, :length].double(), exact, atol=1e-6, rtol=0)
                torch.testing.assert_close(reference[3][slot, h, :length].double(), exact, atol=1e-6, rtol=0)
            assert (native[3][slot, h, length:] == 0).all()
            assert (reference[3][slot, h, length:] == 0).all()


@on_each_device
def test_a_cosine_at_the_threshold_is_not_similar(device: str) -> None:
    keys = torch.zeros(5, 8)
    keys[0, :4], keys[1:, :4] = 1.0, torch.eye(4)  # the first with each of the others: exactly one half
    lengths = torch.tensor([[5]], dtype=torch.int32)
    args = [keys[None, None], lengths, 0.5, torch.zeros(1, 1, 5), torch.zeros(1, 1, 2, 5)]
    for result in both("key_redundancy", args, device):
        torch.testing.assert_close(result[3][0, 0].double(), published_redundancy(keys.double(), 0.5))
