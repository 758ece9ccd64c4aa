"""The contract of every shipped compressor, and what is particular to each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning import compressors
from sparse_rl_lightning.compressors import (
    CUR,
    H2O,
    RKV,
    TOVA,
    Compressor,
    ExpectedAttention,
    FullKV,
    LagKV,
    QueryStatistics,
    RandomAttention,
    RandomEviction,
    SnapKV,
    StreamingLLM,
    TriAttention,
    VaSE,
)
from sparse_rl_lightning.compressors.attention import recent_attention
from sparse_rl_lightning.ops import key_redundancy, window_importance
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.testing import random_layer
from sparse_rl_lightning.testing.layers import cast

close = partial(torch.testing.assert_close, rtol=0, atol=1e-13)

SHIPPED = [
    getattr(compressors, name)
    for name in compressors.__all__
    if name not in ("Compressor", "FullKV", "LearnedScore", "QueryStatistics", "Combined", "Smoothed")
]
ATTENTION = [SnapKV, RKV]
SETTING: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
DRAWS = torch.Generator().manual_seed(0)
STATISTICS = QueryStatistics(*(torch.randn(2, *shape, generator=DRAWS) for shape in ((4, 16), (4, 8), (2, 16))))
NEEDED: dict[str, dict[str, Any]] = {
    "LagKV": {"lag_size": 3},
    "QFilters": {"statistics": STATISTICS},
    "TriAttention": {"statistics": STATISTICS},
}
VARIANTS: list[tuple[type[Compressor], dict[str, Any]]] = [
    *((cls, NEEDED.get(cls.__name__, {})) for cls in SHIPPED),
    *((cls, {"variant": "original", "pooling": "avg", "group_reduction": "mean"}) for cls in ATTENTION),
    *((cls, {"aggregation": "max_clamped"}) for cls in ATTENTION),
    (ExpectedAttention, {"covariance": "diagonal"}),
    (H2O, {"value_weighted": True}),
]

COMPRESSORS = [cls(**SETTING, **options) for cls, options in VARIANTS]

every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def layer_for(compressor: Compressor, seed: int = 0, **options: Any) -> LayerState:
    options = {"num_queries": compressor.num_queries, "state_fields": compressor.state_fields, **options}
    return random_layer(seed, **options)


def live_scores(compressor: Compressor, layer: LayerState) -> Tensor:
    return compressor.score(layer).masked_fill(~layer.valid, 0.0)


# The rules that hold for all are in test_contract.py; here is what a stranger's compressor need not do.


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if not isinstance(c, TOVA)], ids=repr)  # by design
def test_a_head_does_not_look_at_another_one(compressor: Compressor) -> None:
    layer, other = layer_for(compressor), layer_for(compressor, 1, lengths=[[2, 1], [8, 5], [14, 3]])
    mixed = layer_for(compressor)
    for name in ("keys", "values", "valid", "positions", "lengths", "token_ids"):
        getattr(mixed, name)[:, 1] = getattr(other, name)[:, 1]
    mixed.queries[:, 2:] = other.queries[:, 2:]
    for name in compressor.state_fields:
        mixed.state[name][:, 1] = other.state[name][:, 1]
    # the newest token, and with it the queries, is that of the layer
    assert torch.equal(mixed.query_positions, layer.query_positions)
    torch.testing.assert_close(live_scores(compressor, mixed)[:, 0], live_scores(compressor, layer)[:, 0])
    assert not torch.equal(live_scores(compressor, mixed)[:, 1], live_scores(compressor, layer)[:, 1])


@every_compressor
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_only_that_of_the_cache(compressor: Compressor, dtype: torch.dtype) -> None:
    layer = layer_for(compressor, dtype=dtype)
    scores = live_scores(compressor, layer)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, live_scores(compressor, cast(layer, torch.float32)), rtol=1e-5, atol=1e-6)


@every_compressor
def test_autocast_does_not_round_scores(compressor: Compressor) -> None:
    layer = layer_for(compressor)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = live_scores(compressor, layer)
    assert torch.equal(scores, live_scores(compressor, layer))


@every_compressor
def test_queries_asked_for_are_enough(compressor: Compressor) -> None:
    """A cache that holds no more of them gives the same scores as the formula's tests, which are on such layers."""
    assert compressor.num_queries == {
        "SnapKV": 3, "RKV": 3, "VaSE": 3, "TOVA": 1, "ExpectedAttention": 64
    }.get(type(compressor).__name__, 0)  # fmt: skip


SIZES_REFUSED = [
    ({"budget": 0}, "budget=0"), ({"budget": 4}, r"budget=4 is smaller than num_sinks \+ window = 2 \+ 3"),
    ({"buffer": 0}, "buffer=0"), ({"num_sinks": -1}, "num_sinks=-1"), ({"window": 0}, "window=0"),
    ({"protect_token_ids": ["1"]}, "protect_token_ids must be a whole number, at least 0, got protect_token_ids='1'"),
    ({"protect_observations": -1}, "protect_observations must be at least 0, got protect_observations=-1"),
]  # fmt: skip
ATTENTION_REFUSED = [
    ({"kernel_size": 4}, "kernel_size must be an odd number.*kernel_size=4"), ({"kernel_size": -1}, "kernel_size=-1"),
    ({"pooling": "mean"}, "pooling must be one of max, avg, none, got pooling='mean'"),
    ({"group_reduction": "sum"}, "group_reduction must be one of max, mean, got group_reduction='sum'"),
    ({"variant": "Decode"}, "variant must be one of decode, original, got variant='Decode'"),
    ({"aggregation": "max"}, "aggregation must be one of mean, max_clamped, got aggregation='max'"),
    ({"aggregation": "max_clamped", "group_reduction": "mean"}, "group_reduction must be 'max', got .*='mean'. Leave"),
]  # fmt: skip
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((cls, *row) for cls in SHIPPED for row in SIZES_REFUSED),
    *((cls, *row) for cls in ATTENTION for row in ATTENTION_REFUSED),
    (RKV, {"mix_lambda": -0.1}, "mix_lambda=-0.1"), (RKV, {"mix_lambda": 1.5}, "mix_lambda=1.5"),
    (RKV, {"similarity_threshold": 1.01}, "similarity_threshold=1.01"),
    (RKV, {"similarity_threshold": -2}, "similarity_threshold=-2"),
    (VaSE, {"kernel_size": 4}, "kernel_size=4"), (VaSE, {"num_large": 8}, "num_large must be .*at most 7.*got"),
    (VaSE, {"num_large": 2.5}, "num_large=2.5"), (VaSE, {"num_large": -1}, "num_large=-1"),
    (LagKV, {"lag_size": 7}, "from 2 to 6, .* = 14 tokens holds two chunks.*got lag_size=7"),
    (LagKV, {"lag_size": 1}, "lag_size=1"), (TriAttention, {"max_offset": 0}, "max_offset=0"),
    (TriAttention, {"group_reduction": "sum"}, "group_reduction='sum'"),
    (ExpectedAttention, {"query_window": 0}, "query_window=0"),
    (ExpectedAttention, {"covariance": "diag"},
     "covariance must be one of full, diagonal, none, got covariance='diag'"),
    # a share of the sequence, as other libraries take it, and a text
    (SnapKV, {"budget": 0.5}, "budget=0.5"), (RKV, {"budget": "512"}, "budget='512'"),
    (StreamingLLM, {"budget": None}, "budget=None"), (SnapKV, {"buffer": 2.5}, "buffer=2.5"),
    (TOVA, {"num_sinks": 1.0}, "num_sinks=1.0"), (RandomEviction, {"window": 2.5}, "window=2.5"),
    (SnapKV, {"protect_observations": 0.5}, "protect_observations=0.5"),
    (SnapKV, {"kernel_size": 7.0}, "kernel_size=7.0"), (CUR, {"local_window": 1.5}, "local_window=1.5"),
    (ExpectedAttention, {"query_window": 8.0}, "query_window=8.0"), (LagKV, {"lag_size": 2.5}, "lag_size=2.5"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "wrong", "match"), REFUSED)
def test_wrong_arguments_are_refused_by_name(cls: Any, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__}: .*{match}"):
        cls(**{**SETTING, **NEEDED.get(cls.__name__, {}), **wrong})


def test_full_kv_never_evicts_and_keeps_no_queries() -> None:
    assert not FullKV().evicts
    assert FullKV().num_queries == 0
    assert FullKV().score(random_layer()).shape == (3, 2, 14)


def test_streaming_keeps_sinks_and_the_most_recent() -> None:
    kept = StreamingLLM(**SETTING).select(random_layer())
    assert kept[1, 0].nonzero().flatten().tolist() == [0, 1, *range(6, 14)]
    assert kept[0].sum(dim=-1).tolist() == [3, 3]


def test_random_draws_one_lot_per_sequence_layer_head_and_position() -> None:
    layer, lot = random_layer(), RandomEviction(**SETTING)
    same = replace(layer, positions=torch.full_like(layer.positions, 20))
    lots = lot.score(same)
    assert lots.unique().numel() == 6  # three sequences of two heads
    assert bool((lots == lots[..., :1]).all())
    assert not bool((lot.score(replace(same, layer=2)) == lots).any())
    assert not bool((lot.score(replace(same, positions=same.positions + 1)) == lots).any())


def test_random_survivors_are_an_even_sample_of_the_past() -> None:
    """64 tokens through slots of 12 entries: after many compressions no age is favored."""
    slots, budget, capacity = 2000, 8, 12
    lot = RandomEviction(budget=budget, buffer=4, num_sinks=0, window=1)
    base = random_layer()
    positions = torch.arange(capacity).expand(slots, 1, capacity)
    for seen in range(capacity, 65, 4):
        full = torch.ones(slots, 1, capacity, dtype=torch.bool)
        keys = {"sequence_keys": torch.arange(slots), "prompt_keys": -torch.arange(slots)}
        lengths = torch.full((slots,), 20)
        layer = replace(base, valid=full, positions=positions, prompt_lengths=lengths, **keys)
        left = positions[lot.select(layer)].view(slots, 1, budget)
        positions = torch.cat([left, torch.arange(seen, seen + 4).expand(slots, 1, 4)], dim=-1)
    counts = left.flatten().bincount(minlength=64)
    assert counts[63] == slots  # the window
    expected = slots * 7 / 63
    assert abs(counts[:63].double() - expected).max() < 5 * expected**0.5


def test_random_redraws_at_every_compression_and_then_favors_the_young() -> None:
    """Of 8 entries 4 stay at every compression, so a token of age k has survived with probability 1/2 each time."""
    slots, lot = 4000, RandomEviction(budget=5, buffer=4, num_sinks=0, window=1, redraw=True)
    base, positions = random_layer(), torch.arange(9).expand(slots, 1, 9)
    for seen in range(9, 26, 4):
        full = torch.ones(slots, 1, 9, dtype=torch.bool)
        keys = {"sequence_keys": torch.arange(slots), "prompt_keys": torch.zeros(slots, dtype=torch.int64)}
        layer = replace(base, valid=full, positions=positions, prompt_lengths=torch.full((slots,), 2), **keys)
        left = positions[lot.select(layer)].view(slots, 1, 5)
        positions = torch.cat([left, torch.arange(seen, seen + 4).expand(slots, 1, 4)], dim=-1)
    counts = left.flatten().bincount(minlength=25)
    assert counts[24] == slots  # the window
    for first, survived in ((0, 5), (9, 4), (13, 3), (17, 2)):  # the compressions that these tokens took part in
        assert abs(counts[first + 1] - slots / 2**survived) < 5 * (slots / 2**survived) ** 0.5
    assert not lot.scores_natively


def test_random_attention_is_the_redraw_of_published_sizes() -> None:
    method = RandomAttention(512)
    assert (method.buffer, method.num_sinks, method.window, method.protect_prompt) == (64, 0, 64, True)
    layer = random_layer(lengths=[[14, 14]] * 3)  # prompts of 3, 5, 6 tokens
    small = RandomAttention(10, buffer=4, window=3)
    assert torch.equal(small.score(layer), RandomEviction(**SETTING, redraw=True).score(layer))
    kept = small.select(layer)
    in_prompt = layer.positions < layer.prompt_lengths[:, None, None]
    assert bool(kept[in_prompt].all())
    assert not torch.equal(kept[:, 0], kept[:, 1]), "a head draws for itself"
    assert not torch.equal(kept, small.select(replace(layer, layer=0)))


def test_vase_draws_with_chances_proportional_to_attention() -> None:
    """The first of the drawn entries is each of them as often as its share of the attention says."""
    slots, method = 4000, VaSE(10, buffer=4, num_sinks=1, window=3, num_large=3, kernel_size=1)
    layer = random_layer(lengths=[[14, 14]] * 3)
    tensors = {
        name: getattr(layer, name)[1:2].expand(slots, *getattr(layer, name).shape[1:])
        for name in ("keys", "values", "valid", "positions", "lengths", "queries", "query_positions")
    }
    scores = method.score(replace(layer, sequence_keys=torch.arange(slots) * 7919, **tensors))[:, 0]
    drawn = scores[0] < 0
    assert int(drawn.sum()) == 14 - 3 - 3  # neither large, a sink among them, nor in the window
    assert not bool(drawn[11:].any())
    chances = recent_attention(layer)[1, 0].masked_fill(~drawn, 0.0)
    outside = recent_attention(layer)[1, 0, ..., :11].sum(dim=-1, keepdim=True)
    chances = (chances / outside).mean(dim=(0, 1))
    counts = scores.masked_fill(~drawn, -torch.inf).argmax(dim=-1).bincount(minlength=14)
    expected = slots * chances / chances.sum()
    assert bool(((counts - expected).abs() <= 5 * expected.sqrt()).all())
    again = method.score(replace(layer, sequence_keys=torch.arange(slots) * 7919, **tensors))[:, 0]
    assert torch.equal(scores, again)


def test_defaults_are_those_of_sparse_rl() -> None:
    scoring = "kernel_size=7, pooling='max', group_reduction='max', variant='decode', aggregation='mean'"
    sizes = "budget=512, buffer=128, num_sinks=4, window=8, compress_prompt=True"
    sizes += ", protect_prompt=False, protect_token_ids=[], protect_observations=0, budget_rule=Uniform()"
    assert repr(SnapKV(512)) == f"SnapKV({sizes}, {scoring})"
    assert repr(RKV(512)) == f"RKV({sizes}, {scoring}, mix_lambda=0.1, similarity_threshold=0.5)"


def test_snapkv_variants_are_the_published_ones() -> None:
    layer = random_layer(dtype=torch.float64)
    tensors = (layer.queries, layer.query_positions, layer.keys, layer.lengths, layer.positions, layer.scale)
    paper = {"exclude_window": True, "query_reduction": "mean", "pooling": "max", "kernel_size": 7}
    first = {"exclude_window": False, "query_reduction": "sum", "pooling": "avg", "kernel_size": 5}
    decode, original = (window_importance(*tensors, window=3, **options) for options in (paper, first))
    assert torch.equal(SnapKV(**SETTING).score(layer), decode)
    other = SnapKV(**SETTING, variant="original", pooling="avg", kernel_size=5)
    assert torch.equal(other.score(layer), original)
    assert not torch.allclose(decode, original)
    mean = SnapKV(**SETTING, group_reduction="mean").score(layer)
    close(mean, window_importance(*tensors, window=3, group_reduction="mean"))
    assert not torch.allclose(mean, decode)


def test_rkv_trades_importance_against_redundancy() -> None:
    layer = random_layer(dtype=torch.float64)
    importance = SnapKV(**SETTING).score(layer)
    for mix, threshold in ((0.1, 0.5), (0.7, 0.9), (0.7, -0.5)):
        scores = RKV(**SETTING, mix_lambda=mix, similarity_threshold=threshold).score(layer)
        redundancy = key_redundancy(layer.keys, layer.lengths, threshold)
        for s, h in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
            live = layer.valid[s, h]
            share = redundancy[s, h, live].exp() / redundancy[s, h, live].exp().sum()
            close(scores[s, h, live], mix * importance[s, h, live] - (1 - mix) * share)
    assert torch.equal(RKV(**SETTING, mix_lambda=1.0).score(layer), importance)


def test_rkv_evicts_the_older_of_repeated_keys() -> None:
    # Entries n, n + 4, n + 8, n + 12 repeat each other. In a family of four, the columns keep 3, 3, 2, 0 similar rows;
    # in a family of three 2, 1, 0. So the four that go are 0, 4 and 1, 5.
    keys = torch.eye(4, dtype=torch.float64).repeat(4, 1)[:14].repeat(1, 4).expand(3, 2, 14, 16)
    everything, positions = torch.ones(3, 2, 14, dtype=torch.bool), torch.arange(14).expand(3, 2, 14)
    layer = replace(random_layer(dtype=torch.float64), keys=keys, valid=everything, positions=positions)
    kept = RKV(budget=10, buffer=4, num_sinks=0, window=3, mix_lambda=0.0).select(layer)
    assert bool((kept == kept[0, 0]).all())
    assert kept[0, 0].nonzero().flatten().tolist() == [2, 3, *range(6, 14)]


class WrongShape(Compressor):
    def score(self, layer: LayerState) -> Tensor:
        return layer.keys.norm(dim=-1)[:, :1]


class NotANumber(Compressor):
    def score(self, layer: LayerState) -> Tensor:
        return layer.keys[..., 0] * torch.nan


def test_scores_that_cannot_be_ranked_are_refused() -> None:
    message = r"WrongShape.score returned shape \(3, 1, 14\), expected \(slots, KV heads, entries\) = \(3, 2, 14\)"
    with pytest.raises(ValueError, match=message):
        WrongShape(**SETTING).plan_eviction(random_layer())
    with pytest.raises(ValueError, match=r"NotANumber\.score returned NaN for live entries of layer 1"):
        NotANumber(**SETTING).plan_eviction(random_layer())
