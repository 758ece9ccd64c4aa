"""The memory plan: to the byte what the cache allocates, as many slots as fit and not one more."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_cases import SMALL
from torch import Tensor

from sparse_rl_lightning.cache.slots import CacheSize, SlotCache
from sparse_rl_lightning.compressors import RKV, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.retrieval.cache import PagedCache, with_pages
from sparse_rl_lightning.retrievers import Centroid, Quest
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.memory import SlotBytes, drawing_bytes, free_bytes, plan_slots, slot_bytes
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs
from sparse_rl_lightning.rollout.generator import Generator
from sparse_rl_lightning.rollout.options import OF_FULL_CACHE, RolloutOptions
from sparse_rl_lightning.rollout.prompts import MOST_TOP
from sparse_rl_lightning.rollout.session import VersionedLogs
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.gpus import RealGPU
from tests.pretend_gpu import PretendGPU

LOGGED = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_logprobs=3, min_completion_length=2)]


def geometry(kv_dtype: torch.dtype = torch.float32) -> CacheGeometry:
    return CacheGeometry.of(tiny_model(num_layers=3, num_heads=4, num_kv_heads=2), kv_dtype)


def tensors(thing: Any) -> list[Tensor]:
    """Every tensor an object holds, in lists, dictionaries and dataclasses too."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for part in thing for tensor in tensors(part)]
    if isinstance(thing, dict):
        return tensors(list(thing.values()))
    if dataclasses.is_dataclass(thing):
        return tensors(list(vars(thing).values()))
    return []


def allocated(*things: dict[str, Any]) -> int:
    """Bytes of the memory behind all tensors, each piece counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors(list(things))]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def attributes(cache: SlotCache) -> dict[str, Any]:
    """What the cache owns: not the model's rotary frequencies."""
    parts: dict[str, Any] = {"": cache, "deaths of ": cache.deaths}
    parts |= {f"{other.purpose} of ": other for other in cache.storages}
    own = {of + name: v for of, part in parts.items() for name, v in vars(part).items() if name != "geometry"}
    if isinstance(cache, PagedCache):
        own |= {"limits_at": vars(cache.limits_at)}
    return own


@pytest.mark.parametrize("num_slots", [1, 5])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "size",
    [
        CacheSize(1, (24, 24, 24), 8, 40),
        CacheSize(1, (9, 30, 5), 1, 100),
        CacheSize(1, (33, 33, 33), 0, 33),
        CacheSize(1, (24, 8, 24), 2, 40, ("mass", "age"), per_head=True),
        CacheSize(1, (24, 8, 25), 2, 40, ("mass",), keeps_probabilities=True),
        CacheSize(
            1, (24, 8, 24), 2, 40, ("mass",), True, head_state_fields=(("a", 1), ("b", 7)), keeps_probabilities=True
        ),
        with_pages(CacheSize(1, (24, 24, 25), 0, 40), Centroid(16, page_size=4, num_dense_layers=1)),
        with_pages(CacheSize(1, (24, 8, 24), 2, 40), Quest(48, num_dense_layers=0)),
    ],
)
def test_the_cache_allocates_what_was_planned(size: CacheSize, kv_dtype: torch.dtype, num_slots: int) -> None:
    g = geometry(kv_dtype)
    slot = slot_bytes(g, size)
    cache = dataclasses.replace(size, num_slots=num_slots).allocate(g)
    plan = plan_slots(slot, slot.of(num_slots), num_slots)
    assert plan.num_slots == num_slots
    assert plan.total_bytes == allocated(attributes(cache))
    assert plan.pool_bytes == cache.pool_bytes


@pytest.mark.parametrize("logs", [SequenceLogs, VersionedLogs])
@pytest.mark.parametrize("params", LOGGED, ids=["plain", "truncated", "top"])
def test_logs_are_counted_with_the_parameters(params: SamplingParams, logs: type[SequenceLogs]) -> None:
    g = geometry()
    cache = SlotCache(g, CacheSize(4, (20, 20, 20), 2, 50))
    planned = slot_bytes(g, CacheSize(1, (20, 20, 20), 2, 50), params, logs)
    assert planned.of(4) == allocated(attributes(cache), vars(logs(4, 50, params, g.device)))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_logprobs": 5}, {"repetition_penalty": 1.1}], ids=str)
def test_drawing_counts_on_a_gpu(params: dict[str, Any]) -> None:
    """Twice: in the memory of the graphs, and where prompts draw their first tokens."""
    size, given, vocabulary = CacheSize(1, (20, 20, 20), 2, 50), SamplingParams(**params), 10_000
    on_gpu = dataclasses.replace(geometry(), device=torch.device("cuda", 0))
    without, slot = slot_bytes(on_gpu, size, given), slot_bytes(on_gpu, size, given, vocabulary=vocabulary)
    most = drawing_bytes(8, vocabulary, given) - drawing_bytes(7, vocabulary, given)  # of a float32 model
    assert slot.total - without.total == 2 * most
    assert f"{2 * most:,} for drawing" in slot.arithmetic
    assert most >= 4 * vocabulary  # logits
    assert slot_bytes(geometry(), size, given, vocabulary=vocabulary) == without  # a CPU frees them at once


def test_what_splits_of_long_heads_leave_counts_on_a_gpu() -> None:
    """One layer's: of every query head and split of at most 768 entries, the sums and two numbers of the softmax."""
    on_gpu, params = dataclasses.replace(geometry(), device=torch.device("cuda", 0)), SamplingParams()

    def counted(size: CacheSize) -> int:
        extra = slot_bytes(on_gpu, size, params).total - slot_bytes(geometry(), size, params).total
        assert (f"{extra:,} for attention of long heads" in slot_bytes(on_gpu, size, params).arithmetic) == (extra > 0)
        return extra

    wide = 4 * (16 + 2) * 4  # bytes of a split: query heads x numbers x 4
    assert counted(CacheSize(1, (20, 768, 20), 2, 2000)) == 0
    assert counted(CacheSize(1, (20, 769, 20), 2, 2000)) == 2 * wide
    assert counted(CacheSize(1, (1600, 769, 20), 2, 2000)) == 3 * wide
    assert counted(with_pages(CacheSize(1, (1600,) * 3, 2, 2000), Centroid(100, page_size=10, num_dense_layers=0))) == 0
    assert counted(with_pages(CacheSize(1, (1600,) * 3, 2, 2000), Centroid(100, page_size=10))) == 3 * wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_drawn_from_is_counted_at_its_peak(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel needs the logits, and a maximum and a sum of every 512; the reference has copies in float64."""
    count, plain, penalized = 4 * 5000, SamplingParams(), SamplingParams(repetition_penalty=2.0)
    known = "sparse_rl_lightning.rollout.engine.memory.has_kernel"  # whether or not one has been built
    monkeypatch.setattr(known, lambda op, device: False)
    without = drawing_bytes(4, 5000, plain, dtype)
    monkeypatch.setattr(known, lambda op, device: True)
    assert drawing_bytes(4, 5000, plain, dtype) == pytest.approx(count * dtype.itemsize, rel=0.03)
    assert without > drawing_bytes(4, 5000, plain, dtype) + 16 * count
    # logits as they are and in float32, which tokens have occurred; of those that have, all in float32 again
    wide = 4 if dtype != torch.float32 else 0
    assert drawing_bytes(4, 5000, penalized, dtype) >= count * (dtype.itemsize + wide + 1 + 8)


def test_what_retrieval_reads_is_logged_too() -> None:
    g, size = geometry(), with_pages(CacheSize(4, (20, 20, 20), 0, 50), Centroid(48, num_dense_layers=2))
    cache, logs = size.allocate(g), SequenceLogs(4, 50, SamplingParams(), g.device)
    assert cache.read.shape == (5, 50)
    assert slot_bytes(g, size, SamplingParams()).of(4) == allocated(attributes(cache), vars(logs))


@given(
    parts=st.lists(st.integers(0, 10**7), min_size=3, max_size=3), limit=st.integers(2, 10**10),
    num_sequences=st.integers(1, 2000), multiple=st.sampled_from([1, 8, 16]),
)  # fmt: skip
def test_most_slots_that_fit(parts: list[int], limit: int, num_sequences: int, multiple: int) -> None:
    slot = SlotBytes(1 + parts[0], *parts[1:], "")
    if slot.of(1) > limit:
        with pytest.raises(ValueError, match="Not even one slot fits"):
            plan_slots(slot, limit, num_sequences, multiple=multiple)
        return
    plan = plan_slots(slot, limit, num_sequences, multiple=multiple)
    assert plan.total_bytes == slot.of(plan.num_slots) <= limit
    if slot.of(num_sequences) <= limit:
        assert plan.num_slots == num_sequences
    assert plan.num_slots == num_sequences or plan.num_slots <= multiple or plan.num_slots % multiple == 0
    if plan.num_slots < num_sequences:
        one_more = plan.num_slots + (multiple if plan.num_slots >= multiple else 1)
        assert slot.of(min(one_more, num_sequences)) > limit


@pytest.mark.parametrize(("limit", "other"), [(5 * 2**20, 5.0 * 2**20), (1, 1.0)])
def test_a_limit_is_the_same_as_int_and_as_float(limit: int, other: float) -> None:
    """A parser that reads ``float`` makes floats of bytes too."""
    slot = SlotBytes(2**20, 2**20, 0, "")
    one, two = plan_slots(slot, limit, 64), plan_slots(slot, other, 64)
    assert one.num_slots == two.num_slots == (64 if limit == 1 else 5)
    assert type(one.limit) is type(two.limit) is int
    assert one.limit == pytest.approx(two.limit, rel=0.5)  # free memory comes and goes
    assert ("free on" in one.origin) == ("free on" in two.origin) == (limit == 1)


@given(limit=st.floats(0.01, 1.0))
def test_a_share_is_of_the_free_memory(limit: float) -> None:
    slot = SlotBytes(1024, 1000, 24, "")
    plan = plan_slots(slot, limit, 3)
    assert plan.num_slots == 3
    assert plan.limit == pytest.approx(limit * free_bytes("cpu"), rel=0.5)  # other processes come and go


def test_free_memory_is_part_of_the_machine() -> None:
    with open("/proc/meminfo") as file:
        total = 1024 * int(file.readline().split()[1])
    assert 0.01 * total < free_bytes("cpu") < total


def test_memory_in_reserve_counts_as_free(gpu: RealGPU) -> None:
    with gpu:
        before = free_bytes("cuda")
        block = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
        held = free_bytes("cuda")
        del block  # torch keeps it in reserve
        assert before - held >= 2**28
        assert free_bytes("cuda") - held >= 2**28


def test_rollouts_in_turn_stay_below_their_limit() -> None:
    """Many short sequences, and long ones: slots for both would be as many as the one and as long as the other."""
    sampler = RolloutSampler(tiny_model(), SnapKV(budget=60, buffer=10), memory_limit=2**18)
    counts = []
    for length in (5, 75) * 2:
        sampler.generate([[3, 4]], SamplingParams(num_generations=16, max_completion_length=length))
        assert allocated(attributes(sampler.cache), vars(sampler.engine.logs)) <= 2**18
        counts.append(sampler.cache.size.num_slots)
    assert counts[0] > counts[1]


def test_why_says_the_numbers() -> None:
    slot = SlotBytes(2**20, 2**20, 0, "")
    assert plan_slots(slot, 21 * 2**20, 64).why == (
        "16 slots of 1.00 MiB: as many as fit for 64 sequences, rounded down from 21 to a multiple of 8; "
        "16.00 MiB of the 21.00 MiB allowed (given in bytes)."
    )
    assert plan_slots(slot, 5 * 2**20, 64).why.startswith("5 slots of 1.00 MiB: as many as fit for 64 sequences; ")
    assert plan_slots(slot, 13 * 2**20, 12).why.startswith("12 slots of 1.00 MiB: one for each of the 12 sequences; ")
    assert " of " in (why := plan_slots(slot, 0.5, 1).why)
    assert "(0.5 of " in why
    assert why.startswith("1 slot of ")


def test_refusal_shows_the_arithmetic() -> None:
    slot = slot_bytes(geometry(), CacheSize(1, (24, 24, 24), 8, 40), SamplingParams())
    with pytest.raises(ValueError, match="Not even one slot fits") as refused:
        plan_slots(slot, 10_000, 4)
    message = str(refused.value)
    # 16 wide heads: 72 entries x 2 heads x 2 x 16 x 4 bytes and so on
    assert "18,432 for keys and values (72 entries in 3 layers x 2 KV heads x 2 x 16 x 4 bytes)" in message
    assert "6,144 for queries (8 x 4 heads x 3 layers x 16 x 4)" in message
    assert "1,120 for the eviction record (40 tokens x 6 heads of all layers x 4, and steps of events)" in message
    assert f"takes {slot.of(1):,} bytes, the limit is 10,000" in message
    terms = [int(term.split()[0].replace(",", "")) for term in slot.arithmetic.split(" + ") if " for " in term]
    assert sum(terms) == slot.total


@pytest.mark.parametrize("limit", [0, -5, 0.0, 1.5, -0.1, 1e9 + 0.5, math.inf, math.nan])
def test_limits_out_of_range_are_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=r"limit .*got (0|-5|0.0|1.5|-0.1|1000000000.5|inf|nan)\."):
        plan_slots(SlotBytes(1, 1, 0, ""), limit, 1)


def test_a_share_measured_before_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in use for the slots would count as taken."""
    slot = SlotBytes(1024, 1000, 0, "")
    first = plan_slots(slot, 0.5, 10**9)
    monkeypatch.setattr("sparse_rl_lightning.rollout.engine.memory.free_bytes", lambda device: 2048)
    assert plan_slots(slot, 0.5, 10**9, before=first).num_slots == first.num_slots > 1
    assert plan_slots(slot, 1.0, 10**9, before=first).limit == 2048


def test_a_gpu_s_kernel_reports_so_many_of_the_most_likely_tokens() -> None:
    model, params = tiny_model(vocab_size=300), SamplingParams(max_completion_length=2, top_logprobs=MOST_TOP + 1)
    assert RolloutSampler(model).generate([[3]], params).topk_ids.shape[-1] == MOST_TOP + 1
    with PretendGPU() as gpu, pytest.raises(UserError, match="at most 256 on a GPU"):
        RolloutSampler(gpu.copy_of(model)).generate([[3]], params)


def test_memory_that_was_given_back_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then an optimizer or another cache may have taken it."""
    free = 2**22
    monkeypatch.setattr("sparse_rl_lightning.rollout.engine.memory.free_bytes", lambda device: free)
    sampler = RolloutSampler(tiny_model(), RKV(**SMALL), memory_limit=0.5)
    counts = []
    for released in (False, False, True):
        if released:
            sampler.release()
        sampler.generate([[3]], SamplingParams(num_generations=1000, max_completion_length=1))
        counts.append(sampler.memory_plan.num_slots)
        free //= 2
    assert counts[0] == counts[1] > counts[2] > 1


def test_evaluations_with_the_full_cache_take_what_a_gpu_has_free() -> None:
    """A slot of the full cache can be many times one of training, of which as many were asked for as fit."""
    options, model = RolloutOptions(), tiny_model()
    tokenizer = character_tokenizer()
    with PretendGPU() as gpu:
        for device, limit in (("cpu", None), ("cuda", OF_FULL_CACHE)):
            generator = Generator(RKV(**SMALL), SamplingParams(), options)
            generator.bind(model if device == "cpu" else gpu.copy_of(model), tokenizer)
            assert generator.sampler().memory_limit is None
            assert generator.sampler(dense=True).memory_limit == limit
    given = RolloutOptions(memory_limit=0.3)
    assert given.for_full_cache(torch.device("cuda")) is given
