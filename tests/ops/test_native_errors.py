"""The ops as torch sees them, and wrong arguments: an error that one understands, nothing written, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from native_cases import (
    CAPACITY,
    CASES,
    DIM,
    HEADS,
    POOLED,
    SLOTS,
    Case,
    copy,
    kernel,
    op_of,
    recorded,
    reference,
    same_bits,
    same_pools,
    uniform_pools,
    without_kernels,
)
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.schemas import SCHEMAS
from sparse_rl_lightning.ops.window_importance import cached_importance
from tests.gpus import RealGPU

WRONG: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("append", "projected", lambda t: t[:2], "(query|projected) has shape"),
    ("append", "projected", lambda t: t[:, :-3].contiguous(), "query has shape"),
    ("append", "projected", lambda t: t.double(), "(query|projected) is torch.float64, expected torch.float32"),
    ("append", "projected", lambda t: t.mT.contiguous().mT, "projected is not contiguous"),
    ("append_attend", "projected", lambda t: t[:2], "(query|projected) has shape"),
    ("append_attend", "slots", lambda t: t + 9, "slots contains 11"),
    ("append", "query_norm", lambda t: t[:8], "query_norm has shape"),
    ("append", "key_norm", lambda t: t.bfloat16(), "key_norm is torch.bfloat16"),
    ("rms_norm", "addend", lambda t: t[:2], "addend has shape"),
    ("rms_norm", "addend", lambda t: t.bfloat16(), "addend is torch.bfloat16"),
    ("rms_norm", "query_norm", lambda t: t[:8], "norm_weight has shape"),
    ("rms_norm", "hidden", lambda t: t.mT.contiguous().mT, "not contiguous"),
    ("silu_mul", "gate_and_up", lambda t: t[:, :-1].contiguous(), "31 columns, expected an even number"),
    ("silu_mul", "gate_and_up", lambda t: t.mT.contiguous().mT, "gate_and_up is not contiguous"),
    ("append", "slots", lambda t: t.int(), "slots is torch.int32"),
    ("append", "slots", lambda t: t + 9, "slots contains 11"),
    ("append", "seen", lambda t: t[:1], "seen has shape"),
    ("append", "seen", lambda t: -t, "cannot be negative"),
    ("append", "cos", lambda t: t[:, :5].contiguous(), "5 columns|sin has shape"),
    ("append", "ring", lambda t: t[..., :8].contiguous(), "query_ring has shape"),
    ("decode_attention", "query", lambda t: t[:, :5].contiguous(), "query has 5 heads, expected a multiple of the 2"),
    ("decode_attention", "query", lambda t: t[0], "query has shape"),
    ("decode_attention", "slots", lambda t: t - 5, "slots contains -3"),
    ("window_importance", "ring", lambda t: t.bfloat16(), "query_ring is torch.bfloat16"),
    ("window_importance", "seen", lambda t: t[:1], "seen has shape"),
    ("key_redundancy", "importance", lambda t: t[:1], "importance has shape"),
    ("score_entries", "state", lambda t: t[1:], "state_pool has shape"),
    ("score_entries", "prompt_keys", lambda t: t.int(), "prompt_keys is torch.int32"),
    ("evict", "held", lambda t: t.float(), "held is torch.float32"),
    ("evict", "scores", lambda t: t.double(), "scores is torch.float64"),
    ("evict", "budgets", lambda t: t - 2, "a budget is -1"),
    ("evict", "death", lambda t: t[:1], "death has shape"),
    ("evict", "death", lambda t: t.long(), "death is torch.int64, expected torch.uint8, torch.int16 or torch.int32"),
    ("evict", "event_steps", lambda t: t.long(), "event_steps is torch.int64, expected torch.int32"),
    ("evict", "event_steps", lambda t: t[:1], "event_steps has shape"),
    ("evict", "event_steps", lambda t: t.repeat(1, 64), "has 256 columns, death of uint8 takes 255"),
    ("fork", "death", lambda t: t.long(), "death is torch.int64, expected torch.uint8, torch.int16 or torch.int32"),
    ("evict", "state", lambda t: t[:3], "state_pool has shape"),
    ("evict from a source", "scores", lambda t: t[..., :2].contiguous(), "entries of scores = 2"),
    ("fork", "sources", lambda t: t + 3, "slots contains 3"),
    ("summarize_pages", "summaries", lambda t: t[:, :, :, :1].contiguous(), "those of the pages of summaries = 2"),
    ("summarize_pages", "summaries", lambda t: t.repeat(1, 1, 2, 1, 1), "summaries have 4 vectors per page"),
    ("select_pages", "summaries", lambda t: t[..., :8].contiguous(), "has shape"),
    ("select_pages", "limits", lambda t: t - 9, "limits.0. is -6"),
    ("page_attention", "pages", lambda t: t + 7, "page 7 of a list"),
    ("fork", "destinations", lambda t: t[:1], "destinations has shape"),
    ("draw", "steps", lambda t: t[:1], "steps has shape"),
    ("draw", "drawn_from", lambda t: t.bfloat16(), "drawn_from is torch.bfloat16"),
    ("draw", "drawn_from", lambda t: t[:, 1:].contiguous(), "drawn_from has shape"),
    ("draw", "logits", lambda t: t[:, :2].contiguous(), "the vocabulary has 2 tokens"),
    ("draw", "logits", lambda t: t.mT.contiguous().mT, "logits is not contiguous"),
]


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="the reference leaves the content of index tensors to PyTorch")
@pytest.mark.parametrize(
    ("name", "field", "spoil", "match"), WRONG, ids=[f"{w[0]}-{w[1]}-{i}" for i, w in enumerate(WRONG)]
)
def test_wrong_arguments_are_refused(name: str, field: str, spoil: Callable[[Tensor], Tensor], match: str) -> None:
    case = Case()
    setattr(case, field, spoil(getattr(case, field)))
    with pytest.raises((ValueError, RuntimeError), match=match):
        case.calls()[name]()


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
@pytest.mark.parametrize(
    ("name", "place"), [(n, i) for n in CASES for i, a in enumerate(SCHEMAS[op_of(n)].split(",")) if "Tensor" in a]
)
def test_kernels_survive_any_wrong_tensor(name: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(), monkeypatch)
    x = args[place] if place < len(args) else None
    if x is None:
        pytest.skip("an optional tensor that the case leaves out")
    shorter = x[: x.shape[0] - 1].contiguous()
    other_type = x.double() if x.dtype != torch.float64 else x.float()
    strided = torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0].copy_(x)
    if (name, place) == ("summarize_pages", 0):
        shorter = x[:1].contiguous()  # its only pool: it must just be long enough
    if (name, place) == ("key_redundancy", 0):
        shorter = x[:1].contiguous()  # the same
    if x.numel() == 1:
        strided = other_type  # a single number is contiguous whatever its stride
    empty = x.new_zeros(0)
    if (name, place) == ("summarize_pages", 1):
        shorter = empty = other_type  # any number of slots will do, none too
    if (name, place) in (("window_importance", 16), ("key_redundancy", 8)):
        shorter = other_type  # memory for any number of heads
    if (name, place) == ("draw", 4):
        shorter = empty = other_type  # any number of end tokens
    for wrong in (shorter, other_type, strided, x.unsqueeze(0), empty):
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        spoiled = [*args[:place], wrong, *args[place + 1 :]]
        with pytest.raises(RuntimeError):
            kernel(name)(*spoiled)
        assert all(same_bits(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, Tensor))


WAYS = [pytest.param(kernel, marks=without_kernels, id="kernel"), pytest.param(reference, id="reference")]
Way = Callable[[str], Callable[..., None]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["offsets", "lengths"])
@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize("name", CASES)
def test_heads_outside_the_pool_are_refused(
    name: str, value: int, part: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("draw", "rms_norm", "silu_mul") or (part == "offsets" and name == "select_pages"):
        pytest.skip("it does not look into the pool")
    case = Case()
    for pools in (case.pools, case.source):
        getattr(pools, part)[...] = value
    case.sources, case.destinations = torch.tensor([0]), torch.tensor([1])
    args, before = recorded(name, case, monkeypatch), copy(case.pools)
    with pytest.raises(RuntimeError, match=r"entries|full"):
        way(name)(*args)
    assert same_pools(case.pools, before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slot", [3, -5, 10**9])
@pytest.mark.parametrize("name", POOLED)
def test_slots_that_are_not_there_are_refused(name: str, slot: int, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.slots = case.sources = torch.tensor([-1, slot, -1])
    args, before = recorded(name, case, monkeypatch), copy(case.pools)
    with pytest.raises(RuntimeError, match=f"slots contains {slot}, expected 0 to 2"):
        way(name)(*args)
    assert same_pools(case.pools, before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "field", "value", "match"),
    [
        ("append", "pools.capacities", 2, "slot 2, KV head 0 is full|a slot is full"),
        ("append_attend", "pools.capacities", 2, "slot 2, KV head 0 is full|a slot is full"),
        ("append", "seen", -1, "negative"),
        ("evict", "budgets", -1, "a budget is -1"),
        ("evict", "pools.positions", 36, "the death record (of 36 tokens|is 36, expected 0 to 35)"),
        ("evict", "pools.positions", -3, "the death record (of 36 tokens|is -3, expected 0 to 35)"),
        ("evict", "event_steps", 20, "number"),
        ("evict from a source", "pools.capacities", 0, "holds 1 entries, .* its capacity = 0|exceeds the capacity"),
        ("fork", "pools.capacities", [[9], [1], [9]], "2 entries, .* destination's capacity = 1|fewer entries than"),
        ("select_pages", "limits", -1, "limits"),
    ],
)
def test_numbers_out_of_range_are_refused(
    name: str, field: str, value: Any, match: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    case.pools.lengths.fill_(2)
    attrgetter(field)(case).copy_(torch.tensor(value))
    args, before = recorded(name, case, monkeypatch), copy(case.pools)
    with pytest.raises(RuntimeError, match=match):
        way(name)(*args)
    assert same_pools(case.pools, before) or match.startswith(("the death record", "number"))  # found on the way


def test_pools_that_do_not_fit_together_are_refused() -> None:
    case = Case()
    pools = replace(case.layer, values=case.layer.values[:-1])
    with pytest.raises(ValueError, match=r"value_pool has shape .* expected"):
        ops.decode_attention(pools, case.slots, case.query, 0.3, CAPACITY)
    with pytest.raises(ValueError, match=r"offsets has shape .*, expected \(slots, KV heads\)"):
        ops.decode_attention(case.pools, case.slots, case.query, 0.3, CAPACITY)
    with pytest.raises(ValueError, match=r"offsets has shape .*, expected \(layers, slots, KV heads\)"):
        ops.fork(case.layer, case.sources, case.destinations)
    doubles = uniform_pools((SLOTS, HEADS), 4, DIM, torch.float64)  # the reference checks as well
    with pytest.raises(ValueError, match=r"query is torch.float32, expected torch.float64"):
        ops.decode_attention(doubles, case.slots, case.query, 0.3, CAPACITY)


@pytest.mark.parametrize("options", [{"pooling": "mean"}, {"group_reduction": "sum"}, {"query_reduction": "max"},
                                     {"kernel_size": 4}, {"window": -1}])  # fmt: skip
def test_unknown_options_of_importance_are_refused(options: dict[str, Any]) -> None:
    case = Case()
    with pytest.raises(ValueError, match=next(iter(options))):
        cached_importance(case.entries(), **{"window": 2, **options})


@pytest.mark.parametrize("name", [name for name in CASES if name != "silu_mul"])  # which takes one tensor
def test_tensors_on_two_devices_are_refused(name: str, gpu: RealGPU) -> None:
    case = Case()
    with gpu:
        for field in ("slots", "sources", "steps", "query_norm"):
            setattr(case, field, getattr(case, field).to("cuda"))
        with pytest.raises((ValueError, RuntimeError), match=r"device|cuda"):
            case.calls()[name]()


@pytest.mark.parametrize(
    ("name", "field"),
    [("append", "slots"), ("append", "projected"), ("decode_attention", "query"), ("decode_attention", "lse"),
     ("rms_norm", "addend"), ("window_importance", "ring"), ("key_redundancy", "importance"), ("score_entries", "seen"),
     ("evict", "scores"), ("evict", "death"), ("evict from a source", "seen"),
     ("fork", "sources"), ("fork", "state"),
     ("summarize_pages", "summaries"), ("select_pages", "limits"), ("page_attention", "pages"), ("draw", "steps")],
)  # fmt: skip
def test_a_tensor_elsewhere_is_refused(name: str, field: str) -> None:
    case = Case()
    setattr(case, field, getattr(case, field).to("meta"))
    with pytest.raises(ValueError, match=r"is on meta, (key\w+|summaries|logits|hidden) is on cpu"):
        case.calls()[name]()


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_kernels_refuse_types_they_do_not_have(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copying ops too: they count bytes."""
    args = recorded(name, Case(), monkeypatch)
    converted = [a.to(dtype) if isinstance(a, Tensor) and a.shape[-1:] in ((DIM,), (2 * DIM,)) else a for a in args]
    with pytest.raises(RuntimeError, match="the CPU kernels take float32 and bfloat16"):
        kernel(name)(*converted)


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
def test_heads_too_large_for_the_kernels_are_refused() -> None:
    pools = uniform_pools((1, 1), 4, 520, torch.float32)
    with pytest.raises(RuntimeError, match="head_dim is 520, the native kernels take 1 to 512"):
        ops.decode_attention(pools, torch.tensor([0]), torch.zeros(1, 1, 520), 1.0, 4)


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
@pytest.mark.parametrize(
    ("name", "place", "value", "match"),
    [
        ("append", 4, None, "both cos and sin"),
        ("append", 4, torch.zeros(SLOTS, 4), "sin has shape"),
        ("append", 4, torch.zeros(SLOTS, DIM + 2), "cos has 18 columns, expected an even number up to 16"),
        ("append", 3, -1.0, "epsilon is -1"),
        ("append", 0, torch.zeros(SLOTS, 9, DIM), "projected has shape"),
        ("rms_norm", 3, -1.0, "epsilon is -1"),
        ("silu_mul", 0, torch.zeros(SLOTS, 2 * DIM + 1), "33 columns"),
        ("decode_attention", 7, CAPACITY + 2, "probs has room for 13 entries, max_length is 14"),
        ("window_importance", 12, "mean", "pooling is 'mean'"),
        ("window_importance", 10, "sum", "group_reduction is 'sum'"),
        ("window_importance", 11, "max", "query_reduction is 'max'"),
        ("window_importance", 13, 4, "kernel_size is 4"),
        ("window_importance", 13, -1, "kernel_size is -1"),
        ("window_importance", 8, -1, "window is -1"),
        ("score_entries", 11, "norm", "method is 'norm', expected position"),
        ("score_entries", 11, "shared", "given belongs to the method shared"),
        ("score_entries", 3, None, "the method mass needs a state_pool"),
        ("evict", 2, -1, "must not be negative"),
        ("evict", 12, None, "both death and event_steps"),
        ("evict from a source", 3, -1, "must not be negative"),
        ("summarize_pages", 4, 0, "page_size is 0"),
        ("select_pages", 5, -1, "page_size is -1"),
        ("select_pages", 6, -1, "num_first is -1"),
        ("page_attention", 7, 0, "page_size is 0"),
        ("draw", 6, -1.0, "temperature is -1"),
        ("draw", 8, 0.0, "top_p"),
    ],
)
def test_kernels_check_what_the_typed_functions_check(
    name: str, place: int, value: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*recorded(name, Case(), monkeypatch)]
    args[place] = value
    with pytest.raises(RuntimeError, match=match):
        kernel(name)(*args)


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
def test_a_capacity_beyond_the_pool_is_refused() -> None:
    pools = uniform_pools((2, 1), 4, 8, torch.float32)
    pools.lengths.fill_(4)
    pools.capacities.fill_(5)  # the last slot's fifth row would be the ninth of eight
    x = torch.zeros(1, 3, 8)
    with pytest.raises(RuntimeError, match="a head of 5 entries starts at row 4, outside the pool of 8 rows"):
        ops.append(pools, torch.tensor([1]), torch.zeros(2, dtype=torch.int64), x)


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
def test_a_slot_listed_twice_does_not_grow_into_its_neighbor() -> None:
    pools = uniform_pools((2, 1), 2, 8, torch.float32)
    pools.lengths.fill_(1)
    x = torch.ones(2, 3, 8)
    ops.append(pools, torch.tensor([0, 0]), torch.tensor([1, 1]), x)
    assert pools.lengths.tolist() == [[2], [1]]
    assert (pools.keys[2:] == 0).all()


def test_every_op_has_a_case() -> None:
    assert list(Case().calls()) == sorted(CASES, key=list(Case().calls()).index)
    assert {op_of(name) for name in CASES} == SCHEMAS.keys()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(full=full), monkeypatch)
    results = torch.library.opcheck(kernel(name), args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("full", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_compiled_without_a_graph_break(name: str, full: bool) -> None:
    eager, compiled = Case(full=full), Case(full=full)
    want = eager.calls()[name]()
    torch._dynamo.reset()
    got = torch.compile(compiled.calls()[name], fullgraph=True, backend="aot_eager")()
    assert got is want is None or same_bits(got, want)
    assert all(same_bits(a, b) for a, b in zip(compiled.tensors(), eager.tensors(), strict=True))
    assert any(not same_bits(a, b) for a, b in zip(eager.tensors(), Case().tensors(), strict=True)) or want is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_types_without_a_kernel_take_the_reference(name: str, dtype: torch.dtype) -> None:
    case, other = Case(dtype), Case()
    got, want = case.calls()[name](), other.calls()[name]()
    if want is not None:
        torch.testing.assert_close(got.double(), want.double(), atol=5e-3, rtol=5e-3)
    for a, b in zip(case.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_nothing(name: str) -> None:
    for native in (True, False):
        case, other = Case(torch.float32 if native else torch.float64), Case(torch.float32 if native else torch.float64)
        want = other.calls()[name]()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = case.calls()[name]()
        assert got is want is None or same_bits(got, want)
        assert all(same_bits(a, b) for a, b in zip(case.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_threads_changes_nothing(name: str) -> None:
    one, two = Case(), Case()
    want = one.calls()[name]()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = two.calls()[name]()
    finally:
        torch.set_num_threads(threads)
    assert got is want is None or same_bits(got, want)
    assert all(same_bits(a, b) for a, b in zip(two.tensors(), one.tensors(), strict=True))
