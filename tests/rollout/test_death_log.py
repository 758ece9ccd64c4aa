"""The log of deaths numbers events, and every record is that of a log of the steps themselves, kept by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from rollouts import CHECK_EVERY, PROMPTS, small_model
from torch import Tensor

from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.cache.compression import Compression, Trigger
from sparse_rl_lightning.cache.slots import CacheSize, SlotCache, SlotSelection
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV, RandomEviction, SnapKV
from sparse_rl_lightning.integrations.transformers import CompressedCache, cache
from sparse_rl_lightning.integrations.transformers.cache import KEYWORD
from sparse_rl_lightning.ops.pools import EVENT_TYPES
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import NEVER, EvictionRecord
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine.memory import slot_bytes
from sparse_rl_lightning.testing import tiny_model

EACH: dict[str, Any] = {"buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=3, max_completion_length=30, seed=5)
COMPRESSORS: dict[str, Compressor] = {
    "snapkv": SnapKV(12, **EACH),
    "rkv, pyramid": RKV(12, **EACH, budget_rule=Pyramid(2)),
    "h2o": H2O(12, **EACH),
    "heads of their own": RandomEviction(12, **EACH, budget_rule=Adaptive()),
    "prompts stored whole": SnapKV(12, **EACH, compress_prompt=False),
    "prompts protected": SnapKV(48, **EACH, protect_prompt=True),
    "every step": SnapKV(12, **EACH | {"buffer": 1}),
    "budgets grow": SnapKV(LengthSchedule([0, 26, 38], [10, 16, 22]), **EACH),
    "budgets shrink": SnapKV(LengthSchedule([0, 26, 38], [22, 14, 9]), **EACH),
}
LONG_ONES = ["snapkv", "heads of their own", "every step", "budgets shrink"]


class BruteForce:
    """The step at which every token of a slot died, found by looking which positions an eviction leaves.

    Every record that a cache makes is compared with the record of these steps, bit by bit.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_records = self.num_dead = 0
        for name in ("begin", "store", "compact", "save", "restore", "fork", "evictions_of"):
            patch.setattr(SlotCache, name, self.around(name, getattr(SlotCache, name)))

    def around(self, name: str, own: Any) -> Any:
        def called(cache: SlotCache, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(cache, "deaths_by_step"):
                cache.deaths_by_step = torch.full(cache.deaths.death.shape, NEVER, dtype=torch.int32)  # type: ignore[attr-defined]
            return getattr(self, name)(cache, cache.deaths_by_step, partial(own, cache), *args, **kwargs)

        return called

    def begin(self, cache: SlotCache, death: Tensor, own: Any, slots: list[int], *args: Any) -> None:
        own(slots, *args)
        death[:, slots] = NEVER

    def store(self, cache: SlotCache, death: Tensor, own: Any, layer: int, prompts: Any, *args: Any) -> None:
        own(layer, prompts, *args)
        for slot, length in zip(prompts.places.tolist(), prompts.lengths, strict=True):
            for head, own_death in enumerate(death[layer, slot]):
                own_death[sorted(set(range(length)) - self.alive(cache, layer, slot, head))] = length

    def compact(self, cache: SlotCache, death: Tensor, own: Any, chosen: SlotSelection, *args: Any) -> None:
        heads = [
            (layer, slot, head)
            for layer in range(cache.geometry.num_layers)
            for slot in chosen.places.tolist()
            for head in range(cache.geometry.num_kv_heads)
        ]
        before = [self.alive(cache, *at) for at in heads]
        own(chosen, *args)
        for at, alive in zip(heads, before, strict=True):
            death[at][sorted(alive - self.alive(cache, *at))] = int(cache.seen[at[1]])

    def save(self, cache: SlotCache, death: Tensor, own: Any, slot: int, *args: Any) -> dict[str, Tensor]:
        return {**own(slot, *args), "deaths_by_step": death[:, slot].clone()}

    def restore(self, cache: SlotCache, death: Tensor, own: Any, slot: int, content: Any, *args: Any) -> None:
        own(slot, content, *args)
        death[:, slot] = NEVER
        saved = content["deaths_by_step"]
        death[:, slot, :, : saved.shape[-1]] = saved

    def fork(self, cache: SlotCache, death: Tensor, own: Any, sources: Tensor, destinations: Tensor) -> None:
        own(sources, destinations)
        death[:, destinations] = death[:, sources]

    def evictions_of(self, cache: SlotCache, death: Tensor, own: Any, slot: int, end: int, *args: Any) -> Any:
        found, dense = own(slot, end, *args), death[:, slot : slot + 1, :, : end + 1]
        want = EvictionRecord.from_dense(torch.where(dense <= end, dense, NEVER))
        for field in fields(EvictionRecord):
            a, b = getattr(found, field.name), getattr(want, field.name)
            assert type(a) is type(b)
            assert (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(a, Tensor) else a == b, field.name
        steps = cache.deaths.steps[slot]
        assert steps[steps != NEVER].tolist() == death[:, slot].unique().tolist()[:-1]  # of this sequence alone
        self.num_records += 1
        self.num_dead += int(found.num_dead)
        return found

    @staticmethod
    def alive(cache: SlotCache, *head: int) -> set[int]:
        first = int(cache.pools.offsets[head])
        return set(cache.pools.positions[first : first + int(cache.lengths[head])].tolist())


@pytest.fixture
def brute_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[BruteForce]:
    found = BruteForce(monkeypatch)
    yield found
    assert found.num_records
    assert found.num_dead


def number_in(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trigger, "most_events", lambda self, max_length: torch.iinfo(kind).max)


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:.*shrinks with length")
@pytest.mark.parametrize("check_every", [1, 8])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_records_of_rollouts(
    name: str, check_every: int, brute_force: BruteForce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More samples than slots, so that prompts wait outside; ends that are noticed late, so that events are undone."""
    monkeypatch.setattr(CHECK_EVERY, {"cpu": check_every})
    policy = small_model(eos_token_id=7)
    RolloutSampler(policy, COMPRESSORS[name], num_slots=4).generate(PROMPTS, PARAMS)
    assert brute_force.num_records == 15


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:.*shrinks with length")
@pytest.mark.parametrize("kinds", [EVENT_TYPES[:1] * 2, EVENT_TYPES[:2], EVENT_TYPES[1:], EVENT_TYPES[1::-1]], ids=str)
@pytest.mark.parametrize("name", LONG_ONES)
def test_records_of_sequences_that_go_on_in_another_cache(
    name: str, kinds: tuple[torch.dtype, ...], brute_force: BruteForce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches may number events in different types."""
    sessions = []
    for kind in kinds:
        number_in(kind, monkeypatch)
        sampler = RolloutSampler(small_model(), COMPRESSORS[name], num_slots=6)
        sessions.append(RolloutSession(sampler, PARAMS, max_prompt_length=40))
        assert sessions[-1].engine.cache.deaths.death.dtype == kind
    sessions[0].add(PROMPTS, sequence_ids=range(15))
    sessions[0].advance(max_steps=21)
    own, other = (session.engine.cache for session in sessions)
    for slot, one in sessions[0].scheduler.running.items():
        other.restore(slot, own.save(slot, one.num_fed))
        assert torch.equal(other.deaths.of_slot(slot), own.deaths.of_slot(slot))
    sessions[0].advance()
    assert brute_force.num_records == 15


def test_records_of_conversations(brute_force: BruteForce) -> None:
    sampler = RolloutSampler(small_model(), SnapKV(12, **EACH), 3, list(range(100, 116)))
    params = SamplingParams(max_completion_length=56, temperature=1.5, seed=5)
    session = RolloutSession(sampler, params, max_prompt_length=40, turns=True)
    session.add(PROMPTS, sequence_ids=range(5))
    given = 0
    while session.num_unfinished:
        session.advance()
        for sequence in list(session.paused):
            if session.room(sequence) > 13 and given < 12:
                session.append(sequence, range(20, 24 + 3 * (given % 4)))
                given += 1
            else:
                session.finish(sequence)
    assert given == 12


def test_records_of_beams_whose_memory_grows(brute_force: BruteForce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_ROOM", 7)
    model = small_model()
    own = CompressedCache(SnapKV(12, **EACH), model)
    asked: dict[str, Any] = {"max_new_tokens": 40, "num_beams": 3, "do_sample": False, "pad_token_id": 0, KEYWORD: own}
    model.generate(torch.tensor([PROMPTS[1], PROMPTS[1][::-1]]), **asked)
    assert len(own.evictions) == 6


def longest(slots: int, kind: torch.dtype) -> SlotCache:
    """A cache with room for 400 tokens."""
    geometry = CacheGeometry.of(tiny_model())
    return CacheSize(slots, (20, 20), 4, 400, event_dtype=kind).allocate(geometry)


def test_as_many_events_as_are_numbered_go_on_in_another_cache() -> None:
    old, new = longest(1, torch.int16), longest(1, torch.uint8)
    old.deaths.steps[0, :255] = 3 * torch.arange(255) // 2 + 1
    old.deaths.death[:, 0, :, :255] = torch.arange(255)
    content = old.save(0, 400)
    assert content["death"].dtype == torch.int32
    new.restore(0, content)
    assert torch.equal(new.deaths.of_slot(0), old.deaths.of_slot(0))


def test_the_log_is_3_percent_of_the_keys_and_values() -> None:
    """At a budget of 2,048 and a buffer of 128 in bfloat16, heads of 128, and 32k tokens; with steps it was 12 %."""
    tiny = CacheGeometry.of(tiny_model())
    g = replace(
        tiny, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
        device=torch.device("meta"),
    )  # fmt: skip
    size = Compression(SnapKV(budget=2048, buffer=128), 28).cache_size(g, 4, 1024, 32_768)
    parts = size.allocate(g).parts()
    log, entries = (sum(t.nbytes for t in parts[name]) for name in ("the eviction record", "keys and values"))
    assert entries == 4 * 28 * 8 * (2048 + 128) * 2 * 128 * 2
    assert 0.029 < log / entries < 0.03
    planned = slot_bytes(g, size).arithmetic
    assert (
        f"{log // 4:,} for the eviction record (32,768 tokens x 224 heads of all layers x 1, and steps of events)"
        in planned
    )


@pytest.mark.parametrize(
    ("compressor", "length", "kind"),
    [
        (FullKV(), 10**6, torch.uint8),
        (SnapKV(2048, buffer=128), 2048 + 255 * 128 + 127, torch.uint8),
        (SnapKV(2048, buffer=128), 2048 + 256 * 128, torch.int16),
        (SnapKV(12, **EACH | {"buffer": 1}), 12 + 32767, torch.int16),
        (SnapKV(12, **EACH | {"buffer": 1}), 12 + 32768, torch.int32),
    ],
)
def test_numbers_are_as_wide_as_there_may_be_events(compressor: Compressor, length: int, kind: torch.dtype) -> None:
    geometry = CacheGeometry.of(tiny_model())
    assert Compression(compressor, 2).cache_size(geometry, 1, 10, length).event_dtype == kind
