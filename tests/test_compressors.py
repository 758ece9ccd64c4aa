"""The contract of every shipped compressor, and what is particular to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning import compressors
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.ops.importance import window_importance
from sparse_rl_lightning.ops.redundancy import key_redundancy
from sparse_rl_lightning.types import LayerState

close = partial(torch.testing.assert_close, rtol=0, atol=1e-13)

SHIPPED = [getattr(compressors, name) for name in compressors.__all__ if name not in ("Compressor", "FullKV")]
ATTENTION = [SnapKV, RKV]
SETTING: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
VARIANTS: list[tuple[type[Compressor], dict[str, Any]]] = [
    *((cls, {}) for cls in SHIPPED),
    *((cls, {"variant": "original", "pooling": "avg", "group_reduction": "mean"}) for cls in ATTENTION),
    *((cls, {"pooling": "none", "group_reduction": "mean"}) for cls in ATTENTION),
]

every_compressor = pytest.mark.parametrize(
    "compressor", [cls(**SETTING, **options) for cls, options in VARIANTS], ids=repr
)


def make_layer(
    seed: int = 0, lengths: list[list[int]] | None = None, entries: int = 14, dtype: torch.dtype = torch.float64
) -> LayerState:
    """Three sequences of 3, 25 and 40 tokens, two heads with lengths of their own; NaN wherever nobody may look."""
    g = torch.Generator().manual_seed(seed)
    live = torch.tensor(lengths or [[3, 3], [14, 9], [12, 14]])
    seen, slots, heads, dim, num_queries = torch.tensor([3, 25, 40]), 3, 2, 8, 3
    valid = torch.arange(entries) < live.unsqueeze(-1)
    keys, values = torch.randn(2, slots, heads, entries, dim, generator=g, dtype=torch.float64)
    keys[:, :, 1::3] = keys[:, :, :1] + 0.2 * keys[:, :, 1::3]  # some are alike
    keys[~valid] = values[~valid] = torch.nan
    positions = torch.full((slots, heads, entries), -1)
    for s in range(slots):
        for h in range(heads):
            n, window = int(live[s, h]), min(3, int(live[s, h]))
            sinks = torch.arange(min(2, n - window))
            middle = torch.randperm(int(seen[s]) - window - len(sinks), generator=g)[: n - window - len(sinks)]
            recent = torch.arange(int(seen[s]) - window, int(seen[s]))
            positions[s, h, :n] = torch.cat([sinks, len(sinks) + middle.sort().values, recent])
    ring = torch.arange(num_queries)
    last = seen[:, None] - 1
    return LayerState(
        keys=keys.to(dtype),
        values=values.to(dtype),
        valid=valid,
        positions=positions,
        lengths=live,
        token_ids=positions % 11,
        prompt_lengths=torch.tensor([3, 5, 6]),
        queries=torch.randn(slots, 2 * heads, num_queries, dim, generator=g, dtype=torch.float64).to(dtype),
        query_positions=last - (last - ring) % num_queries,
        sequence_keys=torch.tensor([2**62 + 1, -5, 77]),
        layer_index=1,
        scale=8**-0.5,
        inv_freq=torch.ones(4),
        attention_scaling=1.0,
    )


def change(layer: LayerState, function: Callable[[Tensor], Tensor], names: list[str]) -> LayerState:
    return replace(layer, **{name: function(getattr(layer, name)) for name in names})


PER_SLOT = [
    f.name for f in fields(LayerState)
    if f.name not in ("layer_index", "scale", "inv_freq", "attention_scaling", "state")
]  # fmt: skip


def live_scores(compressor: Compressor, layer: LayerState) -> Tensor:
    return compressor.score(layer)[..., : layer.valid.shape[-1]].masked_fill(~layer.valid, 0.0)


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_have_the_right_shape_and_are_finite_where_live(compressor: Compressor, dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype)
    scores = compressor.score(layer)
    assert scores.shape == layer.valid.shape
    assert scores.dtype == torch.float32
    assert bool(scores[layer.valid].isfinite().all())


@every_compressor
def test_a_sequence_scores_the_same_alone_and_in_any_slot(compressor: Compressor) -> None:
    layer = make_layer()
    together, kept = live_scores(compressor, layer), compressor.select(layer)
    for order in ([0], [1], [2], [2, 0, 1], [1, 1]):
        some = change(layer, lambda t, order=order: t[order], PER_SLOT)
        close(live_scores(compressor, some), together[order])
        assert torch.equal(compressor.select(some), kept[order])


@every_compressor
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 0.0, 1e30])
def test_free_memory_is_not_read(compressor: Compressor, garbage: float) -> None:
    layer = make_layer()
    wide = change(layer, lambda t: torch.nn.functional.pad(t, (0, 0, 0, 5)), ["keys", "values"])
    wide = change(wide, lambda t: torch.nn.functional.pad(t, (0, 5)), ["valid", "positions", "token_ids"])
    wide = change(wide, lambda t: t.masked_fill(~wide.valid.unsqueeze(-1), garbage), ["keys", "values"])
    wide = change(wide, lambda t: t.masked_fill(~wide.valid, 1), ["positions", "token_ids"])
    close(live_scores(compressor, wide)[..., :14], live_scores(compressor, layer))
    assert torch.equal(compressor.select(wide)[..., :14], compressor.select(layer))
    assert not bool(compressor.select(wide)[..., 14:].any())


@every_compressor
def test_a_head_does_not_look_at_another_one(compressor: Compressor) -> None:
    layer, other = make_layer(0), make_layer(1, lengths=[[2, 1], [8, 5], [14, 3]])
    mixed = make_layer(0)
    for name in ("keys", "values", "valid", "positions", "lengths", "token_ids"):
        getattr(mixed, name)[:, 1] = getattr(other, name)[:, 1]
    mixed.queries[:, 2:] = other.queries[:, 2:]
    close(live_scores(compressor, mixed)[:, 0], live_scores(compressor, layer)[:, 0])
    assert not torch.equal(live_scores(compressor, mixed)[:, 1], live_scores(compressor, layer)[:, 1])


@every_compressor
def test_scoring_is_deterministic_and_changes_nothing(compressor: Compressor) -> None:
    layer, copy, before = make_layer(), make_layer(), repr(compressor)
    assert torch.equal(live_scores(compressor, layer), live_scores(compressor, layer))
    assert repr(compressor) == before
    for name in PER_SLOT:
        torch.testing.assert_close(getattr(layer, name), getattr(copy, name), rtol=0, atol=0, equal_nan=True)


@every_compressor
@pytest.mark.parametrize("budget", [None, 5, 8, 13])
def test_selection_keeps_the_budget_with_sinks_and_window(compressor: Compressor, budget: int | None) -> None:
    layer = make_layer()
    kept = compressor.select(layer, budget)
    assert torch.equal(kept.sum(dim=-1), layer.lengths.clamp(max=budget or 10))
    assert not bool((kept & ~layer.valid).any())
    sinks = layer.valid & (layer.positions < 2)
    window = layer.valid & (torch.arange(14) >= layer.lengths.unsqueeze(-1) - 3)
    assert bool(kept[sinks | window].all())


@every_compressor
def test_middle_entries_are_kept_by_score(compressor: Compressor) -> None:
    layer = make_layer(seed=4)
    scores, kept = compressor.score(layer), compressor.select(layer)
    free = layer.valid & (layer.positions >= 2) & (torch.arange(14) < layer.lengths.unsqueeze(-1) - 3)
    evicted = 0
    for s, h in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        stay, go = scores[s, h][free[s, h] & kept[s, h]], scores[s, h][free[s, h] & ~kept[s, h]]
        evicted += len(go)
        assert not len(go) or stay.min() >= go.max()
    assert evicted == 4 + 2 + 4


@pytest.mark.parametrize("cls", SHIPPED)
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"budget": 0}, "budget=0"),
        ({"budget": 4}, r"budget=4 is smaller than num_sinks \+ window = 2 \+ 3"),
        ({"buffer": 0}, "buffer=0"),
        ({"num_sinks": -1}, "num_sinks=-1"),
        ({"window": 0}, "window=0"),
    ],
)
def test_bad_sizes_are_refused(cls: type[Compressor], wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__}: .*{match}"):
        cls(**{**SETTING, **wrong})


@pytest.mark.parametrize("cls", ATTENTION)
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"kernel_size": 4}, "kernel_size must be an odd number.*kernel_size=4"),
        ({"kernel_size": -1}, "kernel_size=-1"),
        ({"pooling": "mean"}, "pooling must be one of max, avg, none, got pooling='mean'"),
        ({"group_reduction": "sum"}, "group_reduction must be one of max, mean, got group_reduction='sum'"),
        ({"variant": "Decode"}, "variant must be one of decode, original, got variant='Decode'"),
    ],
)
def test_bad_options_are_refused(cls: type[Compressor], wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__}: .*{match}"):
        cls(**SETTING, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"mix_lambda": -0.1}, {"mix_lambda": 1.5}, {"similarity_threshold": 1.01}, {"similarity_threshold": -2}],
)
def test_rkv_refuses_numbers_outside_their_range(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"RKV: .*{name}.*{name}={value}"):
        RKV(**SETTING, **wrong)


@every_compressor
def test_num_queries_are_enough(compressor: Compressor) -> None:
    layer, n = make_layer(), compressor.num_queries
    assert n == (3 if isinstance(compressor, SnapKV) else 0)
    fewer = replace(layer, queries=layer.queries[:, :, :n], query_positions=layer.query_positions[:, :n])
    assert torch.equal(compressor.select(fewer), compressor.select(layer))


def test_full_kv_never_evicts_and_keeps_no_queries() -> None:
    assert not FullKV().evicts
    assert FullKV().num_queries == 0
    assert FullKV().score(make_layer()).shape == (3, 2, 14)


def test_streaming_keeps_sinks_and_the_most_recent() -> None:
    kept = StreamingLLM(**SETTING).select(make_layer())
    assert kept[1, 0].nonzero().flatten().tolist() == [0, 1, *range(6, 14)]
    assert kept[0].sum(dim=-1).tolist() == [3, 3]


def test_random_draws_one_lot_per_sequence_layer_head_and_position() -> None:
    layer, lot = make_layer(), RandomEviction(**SETTING)
    same = change(layer, lambda t: torch.full_like(t, 20), ["positions"])
    lots = lot.score(same)
    assert lots.unique().numel() == 6  # three sequences of two heads
    assert bool((lots == lots[..., :1]).all())
    assert not bool((lot.score(replace(same, layer_index=2)) == lots).any())
    assert not bool((lot.score(replace(same, positions=same.positions + 1)) == lots).any())


def test_random_survivors_are_an_even_sample_of_the_past() -> None:
    """64 tokens through slots of 12 entries: after many compressions no age is favoured."""
    slots, budget, capacity = 2000, 8, 12
    lot = RandomEviction(budget=budget, buffer=4, num_sinks=0, window=1)
    base = make_layer()
    positions = torch.arange(capacity).expand(slots, 1, capacity)
    for seen in range(capacity, 65, 4):
        full = torch.ones(slots, 1, capacity, dtype=torch.bool)
        layer = replace(base, valid=full, positions=positions, sequence_keys=torch.arange(slots))
        left = positions[lot.select(layer)].view(slots, 1, budget)
        positions = torch.cat([left, torch.arange(seen, seen + 4).expand(slots, 1, 4)], dim=-1)
    counts = left.flatten().bincount(minlength=64)
    assert counts[63] == slots  # the window
    expected = slots * 7 / 63
    assert abs(counts[:63].double() - expected).max() < 5 * expected**0.5


def test_defaults_are_those_of_sparse_rl() -> None:
    scoring = "kernel_size=7, pooling='max', group_reduction='max', variant='decode'"
    sizes = "budget=512, buffer=128, num_sinks=4, window=8, compress_prompt=True, budget_rule=Uniform()"
    assert repr(SnapKV(512)) == f"SnapKV({sizes}, {scoring})"
    assert repr(RKV(512)) == f"RKV({sizes}, {scoring}, mix_lambda=0.1, similarity_threshold=0.5)"


def test_snapkv_variants_are_the_published_ones() -> None:
    layer = make_layer()
    tensors = (layer.queries, layer.query_positions, layer.keys, layer.valid, layer.positions, layer.scale)
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
    layer = make_layer()
    importance = SnapKV(**SETTING).score(layer)
    for mix, threshold in ((0.1, 0.5), (0.7, 0.9)):
        scores = RKV(**SETTING, mix_lambda=mix, similarity_threshold=threshold).score(layer)
        redundancy = key_redundancy(layer.keys, layer.valid, threshold)
        for s, h in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
            live = layer.valid[s, h]
            share = redundancy[s, h, live].exp() / redundancy[s, h, live].exp().sum()
            close(scores[s, h, live], mix * importance[s, h, live] - (1 - mix) * share)
    assert torch.equal(RKV(**SETTING, mix_lambda=1.0).score(layer), importance)


def test_rkv_evicts_the_older_of_repeated_keys() -> None:
    # Entries n, n + 4, n + 8, n + 12 repeat each other. In a family of four, the columns keep 3, 3, 2, 0 similar rows;
    # in a family of three 2, 1, 0. So the four that go are 0, 4 and 1, 5.
    keys = torch.eye(4, dtype=torch.float64).repeat(4, 1)[:14].repeat(1, 2).expand(3, 2, 14, 8)
    everything, positions = torch.ones(3, 2, 14, dtype=torch.bool), torch.arange(14).expand(3, 2, 14)
    layer = replace(make_layer(), keys=keys, valid=everything, positions=positions)
    kept = RKV(budget=10, buffer=4, num_sinks=0, window=3, mix_lambda=0.0).select(layer)
    assert bool((kept == kept[0, 0]).all())
    assert kept[0, 0].nonzero().flatten().tolist() == [2, 3, *range(6, 14)]
