"""Arguments for the tests of the native ops: ragged slots, permuted in the pool, with rubbish in free memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import CachedEntries, KVPools, library
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.key_redundancy import cached_mixture
from sparse_rl_lightning.ops.library import REFERENCES
from sparse_rl_lightning.ops.schemas import SCHEMAS
from sparse_rl_lightning.ops.select_pages import list_pages
from sparse_rl_lightning.ops.window_importance import cached_importance
from sparse_rl_lightning.records import NEVER

EMULATED = os.environ.get("SPARSE_RL_EMULATED") == "1"  # the CPU library holds the CUDA kernels: make cuda-emulate
without_kernels = pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled CPU kernels")
cpu_complaints = pytest.mark.skipif(EMULATED or not ops.HAS_NATIVE, reason="only CPU kernels look at the numbers")
on_each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=without_kernels), pytest.param("cuda", marks=pytest.mark.gpu)]
)

OPS = torch.ops.sparse_rl
CASES = [*SCHEMAS, "evict from a source"]
APART = ["draw", "rms_norm", "silu_mul"]  # they know neither slots nor pools
POOLED = [name for name in CASES if name not in APART]
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
        lengths.int().view(shape), torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


def uniform_pools(heads: tuple[int, ...], capacity: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> KVPools:
    """Empty pools in which every head has the same capacity."""
    return KVPools.ragged(torch.full(heads, capacity, dtype=torch.int32), dim, dtype, device)


def make_keys(g: torch.Generator, rows: int, dim: int, kind: str) -> Tensor:
    keys = torch.randn(rows, dim, generator=g)
    if kind == "clustered":
        centers = torch.randn(3, dim, generator=g)
        return centers[torch.randint(3, (rows,), generator=g)] + 0.3 * keys
    if kind == "equal":
        return keys[:1].repeat(rows, 1)
    if kind == "zeros":
        keys[torch.rand(rows, generator=g) < 0.5] = 0.0
    return keys


def exclude_keys(g: torch.Generator, pools: KVPools) -> None:
    """Some keys, of one head all of them, give logits of -inf with queries whose first element is positive."""
    excluded = torch.rand(len(pools.keys), generator=g) < 0.3
    excluded[head_rows(pools, *[0] * pools.lengths.dim())] = True
    pools.keys[excluded, 0] = -torch.inf


def pick_slots(g: torch.Generator, slots: int) -> Tensor:
    """Some of the slots in any order, some rows to skip."""
    chosen = torch.randperm(slots, generator=g)
    chosen[torch.rand(slots, generator=g) < 0.2] = -1
    return chosen


MODULES = {"rms_norm": "body", "silu_mul": "body", "append_attend": "decode_attention"}
"""Modules of ops that share one."""


def op_of(case: str) -> str:
    """The op that a case of :data:`CASES` calls."""
    return case.split()[0]


def kernel(name: str) -> Callable[..., None]:
    return getattr(OPS, op_of(name)).default


def reference(name: str) -> Callable[..., None]:
    return REFERENCES[op_of(name)]


@contextmanager
def no_kernels(block_size: int = 128) -> Iterator[None]:
    """Typed functions run the references; the one of key_redundancy searches ``block_size`` columns at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "has_kernel", lambda name, device: False)
        patch.setattr(sys.modules["sparse_rl_lightning.ops.key_redundancy"], "BLOCK_SIZE", block_size)
        yield


def copy(pools: KVPools) -> KVPools:
    return replace(pools, **{name: value.clone() for name, value in vars(pools).items() if value is not None})


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN in the same places."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_pools(a: KVPools, b: KVPools) -> bool:
    """The same memory; what was complained about is another matter."""
    return all(same_bits(value, getattr(b, name)) for name, value in vars(a).items() if name != "errors")


def head_rows(pools: KVPools, *index: int) -> slice:
    """Pool rows of a head's live entries."""
    start = int(pools.offsets[index])
    return slice(start, start + int(pools.lengths[index]))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def assert_attended(
    pools: KVPools, slots: Tensor, query: Tensor, scale: float, out: Tensor, lse: Tensor | None = None,
    probs: Tensor | None = None, *, close: float, sinks: Tensor | None = None, read: Tensor | None = None,
) -> None:  # fmt: skip
    """Results are those of float64 over the live entries of each head, or over those of them that were read."""
    group = query.shape[1] // pools.lengths.shape[-1]
    for b, slot in enumerate(slots.tolist()):
        for q in range(query.shape[1]):
            rows = head_rows(pools, slot, q // group) if slot >= 0 else slice(0, 0)
            keys, values = pools.keys[rows].double(), pools.values[rows].double()
            if read is not None:
                keys, values = (t[read[b, q // group, : len(t)]] for t in (keys, values))
            logits = scale * keys @ query[b, q].double()
            column = logits if sinks is None else torch.cat([logits, sinks[q : q + 1].double()])
            shares = column.softmax(0)[: len(logits)].masked_fill(logits == -torch.inf, 0.0)
            torch.testing.assert_close(out[b, q].double(), shares @ values, atol=close, rtol=close)
            if lse is not None:
                torch.testing.assert_close(lse[b, q].double(), column.logsumexp(0), atol=2e-5, rtol=2e-6)
            if probs is not None:
                torch.testing.assert_close(probs[b, q, : len(shares)].double(), shares, atol=2e-6, rtol=3e-5)
                assert not probs[b, q, len(shares) :].any()


LAYERS, SLOTS, HEADS, DIM, CAPACITY, GROUP, PAGE = 2, 3, 2, 16, 12, 3, 2


class Case:
    """Arguments for a call of every op, with all optional tensors or with none."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu", full: bool = True) -> None:
        self.full = full
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(dtype)

        wide = torch.promote_types(dtype, torch.float32)
        self.pools = make_pools(g, layers=LAYERS, slots=SLOTS, heads=HEADS, dim=DIM, capacity=CAPACITY, dtype=dtype,
                                kind="random")  # fmt: skip
        self.pools.lengths.copy_((self.pools.capacities.amin(1, keepdim=True) - 1).clamp(max=9))
        for pool in (self.pools.keys, self.pools.values):
            pool.nan_to_num_(0.25)
        self.pools.positions.clamp_(min=0)
        self.layer = self.pools.layer(0)
        self.slots, self.seen = torch.tensor([2, -1, 0]), torch.tensor([21, 22, 23])
        self.query, self.projected = normal(SLOTS, HEADS * GROUP, DIM), normal(SLOTS, HEADS * (GROUP + 2), DIM)
        self.ring = normal(LAYERS, SLOTS, HEADS * GROUP, 4, DIM)
        self.query_norm, self.key_norm = (1 + 0.1 * torch.randn(2, DIM, generator=g).to(wide)).unbind()
        self.hidden, self.addend, self.gate_and_up = normal(SLOTS, DIM), normal(SLOTS, DIM), normal(SLOTS, 2 * DIM)
        angle = torch.randn(SLOTS, DIM, generator=g).to(wide)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.lse = torch.zeros(SLOTS, HEADS * GROUP, dtype=wide)
        self.probs = torch.zeros(SLOTS, HEADS * GROUP, CAPACITY + 1, dtype=wide)
        self.importance = torch.rand(LAYERS, SLOTS, HEADS, CAPACITY, generator=g).to(wide)
        self.prompt_lengths, self.prompt_keys = torch.tensor([5, 9, 2]), torch.tensor([-7, 2**40, 3])
        self.sequence_keys = torch.tensor([11, -(2**50), 12])
        self.held = torch.full((SLOTS, 3 * CAPACITY), 1000, dtype=torch.int32)
        self.scores = torch.randn(LAYERS, SLOTS, HEADS, CAPACITY, generator=g)
        self.budgets = torch.ones(LAYERS, SLOTS, HEADS, dtype=torch.int32)
        self.death = torch.full((LAYERS, SLOTS, HEADS, 3 * CAPACITY), 255, dtype=torch.uint8)
        self.event_steps = torch.tensor([[20, *[NEVER] * 3]] * SLOTS, dtype=torch.int32)
        self.state = torch.randn(len(self.pools.keys), 1, generator=g)
        self.source = copy(self.pools)
        self.summaries = normal(SLOTS, HEADS, 2, CAPACITY // PAGE, DIM)
        self.limits = torch.full((SLOTS,), 3, dtype=torch.int32)
        counts = -(-self.layer.lengths[self.slots.clamp(min=0)] // PAGE)
        self.pages = list_pages(torch.arange(CAPACITY // PAGE) < counts.unsqueeze(-1), CAPACITY // PAGE)
        self.sources, self.destinations = torch.tensor([0, -1, 2]), torch.tensor([1, 0, 2])
        self.logits, self.drawn_from = normal(SLOTS, DIM), normal(SLOTS, DIM)
        self.steps, self.end_ids = torch.tensor([0, 1, 7]), torch.tensor([3, 5])
        for name, value in vars(self).items():
            if isinstance(value, Tensor | KVPools):
                setattr(self, name, value.to(device) if isinstance(value, Tensor) else moved(value, device))
        self.layer = self.pools.layer(0)  # the same memory

    def entries(self) -> CachedEntries:
        return CachedEntries(
            self.pools, self.slots, self.seen, self.ring, self.prompt_lengths, self.prompt_keys, self.sequence_keys,
            self.state if self.full else None, 0.3, CAPACITY,
        )  # fmt: skip

    def calls(self) -> dict[str, Callable[[], Any]]:
        ring, cos, sin, lse, probs, death, steps, state, query_norm, key_norm, addend = (
            t if self.full else None
            for t in (self.ring, self.cos, self.sin, self.lse, self.probs, self.death, self.event_steps, self.state,
                      self.query_norm, self.key_norm, self.addend)
        )  # fmt: skip
        ring_of_layer = None if ring is None else ring[0]
        return {
            "append": lambda: ops.append(
                self.layer, self.slots, self.seen, self.projected, ring_of_layer, cos, sin, query_norm, key_norm, 1e-6),
            "append_attend": lambda: ops.append_attend(
                self.layer, self.slots, self.seen, self.projected, ring_of_layer,
                QKTransform(cos, sin, query_norm, key_norm, 1e-6), 0.3, CAPACITY),
            "decode_attention": lambda: ops.decode_attention(
                self.layer, self.slots, self.query, 0.3, CAPACITY, lse=lse, probs=probs),
            "window_importance": lambda: cached_importance(self.entries(), window=2),
            "key_redundancy": lambda: cached_mixture(self.entries(), self.importance, 0.4),
            "score_entries": lambda: ops.score_entries(
                self.entries(), "mass" if self.full else "random", by_value=self.full),
            "evict": lambda: ops.evict(
                self.pools, self.slots, self.scores, self.budgets, 0, 0, self.seen, death, state,
                held=self.held if self.full else None, event_steps=steps),
            "evict from a source": lambda: ops.evict(
                self.pools, self.slots, self.scores, self.budgets, 0, 0, self.seen, death, source=self.source,
                event_steps=steps),
            "fork": lambda: ops.fork(self.pools, self.sources, self.destinations, ring, death, state),
            "summarize_pages": lambda: ops.summarize_pages(self.layer, self.slots, PAGE, self.summaries),
            "select_pages": lambda: ops.select_pages(
                self.layer, self.slots, self.query, self.summaries, self.limits, PAGE, 1, 1, "max", 4)[0],
            "page_attention": lambda: ops.page_attention(
                self.layer, self.slots, self.query, self.pages, PAGE, 0.3, lse=lse),
            "draw": lambda: ops.draw(
                self.logits, self.seen, self.steps, 0.7, 12, 0.9, 0.01, self.end_ids, 2,
                self.drawn_from if self.full else None, 3 if self.full else 0).logprobs,
            "rms_norm": lambda: ops.rms_norm(self.hidden, self.query_norm, 1e-6, addend),
            "silu_mul": lambda: ops.silu_mul(self.gate_and_up),
        }  # fmt: skip

    def tensors(self) -> list[Tensor]:
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + [value for value in vars(self.pools).values() if isinstance(value, Tensor)]


def moved(pools: KVPools, device: str) -> KVPools:
    return replace(pools, **{name: value.to(device) for name, value in vars(pools).items() if value is not None})


def recorded(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The arguments that the typed function hands to the op."""
    seen: list[tuple[Any, ...]] = []

    def note(op: str, like: Tensor, *args: Any) -> None:
        seen.append(args)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[f"sparse_rl_lightning.ops.{MODULES.get(op_of(name), op_of(name))}"], "call", note)
        case.calls()[name]()
    return seen[0]
