"""Retrieval in the rollout engine: a budget for everything is dense, nothing hangs on the batch, no memory is saved."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from chosen_pages import ChosenPages
from rollout_cases import put_back
from rollouts import PROMPTS, assert_generated, assert_same, small_model
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.compressors import H2O, SnapKV, StreamingLLM
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.select_pages import page_scores
from sparse_rl_lightning.ops.summarize_pages import page_means
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import KVUsage, Rollout
from sparse_rl_lightning.retrieval.cache import with_pages
from sparse_rl_lightning.retrievers import Centroid, Quest, Retriever
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, retrieval_logprobs

SMALL: dict[str, Any] = {"budget": 16, "page_size": 4, "num_dense_layers": 1}
SMALLEST_KV: dict[str, Any] = {"budget": 24, "buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=2, max_completion_length=40, temperature=0.9, seed=3)


class OwnCentroid(Centroid):
    """A retriever of one's own, which runs in PyTorch."""

    def summarize(self, keys: Tensor) -> Tensor:
        return page_means(keys)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        return page_scores(queries, summaries, self.group_reduction)


RETRIEVERS: dict[str, Retriever] = {
    "centroid": Centroid(**SMALL),
    "quest": Quest(**SMALL),
    "centroid-max": Centroid(**SMALL, group_reduction="max"),
    "own": OwnCentroid(**SMALL),
    "schedule": Quest(LengthSchedule([0, 20, 30], [12, 16, 24]), page_size=4, num_dense_layers=0, num_last_pages=1),
}
each_retriever = pytest.mark.parametrize("retriever", RETRIEVERS.values(), ids=RETRIEVERS)


def model(**options: Any) -> PreTrainedModel:
    return small_model(**{"num_layers": 3, "eos_token_id": None, **options})


@pytest.mark.thinned(3)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("retriever", [Centroid, Quest, OwnCentroid])
def test_a_budget_for_everything_is_dense(architecture: str, retriever: type[Retriever]) -> None:
    policy = small_model(architecture)
    sampler = RolloutSampler(policy, retriever=retriever(64, num_dense_layers=0), num_slots=3)
    rollout = sampler.generate(PROMPTS, SamplingParams(max_completion_length=24, temperature=0))
    assert_generated(policy, rollout, 24)
    dense = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask)[0]
    torch.testing.assert_close(rollout.sampler_logprobs, dense.detach(), atol=2e-5, rtol=0)
    assert rollout.kv.read_share == 1.0


@each_retriever
def test_sequence_is_the_same_in_any_batch_slot_and_order(retriever: Retriever) -> None:
    policy = model(eos_token_id=1)
    params = SamplingParams(num_generations=2, max_completion_length=30, temperature=1.0, seed=11)
    whole = RolloutSampler(policy, retriever=retriever).generate(PROMPTS, params)
    dense = RolloutSampler(policy).generate(PROMPTS, params)
    assert not torch.equal(whole.sequences[:, :60], dense.sequences[:, :60]), "everything was read: this proves nothing"
    for num_slots in (3, 7):  # refills in other orders, groups split over admissions
        assert_same(whole, RolloutSampler(policy, retriever=retriever, num_slots=num_slots).generate(PROMPTS, params))
    alone = SamplingParams(num_generations=1, max_completion_length=30, temperature=1.0, seed=11)
    for number in (1, 3, 6):
        prompt = number // 2
        one = RolloutSampler(policy, retriever=retriever).generate([PROMPTS[prompt]], alone, sequence_ids=[number])
        assert_same(whole[torch.tensor([number])].trimmed(), one)


@each_retriever
def test_prompts_read_in_chunks_are_the_same(retriever: Retriever) -> None:
    policy = model()
    whole = RolloutSampler(policy, retriever=retriever).generate(PROMPTS, PARAMS)
    chunked = RolloutSampler(policy, retriever=retriever, num_slots=4, max_prefill_tokens=7).generate(PROMPTS, PARAMS)
    assert_same(whole, chunked)


def test_an_own_retriever_is_computed_as_the_kernels_compute_it(chosen: ChosenPages) -> None:
    policy, rollouts, pages = model(), [], []
    for name in ("centroid", "own"):
        rollouts.append(RolloutSampler(policy, retriever=RETRIEVERS[name]).generate(PROMPTS, PARAMS))
        pages.append(chosen.of(rollouts[-1], PARAMS.seed))
    assert_same(*rollouts)
    assert torch.equal(*pages)


@each_retriever
def test_chosen_pages_follow_the_rule(retriever: Retriever, chosen: ChosenPages) -> None:
    """Pages of every query: as many as its length allows, first and last among them, ascending."""
    rollout = RolloutSampler(model(), retriever=retriever, num_slots=3).generate(PROMPTS, PARAMS)
    found, r = chosen.of(rollout, PARAMS.seed), retriever
    assert found.shape[1] == 3 - r.num_dense_layers
    for row in range(len(rollout)):
        prompt, length = int(rollout.prompt_lengths[row]), int(rollout.completion_mask[row].nonzero().max())
        for at in range(found.shape[2]):
            pages = found[row, :, at]
            if not prompt <= at < length:
                assert (pages == -1).all()
                continue
            there, limit = at // r.page_size + 1, r.schedule.at(at + 1) // r.page_size
            always = {*range(r.num_first_pages), *range(there - r.num_last_pages, there)}
            for listed in pages.flatten(0, 1).tolist():
                own = [page for page in listed if page >= 0]
                assert listed == own + [-1] * (len(listed) - len(own))
                assert own == sorted(set(own))
                assert len(own) == min(there, limit)
                assert set(own) >= (always if there > limit else set(range(there)))


@pytest.mark.parametrize("retriever", [Centroid(**SMALL), Quest(**SMALL)], ids=["centroid", "quest"])
def test_memory_is_not_saved_and_reading_is(retriever: Retriever) -> None:
    policy = model()
    sampler = RolloutSampler(policy, retriever=retriever, num_slots=4)
    rollout = sampler.generate(PROMPTS, PARAMS)
    assert rollout.evictions is None
    assert rollout.kv.saving_final == rollout.kv.saving_integral == 0
    cache = sampler.cache
    kept = sum(summary.untyped_storage().nbytes() for summary in cache.summaries)
    assert rollout.kv.peak_bytes == cache.pools.nbytes + kept
    # two of three layers keep vectors of pages of 4 tokens, each half an entry
    pages = -(-(40 + 40) // 4) * 4 / (40 + 40)
    share = retriever.num_vectors / (2 * 4) * 2 / 3 * pages
    assert rollout.kv.peak_bytes / rollout.kv.full_peak_bytes == pytest.approx(1 + share)
    assert 0.3 < rollout.kv.read_share < 0.9
    assert torch.equal(rollout.kv[torch.tensor([1])].read_integral, rollout.kv.read_integral[[1]])


def test_reading_is_counted() -> None:
    """One prompt of 4, pages of 2, budget 6 (first page, last page, one chosen), one of two layers dense."""
    retriever = Quest(6, page_size=2, num_last_pages=1, num_dense_layers=1)
    sampler = RolloutSampler(model(num_layers=2), retriever=retriever)
    rollout = sampler.generate([[3, 4, 5, 6]], SamplingParams(max_completion_length=7, seed=1))
    dense = [5, 6, 7, 8, 9, 10]
    # 3 pages: all; 4 pages: 6 entries, the last page half full or full, and 2 pages scored, two halves of an entry each
    sparse = [5, 6, 5 + 2, 6 + 2, 5 + 3, 6 + 3]
    assert rollout.kv.read_integral.tolist() == [(sum(dense) + sum(sparse)) / 2]
    assert rollout.kv.read_share == pytest.approx((sum(dense) + sum(sparse)) / 2 / sum(dense))


@pytest.mark.thinned(3)
@each_retriever
def test_a_hybrid_with_room_for_all_survivors_is_the_compressor_alone(retriever: Retriever) -> None:
    policy = model()
    wide = type(retriever)(32, page_size=4, num_dense_layers=1)
    alone = RolloutSampler(policy, SnapKV(**SMALLEST_KV), 3).generate(PROMPTS, PARAMS)
    both = RolloutSampler(policy, SnapKV(**SMALLEST_KV), 3, retriever=wide).generate(PROMPTS, PARAMS)
    assert_same(both, replace(alone, evictions=None))
    narrow = RolloutSampler(policy, SnapKV(**SMALLEST_KV), 3, retriever=retriever).generate(PROMPTS, PARAMS)
    assert not torch.equal(narrow.sequences, alone.sequences)
    assert narrow.kv.read_integral.sum() < narrow.kv.stored_integral.sum()


@pytest.mark.thinned(3)
@each_retriever
def test_a_hybrid_does_not_depend_on_the_batch(retriever: Retriever) -> None:
    policy, compressor = model(), StreamingLLM(**SMALLEST_KV)
    rollouts = [
        RolloutSampler(policy, compressor, slots, retriever=retriever).generate(PROMPTS, PARAMS)
        for slots in (None, 3, 7)
    ]
    assert_same(rollouts[0], rollouts[1])
    assert_same(rollouts[0], rollouts[2])


@pytest.mark.parametrize("retriever", [Centroid(**SMALL), Quest(**SMALL)], ids=["centroid", "quest"])
def test_summaries_are_those_of_the_entries_held(retriever: Retriever) -> None:
    """After evictions, appends, forks and refills the pages of every slot are those of its keys as they stand."""
    sampler = RolloutSampler(model(), SnapKV(**SMALLEST_KV), num_slots=3, retriever=retriever)
    sampler.generate(PROMPTS, PARAMS)
    cache = sampler.cache
    checked = 0
    for layer, slot, head in itertools.product((1, 2), range(3), range(2)):
        start, length = int(cache.pools.offsets[layer, slot, head]), int(cache.pools.lengths[layer, slot, head])
        keys = cache.pools.keys[start : start + length // 4 * 4].unflatten(0, (-1, 4))
        want = retriever.summarize(keys).transpose(0, 1)
        got = cache.summaries[layer - 1][slot, head, :, : len(keys)]
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        checked += len(keys)
    assert checked > 12 * 4


def test_slots_that_are_put_back_go_on() -> None:
    """With their pages."""
    policy, retriever = model(), Centroid(**SMALL)
    want = RolloutSampler(policy, retriever=retriever).generate(PROMPTS, PARAMS)
    sampler = RolloutSampler(policy, retriever=retriever, num_slots=4)
    session = RolloutSession(sampler, PARAMS, max_prompt_length=40)
    session.add(PROMPTS, sequence_ids=range(10))
    session.advance(max_steps=25)
    put_back(session)
    session.advance()
    got = session.take(session.complete)
    assert_same(want, got)
    torch.testing.assert_close(got.kv.read_integral, want.kv.read_integral)


def test_the_cache_is_used_again_for_the_same_retriever_only() -> None:
    sampler = RolloutSampler(model(), retriever=RETRIEVERS["centroid"], num_slots=4)
    first = sampler.generate(PROMPTS, PARAMS)
    cache = sampler.cache
    assert_same(first, sampler.generate(PROMPTS, PARAMS))
    assert sampler.cache is cache
    sampler.retriever = RETRIEVERS["quest"]
    again = sampler.generate(PROMPTS, PARAMS)
    assert sampler.cache is not cache
    assert_same(again, RolloutSampler(sampler.model, retriever=RETRIEVERS["quest"]).generate(PROMPTS, PARAMS))


def test_rollouts_of_a_retriever_are_stored() -> None:
    rollout = RolloutSampler(model(), retriever=Centroid(**SMALL)).generate(PROMPTS, PARAMS)
    again = Rollout.from_state(rollout.to("cpu").state())
    assert again.kv.read_share == rollout.kv.read_share


def test_a_decode_step_makes_no_tensor_of_numbers_of_the_host() -> None:
    """What a graph replays may not come from the host: the schedule lies on the device."""
    g = CacheGeometry.of(model())
    retriever = RETRIEVERS["schedule"]
    cache = with_pages(CacheSize(2, (40, 40, 40), 0, 40), retriever).allocate(g)
    cache.seen.copy_(torch.tensor([18, 19, 35]))
    cache.begin_step(torch.tensor([0, 1, 2]))
    assert cache.limits.tolist() == 3 * [[3, 4, 6]]  # of each layer
    assert cache.limits.dtype == torch.int32
    cache.lengths.fill_(7)
    assert cache._attend(0, torch.tensor([0, 1, -1]), torch.ones(3, 4, 16), None, None).shape == (3, 4, 16)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"budget": 100}, "page_size=16 does not divide budget=100. Take 96 or 112 tokens"),
    ({"budget": 8}, r"does not divide budget=8\. Take 16 tokens"),
    ({"budget": LengthSchedule([0, 9], [64, 72])}, "does not divide budget=72"),
    ({"budget": 32}, r"budget=32 is smaller than the pages that are always read: .*\(1 \+ 2\) x 16 = 48 tokens"),
    ({"budget": 0}, "budget must be a positive number of tokens, got budget=0"),
    ({"budget": 64, "page_size": 0}, "page_size=0"),
    ({"budget": 64, "num_last_pages": 0}, "num_last_pages=0"),
    ({"budget": 64, "num_first_pages": -1}, "num_first_pages=-1"),
    ({"budget": 64, "num_dense_layers": -1}, "num_dense_layers=-1"),
    ({"budget": 64, "group_reduction": "sum"}, "must be one of mean, max, got group_reduction='sum'"),
]


@pytest.mark.parametrize("kind", [Centroid, Quest])
@pytest.mark.parametrize(("options", "match"), REFUSED)
def test_numbers_that_do_not_fit_are_refused(kind: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*{match}"):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compressor": H2O(24)}, "H2O counts the attention that every entry receives, and Centroid does not compute"),
        ({"compressor": SnapKV(24, budget_rule=Adaptive())}, "Adaptive gives heads different memory"),
        ({"retriever": Centroid(64, num_dense_layers=3)}, "num_dense_layers=3 leaves none of the model's 3 layers"),
        ({"kv_dtype": "fp8"}, "kv_dtype=torch.float8_e4m3fn is too narrow"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RolloutSampler(model(), **{"retriever": Centroid(**SMALL), **options})


def test_a_schedule_that_is_raised_between_rollouts_is_followed() -> None:
    retriever = Centroid(**SMALL)
    sampler = RolloutSampler(model(), retriever=retriever, num_slots=4)
    before = sampler.generate(PROMPTS, PARAMS)
    retriever.schedule = LengthSchedule.constant(80)
    assert (retriever.budget, sampler.generate(PROMPTS, PARAMS).kv.read_share) == (80, 1.0)
    retriever.schedule = LengthSchedule.constant(16)
    assert_same(before, sampler.generate(PROMPTS, PARAMS))


def test_a_budget_is_raised_in_whole_pages() -> None:
    retriever = Quest(budget=LengthSchedule([0, 30], [16, 24]), page_size=4, num_dense_layers=1)
    retriever.raise_budget(1)
    assert retriever.schedule == LengthSchedule([0, 30], [24, 32])
    retriever.raise_budget(0)
    assert retriever.schedule == LengthSchedule([0, 30], [16, 24])
    single = Quest(budget=20, page_size=4, num_dense_layers=1)
    single.raise_budget(1)  # a quarter more is 25
    assert single.budget == 28


def test_usage_with_and_without_retrieval_is_joined() -> None:
    """Where nothing is chosen all that is stored is read."""
    numbers = torch.arange(1.0, 3.0)
    plain = KVUsage(numbers, numbers, 2 * numbers, 4 * numbers, 10, 20, 30)
    chosen = replace(plain, read_integral=numbers)
    joined = KVUsage.cat([plain, chosen])
    assert joined.read_integral.tolist() == [2, 4, 1, 2]
    assert joined.read_share == pytest.approx(9 / 24)
    assert KVUsage.cat([plain, plain]).read_integral is None
    assert KVUsage.cat([chosen, chosen]).read_integral.tolist() == [1, 2, 1, 2]


def test_layers_share_the_budget(chosen: ChosenPages) -> None:
    """Pyramid: more pages for the first of the layers that retrieve, fewer for the last, as many in all."""
    pages = {"num_first_pages": 0, "num_last_pages": 1, "num_dense_layers": 1}
    retriever = Centroid(budget=16, page_size=4, **pages, budget_rule=Pyramid(beta=2))
    assert retriever.layer_pages(3, 16) == [6, 4, 2]
    limits = retriever.page_limits(3, "cpu")(torch.tensor([5, 40]))
    assert limits.tolist() == [[6, 6], [4, 4], [2, 2]]
    four = small_model(num_layers=4)
    sampler = RolloutSampler(four, retriever=retriever)
    rollout = sampler.generate(PROMPTS, PARAMS)
    read = (chosen.of(rollout, PARAMS.seed)[:, :, 30] >= 0).sum(dim=-1)  # (B, L, H) of a query that all sequences have
    assert read.amax(dim=(0, 2)).tolist() == [6, 4, 2]
    found = retrieval_logprobs(four, rollout, retriever, PARAMS.temperature)
    torch.testing.assert_close(found.logprobs, rollout.sampler_logprobs, atol=2e-5, rtol=0)
    assert chosen.share_differing(rollout, PARAMS.seed, retriever) == 0
    with pytest.raises(ValueError, match="but Adaptive splits heads"):
        Centroid(budget=16, page_size=4, budget_rule=Adaptive())
