"""Every evicting compressor in rollouts of real models: replayed exactly, and the same in any batch and slot."""

from __future__ import annotations

from typing import Any

import pytest
from rollouts import PROMPTS, SMALL, assert_replayed, assert_same, roll_out, small_model

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.records import NEVER
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams

METHODS: list[c.Compressor] = [
    c.KNorm(**SMALL),
    c.KNorm(**SMALL, compress_prompt=False),
    c.KeyDiff(**SMALL),
    c.TOVA(budget=12, buffer=1, num_sinks=0, window=1),  # as in the paper
    c.CUR(**SMALL, local_window=4),
    c.LagKV(**SMALL, lag_size=4),
    c.ExpectedAttention(**SMALL, query_window=9, num_future=40),
    c.ExpectedAttention(**SMALL, query_window=3, covariance="diagonal"),
    c.Combined([c.SnapKV(**SMALL)], across_heads="max"),
    c.Combined([c.SnapKV(**SMALL), c.ExpectedAttention(**SMALL, query_window=6), c.KeyDiff(**SMALL)], [3, 2, 1]),
    c.H2O(**SMALL),
    c.H2O(**SMALL, age_normalized=True, value_weighted=True, compress_prompt=False),
    c.H2O(**SMALL, budget_rule=Adaptive(8, layers=Pyramid(1.5))),
    c.TOVA(**SMALL, budget_rule=Adaptive(7)),  # heads come to hold different tokens
    c.Combined([c.SnapKV(**SMALL, budget_rule=Adaptive())], across_heads="max"),
    c.Combined([c.H2O(**SMALL), c.SnapKV(**SMALL), c.Combined([c.H2O(**SMALL)], across_heads="max")]),
    c.KeyDiff(budget=46, buffer=5, window=4, protect_prompt=True, protect_token_ids=[7]),
    c.RandomAttention(budget=46, buffer=5, window=4),
    c.OldestTurns(budget=46, buffer=5, window=4),
    c.VaSE(**SMALL),
    c.SnapKV(**SMALL, aggregation="max_clamped", variant="original", pooling="avg"),
    c.Smoothed(c.SnapKV(**SMALL, budget_rule=Adaptive(8, layers=Pyramid(1.5)))),
    c.Smoothed(c.H2O(**SMALL), decay=0.5),
]
IDS = [f"{index}-{type(compressor).__name__}" for index, compressor in enumerate(METHODS)]


def check(policy: Any, compressor: c.Compressor) -> None:
    params = SamplingParams(num_generations=2, max_completion_length=36, temperature=0.9, seed=3)
    rollout = roll_out(policy, compressor, 3, params=params)
    assert_replayed(policy, rollout, 0.9)
    assert (rollout.evictions.death != NEVER).any()
    assert_same(rollout, roll_out(policy, compressor, params=params))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("compressor", METHODS, ids=IDS)
def test_rollouts_are_replayed_and_independent_of_the_batch(compressor: c.Compressor) -> None:
    """Normalized keys of a policy without training have equal norms, of which rounding would choose."""
    architecture = "llama" if isinstance(compressor, c.KNorm) else "qwen3"
    check(small_model(architecture, eos_token_id=None), compressor)


@pytest.mark.parametrize("method", [c.QFilters, c.TriAttention])
def test_calibrated_ones_too(method: type[c.QFilters] | type[c.TriAttention]) -> None:
    """Statistics of the policy's own rollouts, as a training loop would renew them."""
    policy = small_model(eos_token_id=None)
    params = SamplingParams(num_generations=2, max_completion_length=36, seed=3)
    dense = RolloutSampler(policy, c.KNorm(**SMALL)).generate(PROMPTS, params)
    lengths = dense.prompt_lengths + dense.completion_lengths
    check(policy, method(**SMALL, statistics=gather_statistics(policy, dense.sequences, lengths)))
