"""append, decode_attention, rms_norm and silu_mul: kernel = reference = float64, over single heads and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import (
    EMULATED,
    assert_attended,
    dtypes_for,
    exclude_keys,
    kernel,
    make_pools,
    on_each_device,
    pick_slots,
    reference,
    same_bits,
    shape_for,
    shapes,
    tolerance,
    uniform_pools,
    without_kernels,
)
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.append import parts
from sparse_rl_lightning.ops.decode_attention import MAX_SPLIT, empty_partials
from sparse_rl_lightning.ops.pools import FLOAT8, to_stored
from sparse_rl_lightning.ops.select_pages import list_pages

groups = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12])


def both(name: str, args: list[object], device: str = "cpu", workspace: int = -1) -> tuple[list[object], list[object]]:
    """The arguments after the kernel and after the reference, each run on its own copies; the kernel runs twice.

    What the argument ``workspace`` holds afterwards does not matter.
    """
    assert ops.has_kernel(name, device)
    results = []
    for function, where in ((kernel(name), device), (kernel(name), device), (reference(name), "cpu")):
        own = [a.clone().to(where) if isinstance(a, Tensor) else a for a in args]
        function(*own)
        results.append([a.cpu() if isinstance(a, Tensor) else a for a in own])
    for place, (once, twice) in enumerate(zip(*results[:2], strict=True)):
        assert place == workspace or not isinstance(once, Tensor) or same_bits(once, twice), "two runs differ"
    return results[0], results[2]


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    shape=shapes,
    group=groups,
    num_queries=st.integers(0, 3),
    turn=st.booleans(),
    norm=st.booleans(),
)
def test_append(device: str, seed: int, shape: dict, group: int, num_queries: int, turn: bool, norm: bool) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape).layer(0)
    pools.lengths.copy_((torch.rand(pools.lengths.shape, generator=g) * pools.capacities).int())  # room for one
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    chosen, seen = pick_slots(g, slots), torch.randint(0, 100, (slots,), generator=g)
    projected = torch.randn(slots, heads * (group + 2), dim, generator=g).to(dtype)
    query, key, value = parts(projected, heads)
    ring = torch.randn(slots, heads * group, num_queries, dim, generator=g).to(dtype)
    width = dim if seed % 2 else dim // 4 * 2
    angle = torch.randn(slots, width // 2, generator=g).repeat(1, 2)
    angles = (angle.cos(), angle.sin()) if turn else (None, None)
    weights = 1 + 0.2 * torch.randn(2, dim, generator=g)
    norms = (weights[0], weights[1]) if norm else (None, None)
    args = [projected, *norms, 1e-5, *angles, chosen, seen, pools.offsets, pools.capacities, pools.keys, pools.values,
            pools.positions, pools.lengths, ring, torch.full_like(query, 7).contiguous()]  # fmt: skip
    native, plain = both("append", args, device)
    for mine, theirs in zip(native, plain, strict=True):
        if isinstance(mine, Tensor) and mine.is_floating_point():
            torch.testing.assert_close(mine, theirs, atol=tolerance(dtype), rtol=tolerance(dtype), equal_nan=True)
        elif isinstance(mine, Tensor):
            assert same_bits(mine, theirs)
    expected_keys, expected_ring = pools.keys.clone(), ring.clone()
    expected_query = torch.zeros(query.shape)
    for b, slot in enumerate(chosen.tolist()):
        for h in range(heads):
            if slot >= 0:
                at = int(pools.offsets[slot, h] + pools.lengths[slot, h])
                expected_keys[at] = turned(normalized(key[b, h], norms[1]), angle[b], turn).to(dtype)
                assert native[11][at].tolist() == value[b, h].tolist()
                assert native[12][at] == seen[slot]
            assert native[13].view(slots, heads)[slot, h] == pools.lengths[slot, h] + (slot >= 0) or slot < 0
        if slot >= 0:
            expected_query[b] = torch.stack([turned(normalized(q, norms[0]), angle[b], turn) for q in query[b]])
            if num_queries:
                expected_ring[slot, :, seen[slot] % num_queries] = expected_query[b].to(dtype)
    close = tolerance(dtype) if dtype == torch.float32 else 4e-2 if norm else 1e-2  # three roundings
    torch.testing.assert_close(native[10], expected_keys, atol=close, rtol=close, equal_nan=True)
    torch.testing.assert_close(native[14], expected_ring, atol=close, rtol=close)
    torch.testing.assert_close(native[15].float(), expected_query, atol=close, rtol=close)
    assert same_bits(native[13].sum(), pools.lengths.sum() + heads * (chosen >= 0).sum())


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), shape=shapes, group=st.sampled_from([1, 2, 4, 7, 8, 9]), num_queries=st.integers(0, 3),
    norm=st.booleans(),
    long=st.sampled_from([False, False, False, True]), dim=st.sampled_from([None, None, 128, 256, 264]),
)  # fmt: skip
def test_append_and_attention_at_once_have_the_bits_of_both(
    device: str, seed: int, shape: dict, group: int, num_queries: int, norm: bool, long: bool, dim: int | None
) -> None:
    refuses = device == "cpu" and not EMULATED  # and does not skip what cannot be done
    shape, g = shape_for(device, {**shape, "dim": dim or shape["dim"]}), torch.Generator().manual_seed(seed)
    capacity = 3 * MAX_SPLIT if long else shape["capacity"]  # of several splits, or of one
    pools = make_pools(g, **{**shape, "capacity": capacity, "layers": 1}, full=long).layer(0)
    pools.lengths.sub_(torch.randint(int(refuses), 3, pools.lengths.shape, generator=g)).clamp_(min=0)  # some are full
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    if seed % 3 == 0 and dim % 16 == 0 and not refuses:
        pools = replace(pools, keys=to_stored(pools.keys, FLOAT8), values=to_stored(pools.values, FLOAT8))
    chosen, seen = pick_slots(g, slots), torch.randint(0, 100, (slots,), generator=g)
    projected = torch.randn(slots, heads * (group + 2), dim, generator=g).to(dtype)
    angle, weights = torch.randn(slots, dim // 2, generator=g).repeat(1, 2), 1 + 0.2 * torch.randn(2, dim, generator=g)
    norms, most = (weights[0], weights[1]) if norm else (None, None), int(pools.capacities.max())
    query = projected[:, : heads * group].contiguous()
    ring = torch.randn(slots, heads * group, num_queries, dim, generator=g).to(dtype)
    out, partials = torch.empty_like(query), empty_partials(query, most)
    errors = torch.zeros(1, dtype=torch.int32)
    first = [projected, *norms, 1e-5, angle.cos(), angle.sin(), chosen, seen, pools.offsets, pools.capacities,
             pools.keys, pools.values, pools.positions, pools.lengths, ring, query]  # fmt: skip

    def after(run: Callable[[list[Any]], None]) -> list[Any]:
        given = [
            a.clone().to(device) if isinstance(a, Tensor) else a for a in [*first, 0.3, most, out, partials, errors]
        ]
        run(given)
        return [a.cpu() for a in given[:-2] if isinstance(a, Tensor)] + [given[-1].ne(0).cpu()]

    def one_by_one(given: list[Any]) -> None:
        kernel("append")(*given[:16], given[20])
        cache = given[10], given[11], given[6], given[8], given[13]
        kernel("decode_attention")(given[15], *cache, 0.3, most, given[18], None, None, given[19], given[20])

    together, apart = after(lambda given: kernel("append_attend")(*given)), after(one_by_one)
    assert all(same_bits(a, b) for a, b in zip(together, apart, strict=True))


def normalized(x: Tensor, weight: Tensor | None) -> Tensor:
    """Root mean square norm in float64."""
    x = x.double()
    return x if weight is None else x * (x.square().mean() + 1e-5).rsqrt() * weight.double()


def turned(x: Tensor, angle: Tensor, turn: bool) -> Tensor:
    """Rotation of each pair (i, i + r / 2) as a complex number, in float64."""
    x = x.double()
    if not turn:
        return x
    half = len(angle) // 2
    pairs = torch.complex(x[:half], x[half : 2 * half]) * torch.polar(torch.ones(half).double(), angle[:half].double())
    return torch.cat([pairs.real, pairs.imag, x[2 * half :]])


@on_each_device
@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6), shape=shapes, group=groups, spare=st.integers(0, 5), full=st.booleans(),
    infinite=st.booleans(),
)  # fmt: skip
def test_decode_attention(
    device: str, seed: int, shape: dict, group: int, spare: int, full: bool, infinite: bool
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape, full=full).layer(-1)
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    chosen = pick_slots(g, slots)
    query = (2 * torch.randn(slots, heads * group, dim, generator=g)).to(dtype)
    if infinite:
        query[..., 0] = query[..., 0].abs() + 0.1
        exclude_keys(g, pools)
    longest = int(pools.lengths.max())
    out, lse = torch.full_like(query, 7), torch.full((slots, heads * group), 7.0)
    probs = torch.full((slots, heads * group, longest + spare), 7.0)
    args = [query, pools.keys, pools.values, chosen, pools.offsets, pools.lengths, 0.3, longest, out, lse, probs]
    native, plain = both("decode_attention", args, device)
    for result in (native, plain):
        assert_attended(pools, chosen, query, 0.3, *result[8:11], close=tolerance(dtype))


@without_kernels
def test_decode_attention_beyond_one_tile_and_with_far_apart_logits() -> None:
    g = torch.Generator().manual_seed(1)
    pools = make_pools(g, layers=1, slots=2, heads=2, dim=128, capacity=700, dtype=torch.float32, kind="random",
                       full=True).layer(0)  # fmt: skip
    query = 30 * torch.randn(2, 14, 128, generator=g)
    query[..., 0] = query[..., 0].abs() + 0.1
    pools.keys[pools.offsets[0, 0] :][:140, 0] = -torch.inf
    out = ops.decode_attention(pools, torch.arange(2), query, 1.0, 700)
    assert_attended(pools, torch.arange(2), query, 1.0, out, close=1e-3)


SIZES = [(64, 7), (80, 8), (96, 1), (128, 9), (256, 3), (256, 8), (264, 5), (512, 3)]  # head size, group


@on_each_device
@pytest.mark.parametrize(("dim", "group"), SIZES)
def test_decode_attention_of_all_head_sizes(device: str, dim: int, group: int) -> None:
    for dtype in dtypes_for(device):
        g = torch.Generator().manual_seed(dim)
        pools = make_pools(g, layers=1, slots=2, heads=1, dim=dim, capacity=400, dtype=dtype, kind="random").layer(0)
        query = torch.randn(2, group, dim, generator=g).to(dtype)
        args = [query, pools.keys, pools.values, torch.tensor([1, 0]), pools.offsets, pools.lengths, dim**-0.5, 400,
                torch.empty_like(query), torch.empty(2, group), torch.empty(2, group, 403)]  # fmt: skip
        native, plain = both("decode_attention", args, device)
        for index, close in ((8, tolerance(dtype)), (9, 1e-5), (10, 1e-6)):
            torch.testing.assert_close(native[index], plain[index], atol=close, rtol=close)


@on_each_device
def test_the_exponential_is_exact_to_a_few_units_in_the_last_place(device: str) -> None:
    gaps = -torch.linspace(0, 80, 4001)  # logits of two entries with values 0 and 1: the result is a logistic function
    pools = uniform_pools((len(gaps), 1), 2, 8, torch.float32)
    pools.lengths.fill_(2)
    pools.keys[1::2, 0], pools.values[1::2] = gaps, 1.0
    query = torch.zeros(len(gaps), 1, 8)
    query[..., 0] = 1.0
    args = [query, pools.keys, pools.values, torch.arange(len(gaps)), pools.offsets, pools.lengths, 1.0, 2,
            torch.empty_like(query), None, None]  # fmt: skip
    native, _ = both("decode_attention", args, device)
    close = 3e-7 if device == "cpu" else 1e-6
    torch.testing.assert_close(native[8][:, 0, 0].double(), gaps.double().sigmoid(), atol=0, rtol=close)


@on_each_device
def test_results_round_to_the_nearest_even(device: str) -> None:
    unit = 2.0**-7  # of bfloat16 at 1
    pairs = 1 + unit * torch.tensor([[0, 1], [1, 2], [0, 3], [1, 4], [0, 2]])  # the means of all but the last are ties
    pools = uniform_pools((5, 1), 2, 8, torch.bfloat16)
    pools.lengths.fill_(2)
    pools.values.copy_(pairs.view(-1, 1))
    query = torch.ones(5, 2, 8, dtype=torch.bfloat16)
    args = [query, pools.keys, pools.values, torch.arange(5), pools.offsets, pools.lengths, 1.0, 2,
            torch.empty_like(query), None, None]  # fmt: skip
    native, _ = both("decode_attention", args, device)
    assert native[8][:, 1, 7].tolist() == [1, 1 + 2 * unit, 1 + 2 * unit, 1 + 2 * unit, 1 + unit]


LONG = [0, 1, MAX_SPLIT - 1, MAX_SPLIT, MAX_SPLIT + 1, 2 * MAX_SPLIT, 2 * MAX_SPLIT + 1, 1700]


def long_pools(g: torch.Generator, lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> KVPools:
    """Slots of which each has heads of one of these lengths."""
    pools = uniform_pools((len(lengths), heads), max(lengths) + 1, dim, dtype)
    pools.lengths.copy_(torch.tensor(lengths)[:, None].expand(-1, heads))
    pools.keys.copy_(torch.randn(pools.keys.shape, generator=g))
    pools.values.copy_(torch.randn(pools.values.shape, generator=g))
    return pools


@on_each_device
@pytest.mark.parametrize(("dim", "group"), [(8, 2), (64, 9), (128, 3), (256, 1), (264, 1)])
def test_heads_that_are_split(device: str, dim: int, group: int) -> None:
    for dtype in dtypes_for(device):
        g = torch.Generator().manual_seed(dim)
        pools = long_pools(g, LONG, 1, dim, dtype)
        slots = torch.tensor([5, -1, 0, 3, 2, 7, 4, 1, 6])
        query = (3 * torch.randn(len(slots), group, dim, generator=g)).to(dtype)
        args = [query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, dim**-0.5, 1700,
                torch.full_like(query, 7), torch.full((9, group), 7.0), torch.full((9, group, 1703), 7.0),
                torch.full((9, group, 3, dim + 2), torch.nan)]  # fmt: skip
        native, _ = both("decode_attention", args, device, workspace=11)
        assert_attended(pools, slots, query, dim**-0.5, *native[8:11], close=tolerance(dtype))


@on_each_device
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6), dim=st.sampled_from([8, 64]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lengths=st.lists(st.one_of(st.sampled_from(LONG), st.integers(0, 1700)), min_size=2, max_size=4),
    spare=st.sampled_from([0, 1, 800]), page_size=st.sampled_from([1, 16, 150]),
)  # fmt: skip
def test_the_split_is_by_the_length_alone(
    device: str, seed: int, dim: int, dtype: torch.dtype, lengths: list[int], spare: int, page_size: int
) -> None:
    """The same bits alone and in any batch, and for any bound of the lengths: with fewer splits launched, or none."""
    g = torch.Generator().manual_seed(seed)
    pools = long_pools(g, lengths, 2, dim, dtype)
    query, order = torch.randn(len(lengths), 6, dim, generator=g).to(dtype), torch.randperm(len(lengths), generator=g)
    counts = -(-pools.lengths // page_size)
    listed = list_pages(torch.arange(int(counts.max()) + spare) < counts.unsqueeze(-1), int(counts.max()) + spare)
    pools = KVPools(**{name: value.to(device) for name, value in vars(pools).items() if value is not None})
    query, order, listed = query.to(device), order.to(device), listed.to(device)
    together = ops.decode_attention(pools, order, query[order], 0.3, max(lengths) + spare)
    paged = ops.page_attention(pools, order, query[order], listed[order], page_size, 0.3)
    for b, slot in enumerate(order.tolist()):
        alone, rows = torch.tensor([slot], device=device), slice(slot, slot + 1)
        own = ops.decode_attention(pools, alone, query[rows], 0.3, lengths[slot])
        assert same_bits(own, together[b : b + 1])
        pages = listed[rows, :, : int(counts[slot].max())].contiguous()
        own = ops.page_attention(pools, alone, query[rows], pages, page_size, 0.3)
        assert same_bits(own, paged[b : b + 1])


@on_each_device
def test_splits_without_room_are_refused(device: str) -> None:
    if device == "cpu" and not EMULATED:
        pytest.skip("the CPU kernels do not split")
    pools = uniform_pools((1, 1), 800, 8, torch.float32, device)
    query, slots = torch.zeros(1, 1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    args = [query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, 1.0, 800, query.clone(), None, None]
    for partials in (None, torch.zeros(1, 1, 1, 10, device=device)):
        with pytest.raises(RuntimeError, match=r"partials has room for [01] splits of a head, 800 entries are up to 2"):
            kernel("decode_attention")(*args, partials)


@without_kernels
def test_memory_for_splits_of_another_head_size_is_refused() -> None:
    pools = uniform_pools((1, 1), 800, 8, torch.float32)
    query, slots = torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int64)
    args = [query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, 1.0, 800, query.clone(), None, None]
    with pytest.raises(RuntimeError, match=r"partials has shape \(1, 1, 2, 9\), expected \(1, 1, any, 10\)"):
        kernel("decode_attention")(*args, torch.zeros(1, 1, 2, 9))


TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
UNIT = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a rounding, or of a sum


def types_for(device: str) -> list[tuple[torch.dtype, torch.dtype]]:
    """Types of hidden states and products in the compiled kernels."""
    halves = [(torch.float16, torch.float16), (torch.float32, torch.float16)]
    return TYPES if device == "cpu" and not EMULATED else TYPES + halves


def width_for(device: str, width: int) -> int:
    return width if device == "cpu" and not EMULATED else -(-width // 8) * 8


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), rows=st.integers(0, 5), width=st.integers(1, 130), pair=st.integers(0, 4),
    added=st.booleans(), epsilon=st.sampled_from([0.0, 1e-6, 1e-3]), scale=st.sampled_from([1e-2, 1.0, 30.0]),
)  # fmt: skip
def test_rms_norm(
    device: str, seed: int, rows: int, width: int, pair: int, added: bool, epsilon: float, scale: float
) -> None:
    g, types = torch.Generator().manual_seed(seed), types_for(device)
    (dtype, product), width = types[pair % len(types)], width_for(device, width)
    hidden = (scale * torch.randn(rows, width, generator=g)).to(dtype)
    addend = torch.randn(rows, width, generator=g).to(product) if added else None
    weight = 1 + 0.3 * torch.randn(width, generator=g)
    normed = torch.empty(rows, width, dtype=product)
    total = (hidden + addend).to(dtype) if addend is not None else hidden
    exact = total.double() * (total.double().square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.double()
    for result in both("rms_norm", [hidden, addend, weight, epsilon, normed], device):
        assert same_bits(result[0], total)
        error = (result[4].double() - exact).abs()
        allowed = (2.2 * UNIT[dtype] + UNIT[product]) * exact.abs() + 1e-7
        assert (error <= allowed).all(), (error - allowed).max()


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), rows=st.integers(0, 5), width=st.integers(0, 130), pair=st.integers(0, 4),
    scale=st.sampled_from([1e-3, 1.0, 40.0]),
)  # fmt: skip
def test_silu_mul(device: str, seed: int, rows: int, width: int, pair: int, scale: float) -> None:
    g, types = torch.Generator().manual_seed(seed), types_for(device)
    dtype, width = types[pair % len(types)][0], width_for(device, width)
    halves = torch.randn(rows, 2 * width, generator=g)
    halves[:, :width] *= scale
    halves = halves.to(dtype)
    gate, up = halves.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    for result in both("silu_mul", [halves, torch.empty(rows, width, dtype=dtype)], device):
        error = (result[1].double() - exact).abs()
        assert (error <= 2.2 * UNIT[dtype] * exact.abs() + 1e-7).all(), error.max()


@on_each_device
def test_far_gates_are_closed_or_open(device: str) -> None:
    gate = torch.tensor([[-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30, torch.nan]])
    both = torch.cat([gate, torch.full_like(gate, 2.0)], dim=1).to(device)
    gated = ops.silu_mul(both).cpu()[0]
    assert gated[:4].abs().max() <= 1e-6
    assert gated[4:7].tolist() == [200.0, 2e4, 2 * float(gate[0, 6])]
    assert gated[7].isnan()


@without_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_norm_or_a_gate_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, both = torch.randn(300, 96, generator=g).to(dtype), torch.randn(300, 192, generator=g).to(dtype)
    weight = torch.ones(96)
    normed, gated = ops.rms_norm(hidden.clone(), weight, 1e-6, hidden), ops.silu_mul(both)
    for b in (0, 1, 150, 299):
        own = hidden[b : b + 1].clone()
        assert same_bits(ops.rms_norm(own.clone(), weight, 1e-6, own), normed[b : b + 1])
        assert same_bits(ops.silu_mul(both[b : b + 1]), gated[b : b + 1])


def test_a_result_of_another_type_needs_float32() -> None:
    with pytest.raises(UserError, match="give float32 hidden states"):
        ops.rms_norm(torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(8), 0.0, dtype=torch.float32)
