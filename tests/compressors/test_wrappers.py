"""Combined and protected tokens: what they do to scores, what is passed on of queries, sums and sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from published import update_of
from torch import Tensor

from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.compressors import (
    H2O,
    RKV,
    TOVA,
    Combined,
    Compressor,
    ExpectedAttention,
    FullKV,
    KeyDiff,
    KNorm,
    Smoothed,
    SnapKV,
    StreamingLLM,
)
from sparse_rl_lightning.compressors.entries import newest_position, newest_queries, normalized_ranks, standardized
from sparse_rl_lightning.ops.entries import shared_scores
from sparse_rl_lightning.records import NEVER, LayerState
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import random_layer, tiny_model

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}


class Given(Compressor):
    """Scores that a test chose."""

    num_queries = 0

    def __init__(self, scores: Tensor, **sizes: Any) -> None:
        super().__init__(**{**SIZES, **sizes})
        self.scores = scores

    def score(self, layer: LayerState) -> Tensor:
        return self.scores


def test_ranks_are_the_share_of_lower_entries() -> None:
    scores = torch.tensor([[[3.0, -1.0, 3.0, -torch.inf, torch.inf, 7.0, torch.nan]]])
    valid = torch.tensor([[[True] * 6 + [False]]])
    ranks = normalized_ranks(scores, valid)[0, 0, :6]
    torch.testing.assert_close(ranks, torch.tensor([0.4, 0.2, 0.4, 0.0, torch.inf, 0.8]))
    alone = torch.zeros(1, 1, 1)
    assert normalized_ranks(alone, alone == 0).item() == 0


def test_standard_scores_have_mean_0_and_deviation_1() -> None:
    scores = torch.tensor([[[3.0, -1.0, 5.0, -torch.inf, torch.inf, 1.0, 100.0]]])
    valid = torch.tensor([[[True] * 6 + [False]]])
    standard = standardized(scores, valid)[0, 0]
    counted = standard[[0, 1, 2, 5]]
    assert abs(float(counted.mean())) < 1e-6
    assert float(counted.std(correction=0)) == pytest.approx(1)
    assert standard[3:5].tolist() == [-torch.inf, torch.inf]
    equal = torch.full((1, 1, 4), 2.0)
    assert torch.equal(standardized(equal, equal == 2), torch.zeros(1, 1, 4))


def test_rounding_is_not_standardized_into_scores() -> None:
    """Norms of one repeated token's keys, rotated to every position, differ in their last bits, and mean nothing."""
    key, angles = torch.randn(64), torch.arange(48.0)[:, None] * 10000.0 ** -(torch.arange(32.0) / 32)
    turned = torch.cat(
        [key[:32] * angles.cos() - key[32:] * angles.sin(), key[32:] * angles.cos() + key[:32] * angles.sin()], dim=-1
    )
    scores = turned.norm(dim=-1)[None, None]
    valid = torch.ones_like(scores, dtype=torch.bool)
    assert len(scores.unique()) > 1
    assert standardized(scores, valid).abs().max() < 0.15
    told = scores * (1 + 1e-4 * torch.randn(48))  # what a method sees is left as it is, to the last bit
    centered = told - told.mean(dim=-1, keepdim=True)
    plain = centered / (centered.square().sum(dim=-1, keepdim=True) / 48).sqrt()
    torch.testing.assert_close(standardized(told, valid), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_tokens_are_found_in_other_heads_by_position(reduction: Any) -> None:
    positions = torch.tensor([[[0, 2, 5, -1], [0, 5, 6, 9]], [[1, 2, 3, 4], [1, 2, 3, 4]]])
    valid = positions >= 0
    scores = torch.tensor([[[1.0, 2, 3, torch.nan], [5, 1, 7, -3]], [[1, 2, 3, 4], [4, 3, 2, 1]]])
    wanted = {
        "max": [[[5.0, 2, 3, 0], [5, 3, 7, -3]], [[4, 3, 3, 4], [4, 3, 3, 4]]],
        "mean": [[[3.0, 2, 2, 0], [3, 2, 7, -3]], [[2.5, 2.5, 2.5, 2.5], [2.5, 2.5, 2.5, 2.5]]],
    }[reduction]
    assert shared_scores(scores, positions, valid, reduction).tolist() == wanted


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8])
def test_a_ring_is_cut_to_its_newest_queries(count: int) -> None:
    layer = random_layer(num_queries=5)
    fewer = newest_queries(layer, count)
    assert fewer.queries.shape[2] == fewer.query_positions.shape[1] == min(count, 5)
    for s in range(3):
        last = int(layer.query_positions[s].max())
        held = {int(at): layer.queries[s, :, i] for i, at in enumerate(layer.query_positions[s]) if at >= 0}
        got = {int(at): fewer.queries[s, :, i] for i, at in enumerate(fewer.query_positions[s]) if at >= 0}
        assert sorted(got) == list(range(max(last - min(count, 5) + 1, 0), last + 1))
        assert all(torch.equal(got[at], held[at]) for at in got)


def test_a_union_keeps_one_set_for_all_heads() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    layer = replace(layer, positions=layer.positions[:, :1].expand(-1, 2, -1))  # as if it had always been so
    alone = KNorm(**SIZES).select(layer)
    together = Combined([KNorm(**SIZES)], across_heads="max").select(layer)
    assert not torch.equal(alone[:, 0], alone[:, 1])
    assert torch.equal(together[:, 0], together[:, 1])
    assert (together.sum(dim=-1) == 10).all()


def test_a_union_values_a_token_as_its_best_head_does() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    layer = replace(layer, positions=torch.arange(14).expand(3, 2, 14))
    scores = torch.zeros(3, 2, 14)
    scores[:, 0, 4], scores[:, 1, 6:8] = 100.0, 0.1  # on scales of their own
    kept = Combined([Given(scores, budget=7)], across_heads="max").select(layer)
    assert kept[0, 0].nonzero().flatten().tolist() == [0, 1, 4, 6, 11, 12, 13]  # the lower index of two equal places
    raw = Combined([Given(scores, budget=7)], normalization="none", across_heads="mean").select(layer)
    assert raw[0, 1].nonzero().flatten().tolist() == [0, 1, 4, 6, 11, 12, 13]
    standard = Combined([Given(scores)], normalization="standard", across_heads="max").score(layer)
    torch.testing.assert_close(standard[0, 0, 4], torch.tensor(13**0.5))


def test_a_mixture_adds_places() -> None:
    layer = random_layer()
    parts = KNorm(**SIZES), KeyDiff(**SIZES)
    scores = Combined(list(parts), [1.0, 0.25]).score(layer)
    ranks = [normalized_ranks(part.score(layer), layer.valid) for part in parts]
    torch.testing.assert_close(scores[layer.valid], (ranks[0] + 0.25 * ranks[1])[layer.valid])
    one = Combined([KNorm(**SIZES)]).select(layer)
    assert torch.equal(one, KNorm(**SIZES).select(layer))


def test_parts_see_the_queries_they_ask_for() -> None:
    parts = SnapKV(**SIZES), TOVA(**SIZES), ExpectedAttention(**SIZES, query_window=6), KNorm(**SIZES)
    mixture = Combined(list(parts), normalization="none")
    assert mixture.num_queries == 6
    layer = random_layer(num_queries=6)
    own = [part.score(newest_queries(layer, part.num_queries)) for part in parts]
    torch.testing.assert_close(mixture.score(layer)[layer.valid], sum(own)[layer.valid])
    wrong = sum(part.score(layer) for part in parts)
    assert not torch.allclose(mixture.score(layer)[layer.valid], wrong[layer.valid])


def test_parts_have_running_sums_of_their_own() -> None:
    union = Combined([H2O(**SIZES, value_weighted=True)], across_heads="max")
    mixture = Combined([H2O(**SIZES), KNorm(**SIZES), union], normalization="none")
    assert mixture.state_fields == ("0.mass", "2.0.mass")
    layer = random_layer(state_fields=mixture.state_fields)
    before = {name: tensor.clone() for name, tensor in layer.state.items()}
    mass = torch.rand(3, 2, 14)
    mixture.update_state(update_of(layer, mass[:, :, None]))
    for name in mixture.state_fields:
        torch.testing.assert_close(layer.state[name], before[name] + mass, equal_nan=True)
    first = replace(layer, state={"mass": layer.state["0.mass"]})
    third = replace(layer, state={"0.mass": layer.state["2.0.mass"]})
    expected = H2O(**SIZES).score(first) + KNorm(**SIZES).score(layer)
    expected = expected + union.score(third)
    torch.testing.assert_close(mixture.score(layer)[layer.valid], expected[layer.valid])


def test_a_wrapper_has_the_sizes_of_its_parts() -> None:
    inner = StreamingLLM(20, 5, 1, 4, False, budget_rule=Pyramid(2))
    for wrapper in (Combined([inner], across_heads="max"), Combined([inner, inner])):
        sizes = wrapper.budget, wrapper.buffer, wrapper.num_sinks, wrapper.window, wrapper.compress_prompt
        assert sizes == (20, 5, 1, 4, False)
        assert wrapper.layer_budgets(3) == [30, 20, 10]


def test_wrappers_show_what_is_inside() -> None:
    sizes = "budget=10, buffer=4, num_sinks=2, window=3, compress_prompt=True"
    text = f"KNorm({sizes}, protect_prompt=True, protect_token_ids=[], protect_observations=0, budget_rule=Uniform())"
    protected = KNorm(**SIZES, protect_prompt=True)
    assert repr(protected) == text
    options = "weights=[1.0], normalization='rank', across_heads='max'"
    assert repr(Combined([protected], across_heads="max")) == f"Combined(compressors=[{text}], {options})"


class Waves(Compressor):
    """Whole numbers that change from compression to compression, so that averages by halves are exact."""

    num_queries = 0

    def score(self, layer: LayerState) -> Tensor:
        newest = newest_position(layer)[:, None, None]
        return ((layer.positions * 37 + newest * 101) % 64 - 20).to(torch.float32)


def deaths_by_hand(length: int, prompt: int, decay: float, whole: bool) -> list[int]:
    """When each token dies, of a budget of 10 with a buffer of 4, two sinks and a window of 3."""
    held, average, death = list(range(prompt)), dict[int, float](), [NEVER] * length
    room = max(14, prompt + 4) if whole else 14
    for fed in range(prompt, length + 1):
        if len(held) >= room:
            room = 14
            before = held[:-3]
            for at in before:
                new = float((at * 37 + (fed - 1) * 101) % 64 - 20)
                average[at] = decay * average[at] + (1 - decay) * new if average.get(at, 0) else new
            free = sorted((at for at in before if at > 1), key=lambda at: (-average[at], at))
            for at in free[10 - 3 - 2 :]:
                death[at] = fed
            held = [at for at in held if death[at] == NEVER]
        held.append(fed)
    return death


@pytest.mark.parametrize(
    ("decay", "options"),
    [
        (0.0, {}),
        (0.75, {}),
        (0.5, {"max_prefill_tokens": 7}),
        (0.5, {"decoder": "transformers"}),
        (0.5, {"whole": True}),
    ],
    ids=["none", "packed", "chunks", "transformers", "whole prompts"],
)  # fmt: skip
def test_averages_decide_over_a_whole_rollout(decay: float, options: dict[str, Any]) -> None:
    """Prompts that are compressed, stored whole and short, in slots that are used again: against a table by hand."""
    more = dict(options)
    whole = more.pop("whole", False)
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    prompts = [list(range(5, 5 + n)) for n in (3, 27, 14, 13)]
    method = Smoothed(Waves(**SIZES, compress_prompt=not whole), decay)
    params = SamplingParams(num_generations=2, max_completion_length=40, seed=1)
    rollout = RolloutSampler(model, method, num_slots=3, **more).generate(prompts, params)
    plain = RolloutSampler(model, Waves(**SIZES, compress_prompt=not whole), num_slots=3).generate(prompts, params)
    for row, prompt in enumerate(prompt for prompt in prompts for _ in range(2)):
        fed = len(prompt) + 39  # the last token of all is drawn and not fed
        wanted = torch.tensor(deaths_by_hand(fed, len(prompt), decay, whole))
        death = rollout.evictions.death[:, row, :, :fed]
        assert torch.equal(death, wanted.expand_as(death).to(death.dtype)), row
    assert torch.equal(rollout.evictions.death, plain.evictions.death) == (decay == 0)


def test_an_average_begins_with_the_first_score_outside_the_window() -> None:
    layer = random_layer(state_fields=("average",), lengths=[[14, 14]] * 3)
    before = layer.state["average"]
    before[:, :, 4:7], before[:, :, 7] = 0.0, torch.inf
    new = Waves(**SIZES).score(layer)
    average = Smoothed(Waves(**SIZES), 0.8).score(layer)
    assert torch.equal(average[..., 4:8], new[..., 4:8])
    assert not average[..., 11:].any()
    for part in (slice(0, 4), slice(8, 11)):
        torch.testing.assert_close(average[..., part], 0.8 * before[..., part] + 0.2 * new[..., part])


def test_averages_have_a_number_beside_those_of_the_method() -> None:
    method = Smoothed(Combined([H2O(**SIZES), KNorm(**SIZES)]), 0.25)
    assert method.state_fields == ("0.0.mass", "average")
    assert method.score_field == "average"
    assert repr(Smoothed(KNorm(**SIZES), 0.25)) == f"Smoothed(compressor={KNorm(**SIZES)!r}, decay=0.25)"
    assert method.with_budget(12).budget == 12


def test_protected_tokens_stay_first_of_all() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)  # prompts of 3, 5, 6 tokens
    kept = KNorm(12, 2, num_sinks=1, window=2, protect_prompt=True, protect_token_ids=[6]).select(layer)
    prompt, chosen = layer.positions < layer.prompt_lengths[:, None, None], layer.token_ids == 6
    evictable = KNorm(budget=12, buffer=2, num_sinks=1, window=2).select(layer)
    assert kept[prompt | chosen].all()
    assert not evictable[prompt & ~chosen].all(), "nothing that matters was protected"
    assert not evictable[chosen & ~prompt].all(), "nothing that matters was protected"
    assert (kept.sum(dim=-1) == 12).all()


def test_the_newest_texts_that_were_given_are_protected() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)  # turns of 3 tokens from position 6 on, of which each head lacks some
    for count in (1, 2):
        compressor = KNorm(12, 2, num_sinks=1, window=2, protect_observations=count)
        kept = compressor.select(layer)
        for slot, head, entry in (layer.turns >= 0).nonzero().tolist():
            newest = int(layer.turns[slot].max()) // 2
            text, rest = divmod(int(layer.turns[slot, head, entry]), 2)
            if text and not rest and newest - count < text:
                assert kept[slot, head, entry]
        without = KNorm(12, 2, num_sinks=1, window=2)
        assert not torch.equal(kept, without.select(layer))
        assert torch.equal(without.select(layer), compressor.select(replace(layer, turns=None)))


def test_more_protected_tokens_than_places_are_an_error() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    layer = replace(layer, positions=torch.arange(14).expand(3, 2, 14), prompt_lengths=torch.tensor([3, 9, 3]))
    message = r"KNorm: 12 entries of a head in layer 1 must stay, .* only 10\. Raise budget=10 or protect fewer"
    protected = {**SIZES, "protect_prompt": True}
    with pytest.raises(ValueError, match=message):
        KNorm(**protected).select(layer)
    with pytest.raises(ValueError, match="Combined: 12 entries"):
        Combined([KNorm(**protected)], across_heads="max").select(layer)
    with pytest.raises(ValueError, match="Combined: 12 entries"):
        Combined([KNorm(**protected), KeyDiff(**protected)], normalization="standard").select(layer)
    assert KNorm(**protected, budget_rule=Adaptive()).select(layer, 12)[1].sum(dim=-1).tolist() == [12, 12]
    kept = KNorm(**protected).select(replace(layer, prompt_lengths=torch.tensor([3, 7, 3])))
    assert kept[1, 0].nonzero().flatten().tolist() == [*range(7), 11, 12, 13]


def test_a_protected_prompt_outlives_the_rollout() -> None:
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 9)]
    for compressor, lives in ((KNorm(22, 5, 1, 4, protect_prompt=True), True), (KNorm(22, 5), False)):
        rollout = RolloutSampler(model, compressor).generate(prompts, SamplingParams(max_completion_length=40, seed=1))
        deaths = [rollout.evictions.death[:, i, :, : len(prompt)] for i, prompt in enumerate(prompts)]
        assert all((d == NEVER).all() for d in deaths) == lives
        assert not (rollout.evictions.death == NEVER).all()


@pytest.mark.parametrize(
    ("compressors", "options", "message"),
    [
        ([FullKV()], {}, r"FullKV\(.*\) never evicts"),
        ([KNorm(20)], {"across_heads": "sum"}, "across_heads must be one of max, mean, got across_heads='sum'"),
        ([KNorm(20)], {"normalization": "z"}, "normalization must be one of rank, standard, none"),
        ([], {}, "give at least one compressor"),
        ([KNorm(20), RKV(30)], {}, ".*same budget, but KNorm has budget=20 and RKV has budget=30"),
        ([KNorm(20), RKV(20, window=4)], {}, ".*same window, but KNorm has window=8 and RKV has window=4"),
        (
            [KNorm(20), RKV(20, budget_rule=Adaptive(3))],
            {},
            r".*budget_rule=Uniform\(\) and RKV has budget_rule=Adaptive\(floor=3, layers=Uniform\(\)\)",
        ),
        ([KNorm(20)] * 2, {"weights": [1.0]}, r".*weights must be 2 numbers, .* got weights=\[1.0\]"),
        ([KNorm(20)] * 2, {"weights": [1.0, 0.0]}, r"weights\[1\] must be above 0, got weights\[1\]=0.0"),
        ([KNorm(20, protect_prompt=True), RKV(20)], {}, ".*same protect_prompt, but KNorm has .*=True"),
        ([KNorm(20, protect_observations=1), RKV(20)], {}, ".*protect_observations, but KNorm has .*=1 and"),
        ([KNorm(20), Smoothed(KNorm(20))], {}, "Smoothed keeps its scores, .* Put Smoothed around Combined"),
    ],
)
def test_mistakes_are_named(compressors: list[Compressor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Combined: {message}"):
        Combined(compressors, **options)


@pytest.mark.parametrize(
    ("compressor", "decay", "message"),
    [
        (FullKV(), 0.5, r"FullKV\(.*\) never evicts"),
        (KNorm(20), 1.0, "decay must be at least 0 and below 1, got decay=1.0"),
        (KNorm(20), -0.1, "decay must be at least 0 and below 1, got decay=-0.1"),
    ],
)
def test_mistakes_of_an_average_are_named(compressor: Compressor, decay: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Smoothed: {message}"):
        Smoothed(compressor, decay)
