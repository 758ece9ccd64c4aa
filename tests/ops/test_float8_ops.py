"""Pools of float8: every op against float64 loops over the numbers kept, in the reference and in the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_cases import (
    EMULATED,
    POOLED,
    Case,
    assert_attended,
    kernel,
    make_pools,
    pick_slots,
    recorded,
    reference,
    uniform_pools,
)
from test_native_attention import turned
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.pools import COMPUTING, FLOAT8, to_stored

Way = Callable[[str], Callable[..., None]]
KERNEL_TYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = torch.tensor(  # of the bits 0 to 126: sign 0, then exponent and mantissa; 127 is NaN
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127],
    dtype=torch.float64,
)
each_way = pytest.mark.parametrize(
    ("way", "device"),
    [
        (reference, "cpu"),
        pytest.param(kernel, "cpu", marks=pytest.mark.skipif(not EMULATED, reason="no emulated CUDA kernels")),
        pytest.param(kernel, "cuda", marks=pytest.mark.gpu),
    ],
)


def rounded(x: Tensor) -> Tensor:
    """The nearest number of eight bits in float64, ties to the even one, +-448 for what is larger."""
    size = x.double().abs().clamp(max=448)
    above = torch.searchsorted(NUMBERS, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    down, up = size - NUMBERS[below], NUMBERS[above] - size
    nearest = torch.where((down < up) | ((down == up) & (below % 2 == 0)), NUMBERS[below], NUMBERS[above])
    return torch.where(x.isnan(), torch.nan, nearest.copysign(x.double()))


def in_eight_bits(pools: KVPools) -> KVPools:
    return replace(pools, keys=to_stored(pools.keys, FLOAT8), values=to_stored(pools.values, FLOAT8))


def float8_pools(g: torch.Generator, **shape: Any) -> KVPools:
    full = {"layers": 1, "slots": 3, "heads": 2, "dim": 32, "capacity": 40, "kind": "random", **shape}
    return in_eight_bits(make_pools(g, dtype=torch.float32, **full))


def run(name: str, args: list[Any], way: Way, device: str) -> list[Any]:
    """The arguments after the op, on copies."""
    own = [a.clone().to(device) if isinstance(a, Tensor) else a for a in args]
    way(name)(*own)
    return [a.cpu() if isinstance(a, Tensor) else a for a in own]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    assert a.dtype == b.dtype == FLOAT8
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def edge_numbers(dtype: torch.dtype) -> Tensor:
    """Everything that is close to a number of eight bits or to the middle of two, and what has no place among them."""
    middles = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    near = torch.cat([NUMBERS, middles, torch.tensor([449.0, 464.0, 480.0, 1000.0, 60000.0, torch.inf])]).to(dtype)
    near = torch.cat([near, near * (1 + torch.finfo(dtype).eps), near * (1 - torch.finfo(dtype).eps)])
    return torch.cat([near, -near, torch.tensor([torch.nan], dtype=dtype)])


@pytest.mark.parametrize("dtype", COMPUTING)
def test_rounding(dtype: torch.dtype) -> None:
    x = edge_numbers(dtype)
    if dtype == torch.float64:
        x = x.float().double()  # torch rounds twice, over float32
    got, want = to_stored(x, FLOAT8).double(), rounded(x)
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(got.signbit()[~x.isnan()], want.signbit()[~x.isnan()])
    assert to_stored(NUMBERS, FLOAT8).view(torch.uint8).tolist() == list(range(127))


def test_error_bounds_are_those_documented() -> None:
    x = torch.cat([torch.logspace(-12, 8.807, 200001, base=2.0), torch.tensor([448.0])]).double()
    error = (rounded(x) - x).abs()
    assert (error <= torch.where(x < 2.0**-6, torch.full_like(x, 2.0**-10), x / 16)).all()
    assert (error > x / 17).any()


@each_way
@pytest.mark.parametrize("dtype", KERNEL_TYPES)
@pytest.mark.parametrize("turn", [True, False])
def test_append(way: Way, device: str, dtype: torch.dtype, turn: bool) -> None:
    g = torch.Generator().manual_seed(1)
    dim, group, edges = 32, 3, edge_numbers(dtype)
    slots = len(edges) // dim + 1
    pools = float8_pools(g, slots=slots, capacity=5).layer(0)
    pools.lengths.copy_((torch.rand(pools.lengths.shape, generator=g) * pools.capacities).int())  # room for one
    chosen, seen = pick_slots(g, slots), torch.randint(0, 100, (slots,), generator=g)
    query, key, value = ((8 * torch.randn(slots, n, dim, generator=g)).to(dtype) for n in (2 * group, 2, 2))
    value.view(-1)[: len(edges)] = edges
    ring = torch.randn(slots, 2 * group, 4, dim, generator=g).to(dtype)
    angle = torch.randn(slots, dim // 2 - 4, generator=g).repeat(1, 2)
    angles = (angle.cos(), angle.sin()) if turn else (None, None)
    args = [torch.cat([query, key, value], dim=1), None, None, 0.0, *angles, chosen, seen, pools.offsets,
            pools.capacities, pools.keys, pools.values, pools.positions, pools.lengths, ring, query]  # fmt: skip
    after = run("append", args, way, device)
    untouched = torch.ones(len(pools.keys), dtype=torch.bool)
    for b, slot in enumerate(chosen.tolist()):
        for h in range(2 if slot >= 0 else 0):
            at = int(pools.offsets[slot, h] + pools.lengths[slot, h])
            untouched[at] = False
            exact = turned(key[b, h], angle[b], turn)
            # a key on the border of two numbers may be kept as either
            slack = 1e-6 if dtype == torch.float32 else 1e-2
            kept = after[10][at].double()
            assert ((kept >= rounded(exact - slack * exact.abs().amax())) & (
                kept <= rounded(exact + slack * exact.abs().amax()))).all()  # fmt: skip
            assert turn or same_bytes(after[10][at], to_stored(key[b, h], FLOAT8))
            torch.testing.assert_close(after[11][at].double(), rounded(value[b, h]), atol=0, rtol=0, equal_nan=True)
            assert after[12][at] == seen[slot]
        if slot >= 0:
            turned_query = torch.stack([turned(q, angle[b], turn).to(dtype) for q in query[b]])
            close = 1e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(after[14][slot, :, seen[slot] % 4], turned_query, atol=close, rtol=1e-2)
            assert torch.equal(after[14][slot, :, seen[slot] % 4], after[15][b])  # not rounded to eight bits
    assert same_bytes(after[10][untouched], pools.keys[untouched])
    assert same_bytes(after[11][untouched], pools.values[untouched])
    assert after[13].sum() == pools.lengths.sum() + 2 * (chosen >= 0).sum()


@each_way
@pytest.mark.parametrize("dtype", KERNEL_TYPES)
def test_keys_are_rounded_to_the_type_of_the_queries_first(way: Way, device: str, dtype: torch.dtype) -> None:
    """As a prompt's are, whose keys come in that type."""
    g = torch.Generator().manual_seed(2)
    pools = uniform_pools((200, 1), 1, 64, FLOAT8)
    key, angle = torch.randn(200, 1, 64, generator=g).to(dtype), torch.randn(200, 32, generator=g).repeat(1, 2)
    seen = torch.zeros(200, dtype=torch.int64)
    args = [key.repeat(1, 3, 1), None, None, 0.0, angle.cos(), angle.sin(), torch.arange(200), seen, pools.offsets,
            pools.capacities, pools.keys, pools.values, pools.positions, pools.lengths, None,
            torch.empty_like(key)]  # fmt: skip
    after = run("append", args, way, device)
    assert same_bytes(after[10], to_stored(after[15][:, 0], FLOAT8))  # the query is the same vector


@each_way
@pytest.mark.parametrize("dtype", KERNEL_TYPES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_every_number_is_read_exactly(way: Way, device: str, dtype: torch.dtype, dim: int) -> None:
    """One entry per head: the result is its value."""
    every = torch.arange(512).to(torch.uint8).view(-1, dim)
    heads = len(every)
    pools = uniform_pools((1, heads), 1, dim, FLOAT8)
    pools.values.copy_(every.view(FLOAT8))
    pools.lengths.fill_(1)
    query = torch.ones(1, heads, dim, dtype=dtype)
    args = [query, pools.keys, pools.values, torch.tensor([0]), pools.offsets, pools.lengths, 1.0, 1,
            torch.empty_like(query), None, None]  # fmt: skip
    want = torch.cat([NUMBERS, torch.tensor([torch.nan])])
    want = torch.cat([want, -want]).repeat(2).view(-1, dim)
    out = run("decode_attention", args, way, device)[8][0].double()
    torch.testing.assert_close(out, want, atol=0, rtol=0, equal_nan=True)


SIZES = [(16, 1), (64, 7), (80, 8), (128, 4), (128, 9), (256, 5), (272, 2), (512, 3)]  # head size, group


@each_way
@pytest.mark.parametrize("dtype", KERNEL_TYPES)
@pytest.mark.parametrize(("dim", "group"), SIZES)
def test_decode_attention(way: Way, device: str, dtype: torch.dtype, dim: int, group: int) -> None:
    g = torch.Generator().manual_seed(dim + group)
    pools = float8_pools(g, slots=4, dim=dim, capacity=150).layer(0)
    pools.lengths[2] = 0
    chosen, heads = torch.tensor([3, -1, 2, 0]), 2
    query = torch.randn(4, heads * group, dim, generator=g).to(dtype)
    args = [query, pools.keys, pools.values, chosen, pools.offsets, pools.lengths, dim**-0.5, 150,
            torch.full_like(query, 7), torch.full((4, heads * group), 7.0),
            torch.full((4, heads * group, 151), 7.0)]  # fmt: skip
    after = run("decode_attention", args, way, device)
    close = 1e-5 if dtype == torch.float32 else 1e-2
    assert_attended(pools, chosen, query, dim**-0.5, *after[8:11], close=close)


PAGES = {"summarize_pages", "select_pages", "page_attention"}


def float8_case(dtype: torch.dtype = torch.float32, device: str = "cpu", **kwargs: Any) -> Case:
    case = Case(dtype, device, **kwargs)
    case.pools, case.source = in_eight_bits(case.pools), in_eight_bits(case.source)
    case.layer = case.pools.layer(0)
    return case


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", COMPUTING)
# append_attend reads the key that it has rounded
@pytest.mark.parametrize("name", sorted(set(POOLED) - PAGES - {"append_attend"}))
def test_eight_bits_do_what_the_same_numbers_do_in_more(name: str, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and dtype not in KERNEL_TYPES:
        pytest.skip("there is no kernel for it")
    case, wide = float8_case(dtype, device), float8_case(dtype, device)
    for attribute in ("pools", "source"):
        pools = getattr(wide, attribute)
        setattr(wide, attribute, replace(pools, keys=pools.keys.to(dtype), values=pools.values.to(dtype)))
    wide.layer = wide.pools.layer(0)
    got, want = case.calls()[name](), wide.calls()[name]()
    close = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 1e-2)
    if want is not None:
        torch.testing.assert_close(got.double(), want.double(), atol=close, rtol=close)
    for a, b in zip(case.tensors(), wide.tensors(), strict=True):
        stored = to_stored(b, a.dtype)
        torch.testing.assert_close(a.double(), stored.double(), atol=close, rtol=close, equal_nan=True)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", sorted(set(POOLED) - PAGES))
@each_way
def test_opcheck(name: str, full: bool, way: Way, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, args = kernel(name), recorded(name, float8_case(device=device, full=full), monkeypatch)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if way is kernel:
        assert set(torch.library.opcheck(op, args, test_utils=checks).values()) == {"SUCCESS"}
    # test_schema, whose comparison of tensors does not know float8: nothing is written but what the schema says
    after = run(name, list(args), way, device)
    for argument, before, now in zip(op._schema.arguments, args, after, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(before, Tensor) and not written:
            assert torch.equal(before.cpu().contiguous().view(torch.uint8), now.view(torch.uint8)), argument.name


@pytest.mark.parametrize("name", sorted(PAGES))
def test_pages_of_eight_bits_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="pages are not read from float8 pools"):
        float8_case().calls()[name]()


@pytest.mark.parametrize("name", ["append", "decode_attention", "fork"])
def test_queries_of_a_type_that_does_not_compute_are_refused(name: str) -> None:
    case = float8_case()
    for attribute in ("query", "projected", "ring"):
        setattr(case, attribute, to_stored(getattr(case, attribute), FLOAT8))
    with pytest.raises(ValueError, match=r"with float8 pools .*must be one of float16, .*got torch.float8_e4m3fn"):
        case.calls()[name]()


def test_a_ring_of_another_type_than_the_queries_is_refused() -> None:
    case = float8_case()
    with pytest.raises(ValueError, match=r"query_ring is torch.bfloat16, expected torch.float32"):
        ops.append(case.layer, case.slots, case.seen, case.projected, case.ring[0].bfloat16())
