"""Budget rules: published numbers, totals that hold, and a brute-force version of the adaptive one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.budgets import Adaptive, BudgetRule, Pyramid, Uniform
from sparse_rl_lightning.compressors import StreamingLLM
from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.ops.evict import pinned_entries
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.testing import random_layer

KVPRESS_PYRAMIDS = [  # kvpress 0.5.5, PyramidKVPress.get_layer_budget: budget, layers, beta, window, budgets
    (512, 4, 20, 12, [998, 674, 350, 26]),
    (100, 7, 3, 8, [167, 144, 122, 100, 78, 56, 33]),
    (33, 2, 2, 4, [50, 16]),
]


class Given(Compressor):
    """Scores that a test chose."""

    def __init__(self, scores: Tensor, **sizes: Any) -> None:
        super().__init__(**{"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3, **sizes})
        self.scores = scores

    def score(self, layer: LayerState) -> Tensor:
        return self.scores


def test_uniform_gives_everybody_the_same() -> None:
    assert Uniform().layer_budgets(7, 3, 2) == [7, 7, 7]
    scores = torch.rand(2, 3, 9)
    budgets = Uniform().head_budgets(scores, scores > 0.5, 7, 2)
    assert torch.equal(budgets, torch.full((2, 3), 7, dtype=torch.int32))


@pytest.mark.parametrize(("budget", "num_layers", "beta", "minimum", "expected"), KVPRESS_PYRAMIDS)
def test_pyramid_gives_the_numbers_of_kvpress(
    budget: int, num_layers: int, beta: float, minimum: int, expected: list[int]
) -> None:
    assert Pyramid(beta).layer_budgets(budget, num_layers, minimum) == expected


@given(budget=st.integers(1, 5000), num_layers=st.integers(1, 80), beta=st.floats(1, 100))
def test_pyramid_moves_tokens_and_adds_none(budget: int, num_layers: int, beta: float) -> None:
    budgets = Pyramid(beta).layer_budgets(budget, num_layers, 0)
    assert budgets == sorted(budgets, reverse=True)
    assert abs(sum(budgets) - budget * num_layers) <= 1  # a line and its mirror image round alike
    assert abs(budgets[-1] - (budget / beta if num_layers > 1 else budget)) <= 0.5
    steps = [a - b for a, b in itertools.pairwise(budgets)]
    assert not steps or max(steps) - min(steps) <= 1


def test_pyramid_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"last of 4 layers would keep 5 .* fewer than the 12 .* = 240.* to 8\.33"):
        Pyramid().layer_budgets(100, 4, 12)
    assert Pyramid().layer_budgets(240, 4, 12)[-1] == 12
    assert Pyramid(8.33).layer_budgets(100, 4, 12)[-1] == 12
    with pytest.raises(ValueError, match=r"beta must be at least 1.*beta=0\.5"):
        Pyramid(0.5)


def test_a_compressor_asks_its_rule() -> None:
    assert StreamingLLM(20).layer_budgets(3) == [20, 20, 20]
    assert StreamingLLM(30, num_sinks=1, window=4, budget_rule=Pyramid(2)).layer_budgets(3) == [45, 30, 15]
    with pytest.raises(ValueError, match="fewer than the 12 of num_sinks"):
        StreamingLLM(30, budget_rule=Pyramid(4)).layer_budgets(3)


# ---------------------------------------------------------------- per head


def plan(scores: Tensor, rule: BudgetRule, layer: LayerState, layer_budget: int | None = None) -> Tensor:
    return Given(scores, budget_rule=rule).plan_eviction(layer, layer_budget)[1]


def brute_force(scores: Tensor, candidates: Tensor, layer_budget: int, minimum: int, floor: int) -> list[int]:
    """One slot: fill the floors of all heads, then take what is best anywhere."""
    num_heads, num_entries = scores.shape
    entries = [(h, n) for h in range(num_heads) for n in range(num_entries) if candidates[h, n]]
    by_score = sorted(entries, key=lambda e: -float(scores[e]))  # stable: ties stay in order of head and index
    chosen = [e for h in range(num_heads) for e in [b for b in by_score if b[0] == h][: max(floor - minimum, 0)]]
    rest = [e for e in by_score if e not in chosen]
    chosen += rest[: (layer_budget - minimum) * num_heads - len(chosen)]
    return [minimum + sum(e[0] == h for e in chosen) for h in range(num_heads)]


@pytest.mark.parametrize("floor", [0, 6, 7, 10, None])
@pytest.mark.parametrize("seed", range(4))
def test_adaptive_keeps_the_best_of_all_heads(seed: int, floor: int | None) -> None:
    layer = random_layer(seed, lengths=[[14, 14], [14, 9], [12, 14]])
    scores = torch.randn(3, 2, 14)
    scores[:, 1] += 1  # the second head has more to say
    scores[:, :, 4:7] = scores[:, :, 4:5]  # ties
    budgets = plan(scores, Adaptive(floor), layer)
    candidates = layer.valid & ~pinned_entries(layer.valid, layer.positions, 2, 3)
    wanted = [brute_force(scores[s], candidates[s], 10, 5, 2 if floor is None else floor) for s in range(3)]
    assert budgets.dtype == torch.int32
    assert budgets.tolist() == wanted
    assert budgets[0].sum() == 20


def test_adaptive_does_not_compare_slots() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    scores = torch.randn(3, 2, 14)
    before = plan(scores, Adaptive(), layer)
    scores[1] *= 100
    assert torch.equal(plan(scores, Adaptive(), layer), before)


def test_adaptive_ignores_what_sinks_and_window_score() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    scores = torch.randn(3, 2, 14)
    before = plan(scores, Adaptive(), layer)
    pinned = pinned_entries(layer.valid, layer.positions, 2, 3)
    scores[pinned] = torch.randn(int(pinned.sum())) * 100
    assert torch.equal(plan(scores, Adaptive(), layer), before)


def test_adaptive_reads_no_free_memory() -> None:
    layer = random_layer(lengths=[[14, 7], [14, 9], [12, 14]])
    scores = torch.randn(3, 2, 14)
    before = plan(scores.masked_fill(~layer.valid, 1e30), Adaptive(), layer)
    assert torch.equal(plan(scores.masked_fill(~layer.valid, torch.nan), Adaptive(), layer), before)


def test_adaptive_within_a_pyramid_keeps_the_layers_total() -> None:
    rule = Adaptive(layers=Pyramid(2))
    assert rule.layer_budgets(9, 2, 4) == [14, 4]
    layer = random_layer(lengths=[[14, 14]] * 3)
    for layer_budget in (5, 8, 12):
        assert (plan(torch.randn(3, 2, 14), rule, layer, layer_budget).sum(dim=1) == 2 * layer_budget).all()


def test_adaptive_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="floor=30 exceeds the 20 tokens per head of layer 0"):
        Adaptive(30).layer_budgets(20, 3, 5)
    with pytest.raises(ValueError, match="exceeds the 4 tokens per head of layer 1"):
        Adaptive(6, layers=Pyramid(2)).layer_budgets(9, 2, 4)
    with pytest.raises(ValueError, match="floor=-1"):
        Adaptive(-1)


def test_select_keeps_what_the_rule_allows() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    scores = torch.randn(3, 2, 14)
    compressor = Given(scores, budget_rule=Adaptive(6))
    assert torch.equal(compressor.select(layer).sum(dim=-1), compressor.plan_eviction(layer)[1])


def test_entries_that_must_stay_get_their_place_or_an_error() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    scores = torch.rand(3, 2, 14)
    scores[0, 1, 2:10] = torch.inf  # beside 2 sinks and 3 most recent
    message = r"Given: 13 entries of a head in layer 1 must stay.*keeps only 10\. Raise budget=10"
    with pytest.raises(ValueError, match=message):
        Given(scores).plan_eviction(layer)
    assert Given(scores, budget_rule=Adaptive(0)).plan_eviction(layer)[1][0].tolist() == [7, 13]
    assert Given(scores, budget_rule=Adaptive(10)).plan_eviction(layer)[1][0].tolist() == [7, 13]  # before any floor
    scores[0, 1, 7:10] = 0.0
    assert Given(scores).select(layer)[0, 1, 2:7].all()
