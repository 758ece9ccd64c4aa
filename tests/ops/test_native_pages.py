"""summarize_pages, select_pages and page_attention: kernel = reference = float64 loops over single heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import (
    EMULATED,
    assert_attended,
    cpu_complaints,
    dtypes_for,
    head_rows,
    make_pools,
    on_each_device,
    pick_slots,
    same_bits,
    shape_for,
    shapes,
    tolerance,
    uniform_pools,
    without_kernels,
)
from test_native_attention import both, groups
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.select_pages import keep_pages, list_pages, page_scores

vectors = st.sampled_from([1, 2])
page_sizes = st.integers(1, 7)


def make_summaries(g: torch.Generator, lengths: Tensor, page_size: int, count: int, dim: int, spare: int = 0) -> Tensor:
    """(S, H, C, P, D) of random numbers, the larger vector first, with room for every head's pages."""
    pages = -(-int(lengths.max()) // page_size) + spare
    return torch.randn(*lengths.shape, count, pages, dim, generator=g).sort(dim=2, descending=True).values


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), shape=shapes, page_size=page_sizes, count=vectors, spare=st.integers(0, 2),
    newest_only=st.booleans(),
)  # fmt: skip
def test_summaries(
    device: str, seed: int, shape: dict, page_size: int, count: int, spare: int, newest_only: bool
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape).layer(0)
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    before = make_summaries(g, pools.lengths, page_size, count, dim, spare).to(dtype)
    chosen = pick_slots(g, slots)
    args = [pools.keys, chosen, pools.offsets, pools.lengths, page_size, newest_only, before]
    native, reference = (result[6] for result in both("summarize_pages", args, device))
    expected = before.double().clone()
    for slot in [s for s in chosen.tolist() if s >= 0]:
        for h in range(heads):
            keys = pools.keys[head_rows(pools, slot, h)].double()
            for page, own in enumerate(keys.split(page_size)):
                if len(own) < page_size or (newest_only and (page + 1) * page_size != len(keys)):
                    continue
                want = own.mean(0, keepdim=True) if count == 1 else torch.stack([own.amax(0), own.amin(0)])
                expected[slot, h, :, page] = want
    for result in (native, reference):
        torch.testing.assert_close(result.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@on_each_device
@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6), shape=shapes, group=groups, page_size=page_sizes, count=vectors,
    group_max=st.booleans(),
    num_first=st.integers(0, 2), num_last=st.integers(1, 3), ties=st.booleans(),
)  # fmt: skip
def test_selection(
    device: str, seed: int, shape: dict, group: int, page_size: int, count: int, group_max: bool, num_first: int,
    num_last: int, ties: bool,
) -> None:  # fmt: skip
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape).layer(0)
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    summaries = make_summaries(g, pools.lengths, page_size, count, dim, spare=1)
    summaries = (summaries.round() if ties else summaries).to(dtype)
    if ties:
        summaries[..., 1:] = 0
    query, chosen = torch.randn(slots, heads * group, dim, generator=g).to(dtype), pick_slots(g, slots)
    limits = num_first + num_last + torch.randint(0, 4, (slots,), generator=g, dtype=torch.int32)
    width = int(min(limits.max(), summaries.shape[3]))
    scores = torch.full((slots, heads, summaries.shape[3]), 7.0)
    pages = torch.full((slots, heads, width), 7, dtype=torch.int32)
    args = [query, summaries, chosen, pools.lengths, limits, page_size, num_first, num_last, group_max, scores, pages]
    for result in both("select_pages", args, device):
        for b, slot in enumerate(chosen.tolist()):
            for h in range(heads):
                length = int(pools.lengths[slot, h]) if slot >= 0 else 0
                own, listed = result[9][b, h], [p for p in result[10][b, h].tolist() if p >= 0]
                there, limit = -(-length // page_size), int(limits[b])
                competing = list(range(num_first, there - num_last)) if there > limit else []
                if competing:
                    want = brute_scores(query[b, h * group : (h + 1) * group], summaries[slot, h], group_max)[competing]
                    torch.testing.assert_close(own[competing].double(), want, atol=1e-4, rtol=1e-4)
                rest = [p for p in range(len(own)) if p not in competing]
                assert (own[rest] == 0).all()
                free = limit - num_first - num_last
                best = sorted(competing, key=lambda p: (-float(own[p]), p))[:free]
                always = [p for p in range(there) if p not in competing]
                assert listed == sorted(always + best)
                assert result[10][b, h].tolist() == listed + [-1] * (width - len(listed))


def brute_scores(queries: Tensor, summaries: Tensor, group_max: bool) -> Tensor:
    """(P,) float64, head by head and page by page: (G, D) queries on (C, P, D) vectors."""
    queries, summaries = queries.double(), summaries.double()
    heads = []
    for q in queries:
        products = [q * vector for vector in summaries]  # each (P, D)
        heads.append((products[0] if len(products) == 1 else torch.maximum(*products)).sum(-1))
    stacked = torch.stack(heads)
    return stacked.amax(0) if group_max else stacked.mean(0)


@on_each_device
@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6), shape=shapes, group=groups, page_size=page_sizes, spare=st.integers(0, 2),
    everything=st.booleans(),
)  # fmt: skip
def test_page_attention(
    device: str, seed: int, shape: dict, group: int, page_size: int, spare: int, everything: bool
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape).layer(-1)
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    chosen = pick_slots(g, slots)
    query = (2 * torch.randn(slots, heads * group, dim, generator=g)).to(dtype)
    counts = -(-pools.lengths[chosen.clamp(min=0)] // page_size)
    there = torch.arange(int(counts.max()) + 1) < counts.unsqueeze(-1)
    keep = there & (torch.rand(there.shape, generator=g) < (1.0 if everything else 0.6))
    pages = torch.nn.functional.pad(list_pages(keep, keep.shape[-1]), (0, spare), value=-1)
    out, lse = torch.full_like(query, 7), torch.full((slots, heads * group), 7.0)
    args = [query, pools.keys, pools.values, chosen, pools.offsets, pools.lengths, pages, page_size, 0.3, out, lse]
    native, reference = both("page_attention", args, device)
    read = keep.repeat_interleave(page_size, dim=-1)
    for result in (native, reference):
        assert_attended(pools, chosen, query, 0.3, *result[9:11], close=tolerance(dtype), read=read)


@on_each_device
@pytest.mark.parametrize(("dim", "group"), [(64, 7), (80, 8), (128, 9), (256, 3), (264, 5), (512, 1)])
@pytest.mark.parametrize("page_size", [16, 5, 150])
def test_all_pages_are_everything(device: str, dim: int, group: int, page_size: int) -> None:
    """More than a tile of entries, and tiles that end within a page: on the CPU the very bits of decode_attention."""
    for dtype in dtypes_for(device):
        g = torch.Generator().manual_seed(dim)
        pools = make_pools(g, layers=1, slots=3, heads=2, dim=dim, capacity=700, dtype=dtype, kind="random").layer(0)
        query, slots = torch.randn(3, 2 * group, dim, generator=g).to(dtype), torch.tensor([2, 0, 1])
        counts = -(-pools.lengths[slots] // page_size)
        pages = list_pages(torch.arange(700 // page_size + 1) < counts.unsqueeze(-1), 700 // page_size + 1)
        pools, query, slots, pages = (
            type(pools)(**{name: t.to(device) for name, t in vars(pools).items()}), query.to(device), slots.to(device),
            pages.to(device),
        )  # fmt: skip
        whole = ops.decode_attention(pools, slots, query, dim**-0.5, 700)
        paged = ops.page_attention(pools, slots, query, pages, page_size, dim**-0.5)
        torch.testing.assert_close(paged, whole, atol=tolerance(dtype), rtol=tolerance(dtype))
        if device == "cpu" and not EMULATED:
            assert same_bits(paged, whole)


@without_kernels
def test_a_row_does_not_depend_on_the_batch() -> None:
    g = torch.Generator().manual_seed(2)
    whole = make_pools(g, layers=1, slots=6, heads=2, dim=64, capacity=300, dtype=torch.bfloat16, kind="random")
    pools = whole.layer(0)
    query = torch.randn(6, 10, 64, generator=g).bfloat16()
    slots = torch.tensor([3, 1, 5, 0, 2, 4])
    summaries = make_summaries(g, pools.lengths, 8, 2, 64).bfloat16()
    limits = torch.tensor([5, 9, 7, 4, 30, 11], dtype=torch.int32)

    def run(rows: slice) -> list[Tensor]:
        pages, scores = ops.select_pages(pools, slots[rows], query[rows], summaries, limits[rows], 8, 1, 2, "max", 30)
        return [pages, scores, ops.page_attention(pools, slots[rows], query[rows], pages, 8, 0.1)]

    together = run(slice(None))
    for b in range(6):
        assert all(same_bits(one, all_[b : b + 1]) for one, all_ in zip(run(slice(b, b + 1)), together, strict=True))


def test_more_query_heads_than_a_kernel_takes_at_once() -> None:
    g = torch.Generator().manual_seed(3)
    queries, summaries = torch.randn(1, 2, 19, 1, 24, generator=g), torch.randn(1, 2, 2, 40, 24, generator=g)
    pools = make_pools(g, layers=1, slots=1, heads=2, dim=24, capacity=160, dtype=torch.float32, kind="random",
                       full=True).layer(0)  # fmt: skip
    pools.lengths.fill_(min(int(pools.capacities.min()), 160))
    for reduction in ("mean", "max"):
        pages, scores = ops.select_pages(
            pools, torch.tensor([0]), queries.flatten(1, 2).squeeze(2), summaries, torch.tensor([4], dtype=torch.int32),
            4, 1, 2, reduction, 4,
        )  # fmt: skip
        want = page_scores(queries.double(), summaries.double(), reduction).squeeze(2)
        counts = -(-pools.lengths // 4)
        inside = torch.arange(40).view(1, 1, -1)
        inside = (inside >= 1) & (inside < (counts - 2).unsqueeze(-1))
        torch.testing.assert_close(scores.double(), want.masked_fill(~inside, 0.0), atol=1e-5, rtol=1e-5)
        keep = keep_pages(scores, counts, torch.tensor(4), 1, 2)
        assert torch.equal(pages, list_pages(keep, 4))


def test_ties_go_to_the_first_page() -> None:
    keep = keep_pages(torch.tensor([[0.0, 1, 1, 1, torch.nan, 1, 0]]), torch.tensor([7]), torch.tensor([4]), 1, 1)
    assert keep.tolist() == [[True, True, True, False, False, False, True]]


@cpu_complaints
@pytest.mark.parametrize(
    ("pages", "match"), [([[0, 4]], "page 4"), ([[1, 0]], "page 0"), ([[1, 1]], "does not ascend")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_lists_of_pages_are_refused(pages: list[list[int]], match: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    pools = make_pools(g, layers=1, slots=1, heads=1, dim=8, capacity=8, dtype=dtype, kind="random").layer(0)
    pools.lengths.fill_(1)
    pools.capacities.fill_(8)
    pools.lengths.fill_(min(8, int(len(pools.keys) - pools.offsets.max())))
    query = torch.zeros(1, 2, 8, dtype=dtype)
    with pytest.raises(RuntimeError, match="page" if dtype == torch.float64 else match):
        ops.page_attention(pools, torch.tensor([0]), query, torch.tensor([pages], dtype=torch.int32), 2, 1.0)


@cpu_complaints
def test_what_finds_no_room_is_refused() -> None:
    g = torch.Generator().manual_seed(0)
    pools = make_pools(g, layers=1, slots=1, heads=1, dim=8, capacity=9, dtype=torch.float32, kind="random").layer(0)
    pools.offsets.zero_()
    pools.lengths.fill_(5)
    limits, query = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 2, 8)
    for native in (torch.float32, torch.float64):
        own = type(pools)(pools.keys.to(native), pools.values.to(native), *list(vars(pools).values())[2:])
        room = torch.zeros(1, 1, 1, 2, 8, dtype=native)
        with pytest.raises(RuntimeError, match="a head holds 5 entries"):
            ops.summarize_pages(own, torch.tensor([0]), 2, room)
        room = torch.zeros(1, 1, 1, 3, 8, dtype=native)
        with pytest.raises(RuntimeError, match=r"pages, more than the 2|more pages than the 2"):
            ops.select_pages(own, torch.tensor([0]), query.to(native), room, limits, 2, 1, 1, "mean", 2)


@pytest.mark.parametrize(("num_first", "num_last", "page_size"), [(-1, 1, 2), (0, 0, 2), (1, 1, 0)])
def test_numbers_out_of_range_are_refused(num_first: int, num_last: int, page_size: int) -> None:
    pools = uniform_pools((1, 1), 4, 8, torch.float32)
    limits, room = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 1, 1, 3, 8)
    with pytest.raises(ValueError, match=f"got num_first={num_first}|page_size must be at least 1"):
        ops.select_pages(
            pools, torch.tensor([0]), torch.zeros(1, 2, 8), room, limits, page_size, num_first, num_last, "mean", 3
        )
