"""DESIGN property 7.2: the learner finds the sampler's log-probs again, for every compressor and budget rule."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs

from sparse_rl_lightning import compressors
from sparse_rl_lightning.budgets import Adaptive, BudgetRule, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import Combined, KNorm, QueryStatistics, SnapKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model
from tests.learned import learned_score

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 33, 1)]
SIZES: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 1, "window": 3}
PARAMS = SamplingParams(num_generations=2, max_completion_length=26, temperature=0.9, seed=4)
NOT_ALONE = ("Compressor", "FullKV", "QueryStatistics", "Combined", "LearnedScore")
EVICTING = sorted(name for name in compressors.__all__ if name not in NOT_ALONE)
RULES: dict[str, BudgetRule | None] = {
    "uniform": None,
    "pyramid": Pyramid(beta=2),
    "adaptive": Adaptive(floor=4),
    "both": Adaptive(floor=4, layers=Pyramid(beta=1.5)),
}
WRAPPED = {
    "learned": learned_score(num_layers=3, **SIZES),
    "union": Combined([SnapKV(**SIZES)], across_heads="max"),
    "mixture": Combined([SnapKV(**SIZES), KNorm(**SIZES)]),
    "protected": SnapKV(budget=40, buffer=4, num_sinks=1, window=3, protect_prompt=True),
}


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return tiny_model(initializer_range=0.2, num_layers=3, eos_token_id=None).to(dtype)


def build(name: str, rule: BudgetRule | None = None, **options: Any) -> compressors.Compressor:
    """A compressor by name, with statistics of the test's model where it wants them."""
    cls = getattr(compressors, name)
    if "statistics" in inspect.signature(cls).parameters:
        options["statistics"] = gathered()
    if name == "LagKV":
        options["lag_size"] = 4  # the default is for large slots
    return cls(**SIZES, budget_rule=rule, **options)


@functools.cache
def gathered() -> QueryStatistics:
    ids = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(0))
    return gather_statistics(model(), ids, torch.full((4,), 40))


def roll_out(policy: torch.nn.Module, compressor: compressors.Compressor) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    """A rollout with its replayed (with gradient) and its dense log-probs; three slots, so refills happen."""
    rollout = RolloutSampler(policy, compressor, num_slots=3).generate(PROMPTS, PARAMS)
    with torch.no_grad():
        dense, _ = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask, 0.9)
    return rollout, replay_logprobs(policy, rollout, 0.9), dense


def assert_exact(compressor: compressors.Compressor) -> Rollout:
    policy = model()
    rollout, replayed, dense = roll_out(policy, compressor)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)
    assert (dense - rollout.sampler_logprobs).abs().max() > 1e-2, "nothing that matters died: this proves nothing"
    replayed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())
    return rollout


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "both") for name in EVICTING), *itertools.product(["H2O", "SnapKV"], ["uniform", "pyramid", "adaptive"])],
)
def test_replay_is_exact(name: str, rule: str) -> None:
    death = assert_exact(build(name, RULES[rule])).evictions.death
    died = (death != NEVER).sum(dim=-1)  # layers, sequences, heads
    assert bool((died[0] != died[-1]).any()) == (rule in ("pyramid", "both")) or rule == "adaptive"


@pytest.mark.parametrize("name", ["H2O", "RKV", "SnapKV", "StreamingLLM"])
@pytest.mark.parametrize("rule", ["uniform", "both"])
def test_replay_is_exact_when_the_prompt_is_stored_whole(name: str, rule: str) -> None:
    death = assert_exact(build(name, RULES[rule], compress_prompt=False)).evictions.death
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS]).repeat_interleave(2)
    assert not bool((death == lengths[:, None, None]).any())  # at the end of a prompt nothing died


@pytest.mark.parametrize("name", WRAPPED)
def test_replay_is_exact_under_wrappers(name: str) -> None:
    assert_exact(WRAPPED[name])


@pytest.mark.parametrize("name", EVICTING)
def test_replay_in_bfloat16(name: str) -> None:
    """Bound: a log-prob is off by 0.03 on average (logits around 8 are rounded by 2^-6) and 0.25 at most.

    The compression of so small a cache moves it by more than 1.
    """
    rollout, replayed, dense = roll_out(model(torch.bfloat16), build(name, Adaptive(floor=4)))
    mask, sampler = rollout.completion_mask, rollout.sampler_logprobs
    noise, compression = ((own.detach() - sampler)[mask].abs() for own in (replayed, dense))
    assert noise.mean() < 0.03
    assert noise.max() < 0.25
    assert compression.mean() > 20 * noise.mean()
