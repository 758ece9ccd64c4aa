"""Another default type of torch, as Lightning's half precision and float64 set it, changes nothing of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rollout_cases import put_back
from transformers import PreTrainedModel

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning import budgets, compressors, retrievers
from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid, Uniform
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Centroid, Quest
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, retrieval_logprobs
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout
from sparse_rl_lightning.testing import random_layer, tiny_model
from tests.learned import learned_score

PROMPTS = [list(range(5, 5 + n)) for n in (3, 30)]
PARAMS = SamplingParams(max_completion_length=14, seed=3, top_p=0.95)
SMALL: dict[str, Any] = {"budget": 16, "buffer": 5, "num_sinks": 2, "window": 4}
WIDE: dict[str, Any] = {"budget": 900, "buffer": 380, "num_sinks": 2, "window": 4}
KINDS = (torch.bfloat16, torch.float16, torch.float64)


def methods(statistics: Any, **sizes: Any) -> list[c.Compressor]:
    """Every compressor, wrapper and budget rule."""
    snap = {**sizes, "budget_rule": Adaptive(7, layers=Pyramid(1.5))}
    return [
        c.FullKV(), c.StreamingLLM(**sizes), c.RandomEviction(**sizes), c.KNorm(**sizes), c.KeyDiff(**sizes),
        c.CUR(**sizes), c.LagKV(**sizes, lag_size=4), c.TOVA(**sizes), c.SnapKV(**sizes), c.RKV(**sizes),
        c.ExpectedAttention(**sizes),
        c.H2O(**sizes), c.H2O(**sizes, age_normalized=True, value_weighted=True),
        c.QFilters(**sizes, statistics=statistics), c.TriAttention(**sizes, statistics=statistics),
        c.Combined([c.SnapKV(**sizes)], across_heads="max"),
        c.Combined([c.KNorm(**sizes)], normalization="standard", across_heads="mean"),
        c.Combined([c.SnapKV(**sizes), c.H2O(**sizes)], [3, 1]), c.Combined([c.KNorm(**sizes), c.TOVA(**sizes)]),
        c.KeyDiff(**sizes, protect_token_ids=[7]), c.SnapKV(**snap), c.LagKV(**snap, lag_size=4),
        c.SnapKV(**{**sizes, "budget_rule": Uniform()}), c.KNorm(**{**sizes, "budget_rule": Pyramid(1.5)}),
        c.KNorm(**{**sizes, "budget": LengthSchedule((0, 20, 30), (10, 13, 16))}),
        learned_score(**sizes),
        c.RandomAttention(**{**sizes, "budget": sizes["budget"] + 20}), c.VaSE(**sizes),
        c.SnapKV(**sizes, aggregation="max_clamped"), c.Smoothed(c.SnapKV(**sizes)),
        c.OldestTurns(**sizes, protect_prompt=False),
    ]  # fmt: skip


NUMBER = 31
every_method = pytest.mark.parametrize("index", range(NUMBER))


@contextmanager
def default(kind: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(kind)
    try:
        yield
        assert torch.get_default_dtype() == kind, "the default type leaks"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    return tiny_model(initializer_range=0.2, eos_token_id=None)


@pytest.fixture(scope="module")
def statistics(policy: PreTrainedModel) -> Any:
    ids = torch.randint(3, 128, (4, 30), generator=torch.Generator().manual_seed(0))
    return gather_statistics(policy, ids, torch.full((4,), 30))


def assert_same(a: Rollout, b: Rollout) -> None:
    """Every tensor, its type included."""
    one, other = a.state(), b.state()
    for part in ("evictions", "kv"):
        one |= one.pop(part, None) or {}
        other |= other.pop(part, None) or {}
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert other[name].dtype == value.dtype, name
            assert torch.equal(other[name], value), name


def test_all_of_them_are_here(statistics: Any) -> None:
    def parts(method: c.Compressor) -> list[Any]:
        rule = method.budget_rule
        inner = [part for own in getattr(method, "_parts", []) for part in parts(own)]
        return [method, rule, getattr(rule, "layers", rule), *inner]

    used = {type(part).__name__ for method in methods(statistics, **SMALL) for part in parts(method)}
    base = {"Compressor", "QueryStatistics", "BudgetRule"}
    named = [name for name in [*compressors.__all__, *vars(budgets)] if isinstance(vars_of(name), type)]
    assert {n for n in named if issubclass(vars_of(n), c.Compressor | budgets.BudgetRule)} - base <= used
    assert set(retrievers.__all__) - {"Retriever"} == {"Centroid", "Quest"}
    assert len(methods(statistics, **SMALL)) == NUMBER


def vars_of(name: str) -> Any:
    return getattr(compressors, name, None) or getattr(budgets, name, None)


@every_method
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])], ids=str
)
def test_rollouts_are_the_same(policy: PreTrainedModel, statistics: Any, index: int, kind: torch.dtype) -> None:
    method = methods(statistics, **SMALL)[index]
    sampler = RolloutSampler(policy, method, num_slots=3, max_prefill_tokens=20)
    with default(kind):
        rollout = RolloutSampler(policy, method, num_slots=3, max_prefill_tokens=20).generate(PROMPTS, PARAMS)
    assert_same(sampler.generate(PROMPTS, PARAMS), rollout)


@every_method
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scores_and_kept_sets_are_the_same_without_a_sampler(statistics: Any, index: int, kind: torch.dtype) -> None:
    """On slots wide enough for half precision to round whole numbers."""
    method = methods(statistics, **(WIDE | ({"budget": 1276} if index == 24 else {})))[index]
    if not method.evicts:
        return
    layer = random_layer(
        capacity=1280, num_sinks=2, window=4, num_queries=method.num_queries, state_fields=method.state_fields
    )
    scores, budget = method.plan_eviction(layer)
    kept = method.select(layer)
    with default(kind):
        others, other_budget = method.plan_eviction(layer)
        assert torch.equal(method.select(layer), kept)
    assert torch.equal(other_budget, budget)
    assert others.dtype == scores.dtype == torch.float32
    assert torch.equal(others[layer.valid], scores[layer.valid])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("retriever", [Centroid, Quest])
def test_retrieval_is_the_same(policy: PreTrainedModel, retriever: Callable[..., Any], kind: torch.dtype) -> None:
    for method, schedule in ((c.FullKV(), 16), (c.SnapKV(**SMALL), LengthSchedule((0, 20), (12, 16)))):
        own = retriever(schedule, page_size=4, num_dense_layers=1)
        with default(kind):
            rollout = RolloutSampler(policy, method, retriever=own).generate(PROMPTS, PARAMS)
            logprobs = None if method.evicts else retrieval_logprobs(policy, rollout, own).logprobs
        assert_same(RolloutSampler(policy, method, retriever=own).generate(PROMPTS, PARAMS), rollout)
        if logprobs is not None:
            assert torch.equal(retrieval_logprobs(policy, rollout, own).logprobs, logprobs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sessions_and_forced_texts_are_the_same(policy: PreTrainedModel, kind: torch.dtype) -> None:
    method = c.H2O(**SMALL)
    whole = RolloutSampler(policy, method, 4).generate(PROMPTS, PARAMS)
    forced = forced_rollout(policy, whole, method)
    with default(kind):
        sampler = RolloutSampler(policy, method, 4)
        session = RolloutSession(sampler, PARAMS, 30)
        numbers = session.add(PROMPTS, range(2))
        session.advance(max_steps=9)
        put_back(session)
        session.advance()
        rollout = session.take(numbers)
        rollout.policy_versions = None
        assert_same(whole, rollout)
        assert_same(forced, forced_rollout(policy, whole, method))
