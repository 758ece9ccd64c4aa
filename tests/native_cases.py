"""Random slots for the tests of the native ops: ragged, permuted in the pool, with rubbish in free memory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import KVPools

EMULATED = os.environ.get("SPARSE_RL_EMULATED") == "1"  # the CPU library holds the CUDA kernels: make cuda-emulate
without_kernels = pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled CPU kernels")
cpu_complaints = pytest.mark.skipif(EMULATED or not ops.HAS_NATIVE, reason="only CPU kernels look at the numbers")
on_each_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=without_kernels),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)

DTYPES = [torch.float32, torch.bfloat16]
shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 2),
        "slots": st.integers(1, 4),
        "heads": st.integers(1, 3),
        "dim": st.sampled_from([2, 8, 16, 24, 32, 64, 80]),
        "capacity": st.integers(1, 40),
        "dtype": st.sampled_from(DTYPES),
        "kind": st.sampled_from(["random", "random", "clustered", "equal", "zeros"]),
    }
)


def shape_for(device: str, shape: dict[str, Any]) -> dict[str, Any]:
    """What the CUDA kernels take: sizes of whole 16-byte words, and float16 too."""
    if device == "cpu" and not EMULATED:
        return shape
    half = shape["dtype"] == torch.bfloat16 and shape["capacity"] % 2 == 0
    return {**shape, "dim": -(-shape["dim"] // 8) * 8, "dtype": torch.float16 if half else shape["dtype"]}


def dtypes_for(device: str) -> list[torch.dtype]:
    """Types of the compiled kernels."""
    return DTYPES if device == "cpu" and not EMULATED else [*DTYPES, torch.float16]


def make_pools(
    g: torch.Generator, *, layers: int, slots: int, heads: int, dim: int, capacity: int, dtype: torch.dtype, kind: str,
    full: bool = False,
) -> KVPools:  # fmt: skip
    """Heads of different capacities, scattered over the pool; free memory holds NaN."""
    shape = (layers, slots, heads)
    count = layers * slots * heads
    capacities = torch.randint(1, capacity + 1, (count,), generator=g)
    starts = torch.empty(count, dtype=torch.int64)
    order = torch.randperm(count, generator=g)
    starts[order] = capacities[order].cumsum(0) - capacities[order] + 3  # three rows belong to nobody
    rows = int(capacities.sum()) + 5
    lengths = capacities.clone() if full else (torch.rand(count, generator=g) * (capacities + 1)).long()
    keys = make_keys(g, rows, dim, kind)
    values = torch.randn(rows, dim, generator=g)
    positions = torch.full((rows,), -(2**31), dtype=torch.int32)
    free = torch.ones(rows, dtype=torch.bool)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        free[start : start + length] = False
        positions[start : start + length] = torch.randperm(2 * capacity, generator=g)[:length].sort().values.int()
    keys[free], values[free] = torch.nan, torch.nan
    return KVPools(
        keys.to(dtype), values.to(dtype), positions, starts.view(shape), capacities.int().view(shape),
        lengths.int().view(shape),
    )  # fmt: skip


def make_keys(g: torch.Generator, rows: int, dim: int, kind: str) -> Tensor:
    keys = torch.randn(rows, dim, generator=g)
    if kind == "clustered":
        centres = torch.randn(3, dim, generator=g)
        return centres[torch.randint(3, (rows,), generator=g)] + 0.3 * keys
    if kind == "equal":
        return keys[:1].repeat(rows, 1)
    if kind == "zeros":
        keys[torch.rand(rows, generator=g) < 0.5] = 0.0
    return keys


def pick_slots(g: torch.Generator, slots: int) -> Tensor:
    """Some of the slots in any order, some rows to skip."""
    chosen = torch.randperm(slots, generator=g)
    chosen[torch.rand(slots, generator=g) < 0.2] = -1
    return chosen


def copy(pools: KVPools) -> KVPools:
    return replace(pools, **{name: value.clone() for name, value in vars(pools).items()})


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN in the same places."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_pools(a: KVPools, b: KVPools) -> bool:
    return all(same_bits(value, getattr(b, name)) for name, value in vars(a).items())


def head_rows(pools: KVPools, *index: int) -> slice:
    """Pool rows of a head's live entries."""
    start = int(pools.offsets[index])
    return slice(start, start + int(pools.lengths[index]))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2
