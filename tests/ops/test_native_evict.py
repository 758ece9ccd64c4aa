"""evict and fork: kernel = reference = a sorted list per head, bit for bit.

Selection keeps sinks, window and the best scores, ties by the lowest index; compaction keeps the order.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import (
    EMULATED,
    copy,
    cpu_complaints,
    head_rows,
    make_pools,
    on_each_device,
    pick_slots,
    same_bits,
    shape_for,
    shapes,
    uniform_pools,
)
from test_native_attention import both
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.evict import compaction_order, select_entries
from sparse_rl_lightning.records import NEVER


def units(layers: int, chosen: Tensor, heads: int) -> list[tuple[int, int, int, int]]:
    """(layer, row, slot, head) of everything a call works on."""
    rows = [(b, slot) for b, slot in enumerate(chosen.tolist()) if slot >= 0]
    return [(layer, b, slot, h) for layer in range(layers) for b, slot in rows for h in range(heads)]


NEVER_OF = {torch.uint8: 255, torch.int16: 2**15 - 1, torch.int32: NEVER}
event_types = st.sampled_from([*NEVER_OF])


def make_log(
    g: torch.Generator, heads: tuple[int, ...], tokens: int, kind: torch.dtype, seen: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """An empty log of deaths, the steps of up to three events of each slot, and the number that its next event has.

    The last event of some slots is at the very step.
    """
    slots = heads[1]
    steps, numbers = torch.full((slots, 5), NEVER, dtype=torch.int32), []
    for slot, before in enumerate(torch.randint(0, 4, (slots,), generator=g).tolist()):
        steps[slot, :before] = torch.arange(before) * 20 + 30
        numbers.append(before)
        if torch.rand((), generator=g) < 0.3:  # another layer was first
            steps[slot, before] = seen[slot]
    return torch.full((*heads, tokens), NEVER_OF[kind], dtype=kind), steps, numbers


score_kinds = st.sampled_from(["random", "ties", "equal", "infinite", "nan", "zeros"])


def make_scores(g: torch.Generator, shape: tuple[int, ...], kind: str) -> Tensor:
    scores = torch.randn(shape, generator=g)
    special = torch.rand(shape, generator=g)
    if kind == "ties":
        return scores.round()
    if kind == "equal":
        return torch.ones(shape)
    if kind == "zeros":  # of both signs, which are equal
        return torch.where(special < 0.5, 0.0, -0.0)
    if kind == "infinite":
        return scores.masked_fill(special < 0.4, -torch.inf).masked_fill(special > 0.8, torch.inf)
    return scores.masked_fill(special < 0.4, torch.nan) if kind == "nan" else scores


def survivors(scores: Tensor, positions: Tensor, budget: int, num_sinks: int, window: int) -> list[int]:
    """Indices that stay: pinned first, then the best scores, the lowest index first; in order."""
    n = len(positions)

    def rank(j: int) -> tuple[bool, float, int]:
        pinned = int(positions[j]) < num_sinks or j >= n - window
        score = float(scores[j])
        return (not pinned, -score if score == score else torch.inf, j)

    return sorted(sorted(range(n), key=rank)[:budget])


@on_each_device
@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6), shape=shapes, kind=score_kinds, num_sinks=st.integers(0, 5), window=st.integers(0, 6),
    full=st.booleans(), recorded=st.booleans(), event_type=event_types,
)  # fmt: skip
def test_evict_in_place(
    device: str, seed: int, shape: dict, kind: str, num_sinks: int, window: int, full: bool, recorded: bool,
    event_type: torch.dtype,
) -> None:  # fmt: skip
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape, full=full)
    layers, slots, heads = pools.lengths.shape
    chosen, seen = pick_slots(g, slots), torch.randint(100, 200, (slots,), generator=g)
    rows, width, tokens = len(chosen), int(pools.lengths.max()) + seed % 2, 2 * shape["capacity"]
    scores = make_scores(g, (layers, rows, heads, width), kind)
    budgets = torch.randint(0, shape["capacity"] + 2, (layers, rows, heads), generator=g).int()
    death, steps, numbers = make_log(g, (layers, slots, heads), tokens, event_type, seen)
    state = torch.randn(len(pools.keys), 2, generator=g)
    args = [scores, budgets, num_sinks, window, chosen, seen, pools.offsets, pools.capacities,
            pools.keys, pools.values, pools.positions, pools.lengths, *((death, state) if recorded else (None, None)),
            *[None] * 6, steps if recorded else None]  # fmt: skip
    native, reference = both("evict", args, device)
    want, want_state, want_death, want_steps = copy(pools), state.clone(), death.clone(), steps.clone()
    untouched = torch.ones(len(pools.keys), dtype=torch.bool)
    for layer, b, slot, h in units(layers, chosen, heads):
        live = head_rows(pools, layer, slot, h)
        keep = survivors(scores[layer, b, h], pools.positions[live], int(budgets[layer, b, h]), num_sinks, window)
        gone = sorted(set(range(live.stop - live.start)) - set(keep))
        there = slice(live.start, live.start + len(keep))
        for pool, source in ((want.keys, pools.keys), (want.values, pools.values), (want_state, state),
                             (want.positions, pools.positions)):  # fmt: skip
            pool[there] = source[live][keep]
        want.lengths[layer, slot, h] = len(keep)
        want_death[layer, slot, h, pools.positions[live][gone].long()] = numbers[slot]
        if gone:
            want_steps[slot, numbers[slot]] = seen[slot]
        untouched[live] = False
    for result in (native, reference):
        assert same_bits(result[11], want.lengths)
        for layer, slot, h in torch.ones(layers, slots, heads).nonzero().tolist():
            live = head_rows(want, layer, slot, h)  # what lies behind the survivors may be anything
            for index, pool in ((8, want.keys), (9, want.values), (10, want.positions), (13, want_state)):
                assert result[index] is None or same_bits(result[index][live], pool[live])
            assert (result[10][live].diff() > 0).all()
        assert result[12] is None or same_bits(result[12], want_death)
        assert result[20] is None or same_bits(result[20], want_steps)
    assert same_bits(native[8][untouched], pools.keys[untouched])
    assert same_bits(native[9][untouched], pools.values[untouched])


@on_each_device
@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
@pytest.mark.parametrize(("dim", "dtype"), [(8, torch.bfloat16), (136, torch.float32)])
def test_evict_in_place_of_long_rows(device: str, dim: int, dtype: torch.dtype, kind: str) -> None:
    g = torch.Generator().manual_seed(6)
    pools = make_pools(g, layers=2, slots=2, heads=2, dim=dim, capacity=1100, dtype=dtype, kind="random", full=True)
    scores = make_scores(g, (2, 2, 2, 1100), kind)
    budgets = (torch.rand(2, 2, 2, generator=g) * pools.lengths).int()
    budgets[0, 0, 0] = 5  # fewer than are pinned
    args = [scores, budgets, 4, 8, torch.tensor([1, 0]), torch.tensor([7000, 8000]), pools.offsets, pools.capacities,
            pools.keys, pools.values, pools.positions, pools.lengths,
            torch.full((2, 2, 2, 2200), 255, dtype=torch.uint8), torch.randn(len(pools.keys), 3, generator=g),
            *[None] * 6, torch.full((2, 255), NEVER, dtype=torch.int32)]  # fmt: skip
    native, reference = both("evict", args, device)
    assert same_bits(native[11], reference[11])
    assert same_bits(native[12], reference[12])
    assert same_bits(native[20], reference[20])
    kept = KVPools(*native[8:11], pools.offsets, pools.capacities, native[11])
    for layer, slot, h in torch.ones(2, 2, 2).nonzero().tolist():
        live = head_rows(kept, layer, slot, h)
        assert all(same_bits(native[i][live], reference[i][live]) for i in (8, 9, 10, 13))
        assert kept.lengths[layer, slot, h] == budgets[layer, 1 - slot, h].minimum(pools.lengths[layer, slot, h])


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), shape=shapes, kind=score_kinds, num_sinks=st.integers(0, 5), window=st.integers(0, 6),
    event_type=event_types,
)  # fmt: skip
def test_evict_from_a_source(
    device: str, seed: int, shape: dict, kind: str, num_sinks: int, window: int, event_type: torch.dtype
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape)
    layers, slots, heads = pools.lengths.shape
    chosen, seen = pick_slots(g, slots), torch.randint(100, 200, (slots,), generator=g)
    source = make_pools(g, **{**shape, "capacity": 2 * shape["capacity"]})  # rows of the call = slots of the source
    width = int(source.lengths.max())
    scores = make_scores(g, (layers, slots, heads, width), kind)
    room = pools.capacities[:, chosen.clamp(min=0)]
    budgets = (torch.rand(room.shape, generator=g) * (room + 1)).int()
    death, steps, numbers = make_log(g, (layers, slots, heads), width + 1, event_type, seen)
    args = [scores, budgets, num_sinks, window, chosen, seen, pools.offsets, pools.capacities, pools.keys, pools.values,
            pools.positions, pools.lengths, death, None, source.keys, source.values, source.offsets,
            source.lengths, None, None, steps]  # fmt: skip
    for result in both("evict", args, device):
        want, want_death, want_steps = copy(pools), death.clone(), steps.clone()
        for layer, b, slot, h in units(layers, chosen, heads):
            live = head_rows(source, layer, b, h)
            length, budget = live.stop - live.start, int(budgets[layer, b, h])
            keep = survivors(scores[layer, b, h], torch.arange(length), budget, num_sinks, window)
            start = int(pools.offsets[layer, slot, h])
            there = slice(start, start + len(keep))
            want.keys[there], want.values[there] = source.keys[live][keep], source.values[live][keep]
            want.positions[there] = torch.tensor(keep, dtype=torch.int32)
            want.lengths[layer, slot, h] = len(keep)
            want_death[layer, slot, h, sorted(set(range(length)) - set(keep))] = numbers[slot]
            if len(keep) < length:
                want_steps[slot, numbers[slot]] = seen[slot]
        assert same_bits(result[11], want.lengths)
        assert same_bits(result[12], want_death)
        assert same_bits(result[20], want_steps)
        assert same_bits(result[8], want.keys)
        assert same_bits(result[9], want.values)
        assert same_bits(result[10], want.positions)


@on_each_device
@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6), shape=shapes, num_queries=st.integers(0, 2), state=st.booleans(),
    event_type=event_types, tokens=st.integers(1, 9),
)  # fmt: skip
def test_fork(
    device: str, seed: int, shape: dict, num_queries: int, state: bool, event_type: torch.dtype, tokens: int
) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **{**shape, "slots": shape["slots"] + 2})
    layers, slots, heads = pools.lengths.shape
    pools.lengths.copy_(pools.lengths.minimum(pools.capacities.amin(1, keepdim=True)))
    order = torch.randperm(slots, generator=g)
    sources = order[:1].repeat(slots)
    sources[2:] = order[torch.randint(0, 2, (slots - 2,), generator=g)]  # two slots forked to the others
    destinations = order.clone()
    destinations[0], destinations[1] = order[0], -1  # onto itself; nowhere
    ring = torch.randn(layers, slots, 2 * heads, num_queries, shape["dim"], generator=g).to(shape["dtype"])
    death = torch.randint(0, 99, (layers, slots, heads, tokens), generator=g).to(event_type)
    running = torch.randn(len(pools.keys), 3, generator=g) if state else None
    args = [sources, destinations, pools.offsets, pools.capacities, pools.keys, pools.values, pools.positions,
            pools.lengths, ring, death, running]  # fmt: skip
    expected = [a.clone() if isinstance(a, Tensor) else a for a in args]
    for source, destination in zip(sources.tolist()[2:], destinations.tolist()[2:], strict=True):
        expected[7][:, destination] = pools.lengths[:, source]
        expected[8][:, destination], expected[9][:, destination] = ring[:, source], death[:, source]
        for layer in range(layers):
            for h in range(heads):
                live = head_rows(pools, layer, source, h)
                to = int(pools.offsets[layer, destination, h])
                for index in (4, 5, 6, 10):
                    if args[index] is not None:
                        expected[index][to : to + live.stop - live.start] = args[index][live]
    for result in both("fork", args, device):
        for got, want in zip(result, expected, strict=True):
            assert got is want is None or same_bits(got, want)


@pytest.mark.parametrize("kind", NEVER_OF)
def test_events_are_counted_until_no_number_is_left(kind: torch.dtype) -> None:
    """One token dies at each of them; the last number is that of the tokens that did not die."""
    count = min(NEVER_OF[kind], 300)
    pools = uniform_pools((1, 1, 1), 2, 8, torch.float32)
    death, steps = torch.full((1, 1, 1, 400), NEVER_OF[kind], dtype=kind), torch.full((1, count), NEVER).int()
    budgets, scores = torch.ones(1, 1, 1, dtype=torch.int32), torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)

    def event(number: int) -> None:
        pools.lengths.fill_(2)
        pools.positions.copy_(torch.tensor([number, 399]))
        seen = torch.tensor([3 * number + 5])
        ops.evict(pools, torch.tensor([0]), scores, budgets, 0, 0, seen, death, event_steps=steps)

    for number in range(count):
        event(number)
    assert death.flatten().tolist() == [*range(count), *[NEVER_OF[kind]] * (400 - count)]
    assert steps[0].tolist() == [3 * number + 5 for number in range(count)]
    if not EMULATED:  # CUDA kernels note it instead
        with pytest.raises(RuntimeError, match="number"):
            event(count)
    else:
        event(count)
        with pytest.raises(RuntimeError, match="no number is left"):
            pools.raise_errors()
    assert (death[..., count:] == NEVER_OF[kind]).all()


def test_nothing_to_store_leaves_an_empty_slot() -> None:
    pools = uniform_pools((1, 1, 1), 4, 8, torch.float32)
    pools.lengths.fill_(3)
    source = uniform_pools((1, 1, 1), 0, 8, torch.float32)
    budgets = torch.full((1, 1, 1), 3, dtype=torch.int32)
    ops.evict(pools, torch.tensor([0]), torch.zeros(1, 1, 1, 2), budgets, 0, 0, torch.tensor([0]), source=source)
    assert pools.lengths.item() == 0


@cpu_complaints
def test_forking_onto_a_source_is_an_error() -> None:
    pools = uniform_pools((1, 3, 1), 4, 8, torch.float32)
    with pytest.raises(RuntimeError, match="slot 1 is both"):
        ops.fork(pools, torch.tensor([0, 1]), torch.tensor([1, 2]))


def ragged(seed: int, slots: int, heads: int, entries: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores on a few levels (so with ties), valid and positions; free memory holds traps."""
    g = torch.Generator().manual_seed(seed)
    shape = (slots, heads, entries)
    valid = torch.arange(entries) < torch.randint(0, entries + 1, (slots, heads, 1), generator=g)
    scores = torch.randint(-levels, levels + 1, shape, generator=g) / 4
    scores[scores == -levels / 4], scores[scores == (1 - levels) / 4] = -torch.inf, -1e38  # a choice before none
    positions = torch.rand(slots, heads, 2 * entries, generator=g).argsort(dim=-1)[..., :entries].sort(dim=-1).values
    traps = torch.tensor([torch.nan, torch.inf, 1e30])[torch.randint(3, shape, generator=g)]
    return torch.where(valid, scores, traps), valid, torch.where(valid, positions, -7)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20)),
    levels=st.sampled_from([0, 1, 3, 1000]),
    num_sinks=st.integers(0, 5),
    window=st.integers(1, 6),
    spare=st.integers(0, 12),
    budget_shape=st.sampled_from(["number", "slots, heads", "heads", "slots, 1"]),
)
def test_kept_set_equals_definition(
    seed: int, shape: tuple[int, int, int], levels: int, num_sinks: int, window: int, spare: int, budget_shape: str
) -> None:
    scores, valid, positions = ragged(seed, *shape, levels)
    least = num_sinks + window
    sizes = {"slots, heads": shape[:2], "heads": (1, shape[1]), "slots, 1": (shape[0], 1)}
    budget: int | Tensor = least + spare
    if budget_shape != "number":
        g = torch.Generator().manual_seed(1)
        budget = torch.randint(least, least + spare + 1, sizes[budget_shape], generator=g)
    keep = select_entries(scores, valid, positions, budget, num_sinks, window)
    budgets = torch.as_tensor(budget).expand(shape[:2])
    for s in range(shape[0]):
        for h in range(shape[1]):
            num_live = int(valid[s, h].sum())
            expected = survivors(scores[s, h], positions[s, h, :num_live], int(budgets[s, h]), num_sinks, window)
            assert keep[s, h].nonzero().flatten().tolist() == expected
            assert len(expected) == min(num_live, int(budgets[s, h]))


def test_sinks_window_and_top_scores_worked_by_hand() -> None:
    positions = torch.tensor([[[0, 1, 5, 6, 9, 12, 13, 99]]])
    valid = torch.tensor([[[True] * 7 + [False]]])
    scores = torch.tensor([[[-9.0, -9.0, 3.0, 1.0, 3.0, 2.0, -9.0, 50.0]]])

    def kept(budget: int, num_sinks: int, window: int) -> list[int]:
        return select_entries(scores, valid, positions, budget, num_sinks, window).nonzero()[:, -1].tolist()

    assert kept(4, num_sinks=2, window=1) == [0, 1, 2, 6]  # entries 2 and 4 tie: the lower index stays
    assert kept(5, num_sinks=2, window=1) == [0, 1, 2, 4, 6]
    assert kept(4, num_sinks=0, window=2) == [2, 4, 5, 6]
    assert kept(7, num_sinks=0, window=1) == kept(100, num_sinks=0, window=1) == [0, 1, 2, 3, 4, 5, 6]
    assert kept(3, num_sinks=1, window=1) == [0, 2, 6]  # only position 0 is a sink
    assert kept(2, num_sinks=6, window=2) != [0, 1]  # a budget below the pins keeps the best of them
    positions[..., 1] = 2  # position 1 is gone: nothing takes its place as a sink
    assert kept(4, num_sinks=2, window=1) == [0, 2, 4, 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_scores_of_any_number_type(dtype: torch.dtype) -> None:
    scores = torch.tensor([[[1, 4, 2, 3, 0]]]).to(dtype)
    everything, positions = torch.ones(1, 1, 5, dtype=torch.bool), torch.arange(5).view(1, 1, 5)
    keep = select_entries(scores, everything, positions, 3, num_sinks=0, window=1)
    assert keep.flatten().tolist() == [False, True, False, True, True]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 25))
def test_compaction_moves_survivors_to_the_front_in_order(seed: int, rows: int, entries: int) -> None:
    keep = torch.rand(rows, 2, entries, generator=torch.Generator().manual_seed(seed)) < 0.6
    source, lengths = compaction_order(keep)
    assert torch.equal(lengths, keep.sum(dim=-1))
    for r in range(rows):
        for h in range(2):
            survivors = keep[r, h].nonzero().flatten().tolist()
            assert source[r, h, : len(survivors)].tolist() == survivors
            assert sorted(source[r, h].tolist()) == list(range(entries))
