"""check_compressor: every shipped compressor passes, and every way to be wrong is called by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import (
    H2O,
    TOVA,
    Combined,
    Compressor,
    ExpectedAttention,
    FullKV,
    KNorm,
    LagKV,
    OldestTurns,
    QueryStatistics,
    RandomAttention,
    RandomEviction,
    Smoothed,
    SnapKV,
    VaSE,
)
from sparse_rl_lightning.ops import CachedEntries
from sparse_rl_lightning.records import LayerState, StateUpdate
from sparse_rl_lightning.testing import ContractError, check_compressor, random_layer, tiny_model
from sparse_rl_lightning.testing.rules import RULES
from tests.compressors.test_compressors import SHIPPED

SMALL: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
OPTIONS: dict[str, list[dict[str, Any]]] = {  # beside the defaults, or in place of defaults that do not fit
    "CUR": [{}, {"leverage": "mean", "local_window": 4}, {"leverage": "key", "local_window": 0}],
    "ExpectedAttention": [
        {"query_window": 6, "num_future": 32},
        {"query_window": 40, "covariance": "diagonal", "num_sinks": 0},
        {"query_window": 4, "covariance": "none", "value_norm": False},
    ],
    "H2O": [{}, {"age_normalized": True, "value_weighted": True}],
    "LagKV": [{"lag_size": 3}, {"lag_size": 2, "num_sinks": 0}],
    "OldestTurns": [{"protect_prompt": False}, {"budget": 24, "window": 4}],
    "RandomAttention": [{"protect_prompt": False}, {"budget": 24, "window": 4}],
    "RKV": [{}, {"variant": "original", "pooling": "avg", "group_reduction": "mean"}],
    "SnapKV": [{}, {"variant": "original", "pooling": "none", "group_reduction": "mean"}, {"window": 8},
               {"aggregation": "max_clamped", "variant": "original", "pooling": "avg"}, {"aggregation": "max_clamped"}],
    "StreamingLLM": [{}, {"budget": 5, "buffer": 1}, {"compress_prompt": False}],
    "TriAttention": [{}, {"max_offset": 7, "group_reduction": "mean"}],
    "VaSE": [{}, {"num_large": 5, "kernel_size": 1, "num_sinks": 0}],
}  # fmt: skip
CASES = [(cls, options) for cls in SHIPPED for options in OPTIONS.get(cls.__name__, [{}])]
WRAPPED = [
    FullKV(),
    Combined([KNorm(**SMALL)], across_heads="max"),
    Combined([SnapKV(**SMALL)], normalization="standard", across_heads="mean"),
    Combined([SnapKV(**SMALL), TOVA(**SMALL), ExpectedAttention(**SMALL, query_window=5)], [1.0, 2.0, 0.5]),
    Combined([KNorm(**SMALL), RandomEviction(**SMALL)], normalization="standard"),
    Smoothed(SnapKV(**SMALL)),
    Smoothed(Combined([H2O(**SMALL), RandomEviction(**SMALL)]), decay=0.5),
    SnapKV(budget=26, buffer=4, num_sinks=1, window=4, protect_prompt=True),
    SnapKV(**SMALL, protect_prompt=True),
    RandomAttention(**SMALL),
    OldestTurns(**SMALL),
    KNorm(**SMALL, protect_token_ids=[9]),
    SnapKV(**SMALL, protect_observations=1),
    Combined([KNorm(**SMALL, protect_observations=1), TOVA(**SMALL, protect_observations=1)]),
    Combined([method(26, 4, window=4, protect_prompt=True) for method in (KNorm, TOVA)], across_heads="max"),
    SnapKV(**SMALL, budget_rule=Adaptive()),
    Combined([H2O(**SMALL, budget_rule=Pyramid(1.5)), TOVA(**SMALL, budget_rule=Pyramid(1.5))]),
]


@pytest.fixture(scope="module")
def statistics() -> QueryStatistics:
    ids = torch.randint(3, 128, (8, 40), generator=torch.Generator().manual_seed(0))
    return gather_statistics(tiny_model(initializer_range=0.2), ids, torch.full((8,), 40))


@pytest.mark.parametrize(("cls", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_shipped_compressor_keeps_the_contract(
    cls: type[Compressor], options: dict[str, Any], statistics: QueryStatistics
) -> None:
    calibrated = {"statistics": statistics} if cls.__name__ in ("QFilters", "TriAttention") else {}
    check_compressor(cls, **calibrated, **options)


@pytest.mark.parametrize("compressor", WRAPPED, ids=lambda c: f"{type(c).__name__}")
def test_instances_and_wrappers_keep_it(compressor: Compressor) -> None:
    check_compressor(compressor)


def scored(name: str, score: Callable[[Any, LayerState], Tensor], base: type[Compressor] = Compressor) -> Any:
    """A compressor by its score."""
    return type(name, (base,), {"score": score})


def updated(name: str, update_state: Callable[[Any, StateUpdate], object], base: type[Compressor] = H2O) -> Any:
    """A compressor by what it does with running numbers."""
    return type(name, (base,), {"update_state": update_state})


OneHead = scored("OneHead", lambda self, layer: layer.keys.norm(dim=-1)[:, 0])
WholeNumbers = scored("WholeNumbers", lambda self, layer: layer.positions)
ByLayer = scored("ByLayer", lambda self, layer: KNorm.score(self, layer) * (1 + layer.layer_index), KNorm)
Crash = scored("Crash", lambda self, layer: layer.key_norms)
InPlace = scored("InPlace", lambda self, layer: layer.keys.nan_to_num_(0.0).norm(dim=-1))
Dice = scored("Dice", lambda self, layer: torch.rand(layer.valid.shape))
PlaceInTheSlot = scored("PlaceInTheSlot", lambda self, layer: layer.positions / layer.valid.shape[-1])
Overflow = scored("Overflow", lambda self, layer: -(layer.keys.square().sum(dim=-1) ** 4))
Cancels = scored("Cancels", lambda self, layer: layer.keys.sum(dim=-1) + 1000 - 1000)
Coarse = scored("Coarse", lambda self, layer: -layer.keys.norm(dim=-1))  # right but for the rounding of its own numbers
MixedTypes = scored(
    "MixedTypes", lambda self, layer: (layer.keys @ torch.ones(16, 1, dtype=layer.inv_freq.dtype)).squeeze(-1)
)
UnmaskedMean = scored(
    "UnmaskedMean", lambda self, layer: -torch.cosine_similarity(layer.keys, layer.keys.mean(dim=2, keepdim=True), -1)
)
OnTheCPU = scored(
    "OnTheCPU", lambda self, layer: torch.arange(layer.keys.shape[2]).float() * layer.keys.float().norm(dim=-1)
)
Unheard = updated("Unheard", lambda self, update: update.state["mass"].add_(update.mass.sum(dim=2)), KNorm)
MeanOverSlots = updated(
    "MeanOverSlots", lambda self, update: update.state["mass"].add_(update.mass.sum(dim=2).mean(dim=0))
)
Silent = updated("Silent", lambda self, update: update.state["mass"] + update.mass.sum(dim=2))
Undecayed = updated("Undecayed", lambda self, update: update.state["mass"].mul_(0.9).add_(update.mass.sum(dim=2)))


class NoSuperInit(Compressor):
    def __init__(self, **sizes: Any) -> None:
        self.sizes = sizes

    def score(self, layer: LayerState) -> Tensor:
        return layer.positions.float()


class OwnArguments(KNorm):
    def __init__(self, alpha: float) -> None:
        super().__init__(budget=10)


class FractionOfQueries(KNorm):
    num_queries = 0.5


class RemembersInAModule(KNorm):
    """One number of many: in a network, whose parameters count as they are."""

    def __init__(self, budget: int = 10, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.network = torch.nn.Linear(600, 600)

    def score(self, layer: LayerState) -> Tensor:
        self.network.weight.data[17, 4] += 1
        return super().score(layer)


class HeadFieldsAsATuple(H2O):
    head_state_fields = ("count",)  # type: ignore[assignment]


class NewestByPlace(Compressor):
    """Takes the last place of the ring for the newest query."""

    def score(self, layer: LayerState) -> Tensor:
        newest = layer.queries[:, :: layer.group_size, -1].float().nan_to_num()  # (S, H, D)
        return (layer.keys.float() * newest[:, :, None]).sum(dim=-1)


class ZScore(Compressor):
    def score(self, layer: LayerState) -> Tensor:
        norm = layer.keys.norm(dim=-1).masked_fill(~layer.valid, 0)
        mean = norm.sum(-1, keepdim=True) / layer.lengths.unsqueeze(-1)
        centered = (norm - mean).masked_fill(~layer.valid, 0)
        return centered / centered.square().sum(-1, keepdim=True).sqrt()


class Remembers(Compressor):
    def score(self, layer: LayerState) -> Tensor:
        self.last = layer.keys.norm(dim=-1)
        return -self.last


class OverSlots(Compressor):
    def score(self, layer: LayerState) -> Tensor:
        norm = layer.keys.norm(dim=-1).masked_fill(~layer.valid, 0)
        return norm / norm.sum(dim=(0, 2), keepdim=True)


class NoWindow(KNorm):
    def select(self, layer: LayerState, layer_budget: int | None = None) -> Tensor:
        scores = self.score(layer).masked_fill(~layer.valid, -torch.inf)
        best = scores.topk(self.budget, dim=-1).indices
        return torch.zeros_like(layer.valid).scatter(-1, best, True) & layer.valid


class NotAsked(H2O):
    needs_attention = False


class CountsCalls(H2O):
    def head_state_fields(self, head_dim: int) -> dict[str, int]:
        return {"calls": 1}

    def update_state(self, update: StateUpdate) -> None:
        super().update_state(update)
        update.head_state["calls"].add_(1)


class RemembersMass(H2O):
    def update_state(self, update: StateUpdate) -> None:
        super().update_state(update)
        self.last = update.mass


class Lambda(KNorm):
    def __init__(self, budget: int, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.sign = lambda scores: -scores


class NetworkOnTheCPU(H2O):
    """Where hidden states are read; what its scores are made of is on the layer's device."""

    def __init__(self, budget: int = 10, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.network = torch.nn.Linear(16, 1)

    def update_state(self, update: StateUpdate) -> None:
        super().update_state(update)
        update.state["mass"].scatter_add_(2, update.entries, self.network(update.keys.float()).squeeze(-1))


class Fades(KNorm):
    """Halves the values of the cache itself, which only a method with ops of its own sees."""

    def score_cached(self, entries: CachedEntries) -> Tensor:
        entries.pools.values.mul_(0.5)
        return super().score_cached(entries)


BROKEN = [
    (NoSuperInit, "declarations", "no attribute 'budget'", r"super\(\).__init__"),
    (FractionOfQueries, "declarations", "num_queries is 0.5", "whole number"),
    (Unheard, "declarations", "state_fields is empty, so nobody calls it", "state_fields"),
    (HeadFieldsAsATuple, "declarations", "head_state_fields is .*not a method", "head_state_fields"),
    (OneHead, "shape", r"shape \(3, 14\) for slots, KV heads, entries = \(3, 2, 14\)", "one floating-point number"),
    (WholeNumbers, "shape", "torch.int64", "floating-point"),
    (ByLayer, "layer index", r"ByLayer.score reads layer.layer_index.* \(test_contract.py:\d+\)", "Declare it"),
    (NewestByPlace, "ring of queries", r"with the ring turned by 1 of 3 places, scores change", "newest_queries"),
    (ZScore, "numbers", "NaN for 56 of 56 live entries with equal keys", "divisions by zero"),
    (UnmaskedMean, "free memory", "with nan in free memory.* became nan", "masked_fill"),
    (InPlace, "read only", "changed layer.keys", "copies"),
    (Dice, "determinism", "scoring the same layer again", "hash_uniform"),
    (Remembers, "no state", "changed self.last", "state_fields"),
    (OverSlots, "batch independence", r"slots \[0\] of three", "dimension 0"),
    (PlaceInTheSlot, "ragged lengths", "5 more free places", "layer.lengths"),
    (NoWindow, "selection", "entries of sinks and window were evicted", "Write score only"),
    (Overflow, "half precision", "float16: scores are not finite", r"keys.float\(\)"),
    (Cancels, "half precision", "float16: scores are off by", r"keys.float\(\)"),
    (Coarse, "half precision", "float16: scores are off by", r"keys.float\(\)"),
    (RemembersMass, "running state", "update_state changed self.last", "state_fields"),
    (MeanOverSlots, "running state", r"update.state\['mass'\] of a sequence depends on the others", "same slot"),
    (Silent, "running state", "changed nothing in update.state", "in place"),
    (Undecayed, "reading", r"update.state\['mass'\] after blocks of \[9\] tokens", "power of the tokens behind"),
    (CountsCalls, "reading", r"update.head_state\['calls'\] after blocks of \[9\] tokens", "count .*positions.shape"),
    (RemembersInAModule, "no state", "score changed self.network", "set attributes in __init__ only"),
    (Lambda, "copies", "pickle does not work: .*lambda", "no lambdas"),
    (OnTheCPU, "devices", r"a tensor is on the CPU although the layer is not \(.*test_contract.py:\d", "device="),
    (NetworkOnTheCPU, "devices", "a tensor is on the CPU although the layer is not", r"self.network.to\("),
    (Fades, "replay", r"log-probs differ by up to \d", "keys or values were changed"),
]


class AssignsAProperty(Compressor):
    def __init__(self, budget: int, last: int = 4, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        self.num_queries = last  # type: ignore[misc]

    def score(self, layer: LayerState) -> Tensor:
        return layer.keys.float().norm(dim=-1)


RAISING = [
    (AssignsAProperty, "constructor", "AttributeError: .*num_queries", "num_queries = 8; then __init__ may assign"),
    (OwnArguments, "constructor", "TypeError: .*unexpected keyword argument 'budget'", "check an instance"),
    (Crash, "shape", r"AttributeError: .*key_norms.* \(test_contract.py:\d+\)", "traceback above"),
    (MixedTypes, "half precision", "RuntimeError: expected.*dtype", r"keys.float\(\)"),
    (NotAsked, "running state", "reads mass, which the compressor does not ask for: needs_attention = True", "place"),
]


@pytest.mark.parametrize(("cls", "rule", "found", "change"), RAISING, ids=lambda value: getattr(value, "__name__", ""))
def test_an_error_of_the_compressor_is_told_from_a_broken_rule(
    cls: type[Compressor], rule: str, found: str, change: str
) -> None:
    how = f"raised an error while the rule '{rule}' was checked"
    with pytest.raises(ContractError, match=rf"(?s)^{cls.__name__} {how}.\n  Found: .*{found}.*\n  Change: .*{change}"):
        check_compressor(cls)


def test_that_all_is_well_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    check_compressor(KNorm)
    assert capsys.readouterr().out == f"KNorm keeps the contract of compressors: {len(RULES)} rules.\n"


@pytest.mark.parametrize(("cls", "rule", "found", "change"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_every_mistake_is_called_by_its_name(cls: type[Compressor], rule: str, found: str, change: str) -> None:
    pattern = rf"(?s)^{cls.__name__} breaks the rule '{rule}'.\n  Found: .*{found}.*\n  Change: .*{change}"
    with pytest.raises(ContractError, match=pattern):
        check_compressor(cls)


def test_every_rule_has_a_compressor_that_breaks_it() -> None:
    assert {rule.name for rule in RULES} - {name for _, name, _, _ in BROKEN} == set()


def test_large_ones_are_refused() -> None:
    with pytest.raises(ContractError, match=r"(?s)KNorm breaks the rule 'size'.*516 tokens.*up to 64"):
        check_compressor(KNorm, budget=512)


@pytest.mark.parametrize(
    ("compressor", "said"),
    [
        (LagKV(256, lag_size=128, buffer=128), "LagKV: lag_size must be from 2 to"),
        (VaSE(256, num_large=64, window=16), "VaSE: num_large must be"),
    ],
    ids=["LagKV", "VaSE"],
)
def test_a_copy_with_another_budget_is_refused_where_a_new_one_would_be(compressor: Compressor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compressor.with_budget(64)


PYRAMID = Pyramid(beta=4)  # 64 of 256 tokens in the last layer


@pytest.mark.parametrize(
    ("compressor", "said"),
    [
        (LagKV(256, lag_size=64, buffer=32, budget_rule=PYRAMID), "LagKV: lag_size must be from 2 to 46, .* = 96"),
        (VaSE(256, num_large=56, window=16, budget_rule=PYRAMID), "VaSE: num_large must be .* most 48, got .*56"),
        (Combined([LagKV(256, lag_size=64, buffer=32, budget_rule=PYRAMID)]), "LagKV: lag_size must be from 2 to 46"),
        (Smoothed(VaSE(256, num_large=56, window=16, budget_rule=PYRAMID)), "VaSE: num_large must be .* most 48"),
        (VaSE(256, window=16, budget_rule=PYRAMID), "VaSE: num_large must be .* most 48, got .*64"),
    ],
    ids=["LagKV", "VaSE", "LagKV inside", "VaSE inside", "VaSE by default"],
)
def test_a_rule_that_leaves_a_layer_too_little_is_refused(compressor: Compressor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compressor.layer_budgets(4)


def test_vase_draws_at_every_budget_of_a_schedule() -> None:
    """What stays for its values fits the smallest: with a quarter of the largest nothing would be drawn there."""
    schedule = LengthSchedule([0, 100], [32, 128])
    with pytest.raises(ValueError, match=r"num_large must be .*at most 24"):
        VaSE(schedule, num_large=32, window=8)
    layer = random_layer(capacity=40, window=8, num_queries=8)
    method = VaSE(schedule, window=8)
    kept = [method.select(replace(layer, sequence_keys=layer.sequence_keys + seed), 32) for seed in (0, 1)]
    assert not torch.equal(*kept)
