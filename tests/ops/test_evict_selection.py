"""Selection keeps sinks, window and the best scores, ties by the lowest index; compaction keeps the order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.ops.evict import compaction_order, select_entries


def kept_indices(
    scores: list[float], positions: list[int], num_live: int, budget: int, num_sinks: int, window: int
) -> list[int]:
    """The definition, one row at a time."""
    live = range(num_live)
    pinned = [n for n in live if positions[n] < num_sinks or n >= num_live - window]
    rest = [n for n in live if n not in pinned]
    for _ in range(max(0, budget - len(pinned))):
        if rest:
            best = max(scores[n] for n in rest)
            pinned.append(next(n for n in rest if scores[n] == best))
            rest.remove(pinned[-1])
    return sorted(pinned)


def ragged(seed: int, slots: int, heads: int, entries: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores on a few levels (so with ties), valid and positions; free memory holds traps."""
    g = torch.Generator().manual_seed(seed)
    shape = (slots, heads, entries)
    valid = torch.arange(entries) < torch.randint(0, entries + 1, (slots, heads, 1), generator=g)
    scores = torch.randint(-levels, levels + 1, shape, generator=g) / 4
    scores[scores == -levels / 4] = -torch.inf
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
        budget = torch.randint(
            least, least + spare + 1, sizes[budget_shape], generator=torch.Generator().manual_seed(1)
        )
    keep = select_entries(scores, valid, positions, budget, num_sinks, window)
    budgets = torch.as_tensor(budget).expand(shape[:2])
    for s in range(shape[0]):
        for h in range(shape[1]):
            num_live = int(valid[s, h].sum())
            expected = kept_indices(
                scores[s, h].tolist(), positions[s, h].tolist(), num_live, int(budgets[s, h]), num_sinks, window
            )
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


def test_negative_infinity_is_the_last_choice_but_a_choice() -> None:
    scores = torch.full((1, 1, 6), -torch.inf)
    scores[..., 3] = -1e38
    everything, positions = torch.ones(1, 1, 6, dtype=torch.bool), torch.arange(6).view(1, 1, 6)
    keep = select_entries(scores, everything, positions, 3, num_sinks=0, window=1)
    assert keep.flatten().tolist() == [True, False, False, True, False, True]


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


def test_positions_increase_strictly_through_repeated_compressions() -> None:
    g = torch.Generator().manual_seed(0)
    entries, budget, seen = 12, 7, 12
    positions = torch.arange(12).expand(2, 3, 12)
    for _ in range(6):
        valid = torch.ones(2, 3, entries, dtype=torch.bool)
        scores = torch.rand(2, 3, entries, generator=g)
        keep = select_entries(scores, valid, positions, budget, num_sinks=2, window=3)
        source, lengths = compaction_order(keep)
        assert bool((lengths == budget).all())
        left = positions.gather(-1, source)[..., :budget]
        assert bool((left.diff(dim=-1) > 0).all())
        assert left[..., :2].unique().tolist() == [0, 1]
        assert left[0, 0, -3:].tolist() == [seen - 3, seen - 2, seen - 1]
        positions = torch.cat([left, torch.arange(seen, seen + entries - budget).expand(2, 3, -1)], dim=-1)
        seen += entries - budget
