"""Given texts under a compressed cache: what a rollout notes, and what the policy says under the record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs

from sparse_rl_lightning import Rollout, RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.compressors import H2O, Compressor, FullKV, RandomEviction, SnapKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.rollout import forced_rollout
from sparse_rl_lightning.testing import tiny_model

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 1, "window": 3}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]  # the second overflows a slot


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(num_layers=3, initializer_range=0.3)


def draw(model: Any, compressor: Compressor, temperature: float = 1.0) -> Rollout:
    params = SamplingParams(num_generations=3, max_completion_length=40, seed=3, temperature=temperature)
    return RolloutSampler(model, compressor).generate(PROMPTS, params)


@pytest.mark.parametrize(
    "compressor",
    [
        FullKV(), RandomEviction(**SIZES), H2O(**SIZES), SnapKV(**SIZES, budget_rule=Adaptive()),
        SnapKV(**SIZES, budget_rule=Pyramid(beta=2)), SnapKV(**SIZES, compress_prompt=False),
        SnapKV(**SIZES | {"budget": LengthSchedule([0, 25], [10, 16])}),
    ],
    ids=["full", "random", "running state", "adaptive", "pyramid", "whole prompt", "schedule"],
)  # fmt: skip
def test_own_compressor_gives_the_rollout_back(model: Any, compressor: Compressor) -> None:
    drawn = draw(model, compressor, temperature=0.8)
    lengths = drawn.completion_lengths
    assert lengths.min() < 40, "one text ends by itself"
    assert lengths.max() == 40
    forced = forced_rollout(model, drawn, compressor, temperature=0.8, seed=3)
    for name in ("sequences", "completion_mask", "prompt_lengths", "finished"):
        assert torch.equal(getattr(forced, name), getattr(drawn, name)), name
    assert_same_logprobs(forced.sampler_logprobs, drawn.sampler_logprobs)
    assert torch.equal(forced.evictions.death, drawn.evictions.death)
    assert torch.equal(forced.kv.stored, drawn.kv.stored)


def test_without_a_seed_random_numbers_are_the_rollouts_whatever_its_ids_and_rows(model: Any) -> None:
    params, method = SamplingParams(num_generations=3, max_completion_length=40, seed=3), RandomEviction(**SIZES)
    for ids, rows in ((None, [4, 1]), ([7, 5, 9, 100, 3, 0], [0, 1, 2, 3, 4, 5])):
        drawn = RolloutSampler(model, method).generate(PROMPTS, params, sequence_ids=ids)[torch.tensor(rows)]
        forced = forced_rollout(model, drawn, method)
        assert torch.equal(forced.evictions.death, drawn.evictions.death)
        assert torch.equal(forced.keys, drawn.keys)
        assert_same_logprobs(forced.sampler_logprobs, drawn.sampler_logprobs)


@pytest.mark.parametrize("kv_dtype", ["fp8", torch.bfloat16])
def test_keys_and_values_are_rounded_as_they_were(model: Any, kv_dtype: Any) -> None:
    params = SamplingParams(num_generations=2, max_completion_length=30, seed=3)
    drawn = RolloutSampler(model, SnapKV(**SIZES), kv_dtype=kv_dtype).generate(PROMPTS, params)
    forced = forced_rollout(model, drawn, SnapKV(**SIZES), seed=3, kv_dtype=kv_dtype)
    assert_same_logprobs(forced.sampler_logprobs, drawn.sampler_logprobs)
    unrounded = forced_rollout(model, drawn, SnapKV(**SIZES), seed=3)
    assert (unrounded.sampler_logprobs - drawn.sampler_logprobs).abs().max() > 1e-3


def test_other_compressor_evicts_from_the_same_words(model: Any) -> None:
    drawn = draw(model, FullKV())
    forced = forced_rollout(model, drawn, SnapKV(**SIZES))
    assert torch.equal(forced.sequences, drawn.sequences)
    assert (forced.sampler_logprobs - drawn.sampler_logprobs).abs().max() > 0.1
    with torch.no_grad():
        assert_same_logprobs(replay_logprobs(model, forced), forced.sampler_logprobs, share=5e-5)


def test_full_cache_says_what_the_policy_says(model: Any) -> None:
    drawn = draw(model, RandomEviction(**SIZES))
    forced = forced_rollout(model, drawn, FullKV(), temperature=0.5)
    with torch.no_grad():
        dense, _ = sequence_logprobs(model, drawn.sequences, drawn.completion_mask, temperature=0.5)
    assert_same_logprobs(forced.sampler_logprobs, dense, share=5e-5)


def test_width_of_a_part_stays(model: Any) -> None:
    drawn = draw(model, FullKV())
    short = drawn[drawn.completion_lengths.argmin().unsqueeze(0)]
    forced = forced_rollout(model, short, SnapKV(**SIZES))
    assert forced.sampler_logprobs.shape == short.sequences.shape
    assert forced.evictions.death.shape[-1] == short.sequences.shape[1]
    with torch.no_grad():
        assert_same_logprobs(replay_logprobs(model, forced), forced.sampler_logprobs, share=5e-5)
