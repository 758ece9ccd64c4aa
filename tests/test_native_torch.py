"""The ops as torch sees them: opcheck, torch.compile, other types, other threads, errors a reader understands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_cases import copy, make_pools, same_bits, same_pools
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.schemas import SCHEMAS
from sparse_rl_lightning.types import NEVER

OPS = torch.ops.sparse_rl
LAYERS, SLOTS, HEADS, DIM, CAPACITY, GROUP = 2, 3, 2, 16, 12, 3


class Case:
    """Arguments for a call of every op."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(dtype)

        wide = torch.promote_types(dtype, torch.float32)
        self.pools = make_pools(g, layers=LAYERS, slots=SLOTS, heads=HEADS, dim=DIM, capacity=CAPACITY, dtype=dtype,
                                kind="random")  # fmt: skip
        self.pools.lengths.copy_((self.pools.capacities.amin(1, keepdim=True) - 1).clamp(max=9))
        for pool in (self.pools.keys, self.pools.values):
            pool.nan_to_num_(0.25)
        self.pools.positions.clamp_(min=0)
        self.layer = self.pools.layer(0)
        self.slots, self.seen = torch.tensor([2, -1, 0]), torch.tensor([21, 22, 23])
        self.query, self.key = normal(SLOTS, HEADS * GROUP, DIM), normal(SLOTS, HEADS, DIM)
        self.value, self.ring = normal(SLOTS, HEADS, DIM), normal(LAYERS, SLOTS, HEADS * GROUP, 4, DIM)
        angle = torch.randn(SLOTS, DIM, generator=g).to(wide)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.ring_positions = torch.randint(0, 20, (SLOTS, 4), generator=g)
        self.chunk, self.start = normal(SLOTS, HEADS * GROUP, 3, DIM), torch.tensor([0, 2, 4])
        self.mass = torch.zeros(SLOTS, HEADS, CAPACITY, dtype=wide)
        self.scores = torch.randn(LAYERS, SLOTS, HEADS, CAPACITY, generator=g)
        self.budgets = torch.ones(LAYERS, SLOTS, HEADS, dtype=torch.int32)
        self.death = torch.full((LAYERS, SLOTS, HEADS, 3 * CAPACITY), NEVER, dtype=torch.int32)
        self.state = torch.randn(len(self.pools.keys), 1, generator=g)
        self.source = copy(self.pools)
        self.sources, self.destinations = torch.tensor([0, -1, 2]), torch.tensor([1, 0, 2])
        for name, value in vars(self).items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else moved(value, device))
        self.layer = self.pools.layer(0)  # the same memory

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {
            "append": lambda: ops.append(self.layer, self.slots, self.seen, self.query, self.key, self.value,
                                         self.ring[0], self.cos, self.sin),
            "decode_attention": lambda: ops.attend(self.layer, self.slots, self.query, 0.3, CAPACITY),
            "window_importance": lambda: ops.score_importance(
                self.layer, self.slots, self.ring[0], self.ring_positions, 0.3, CAPACITY, window=2),
            "prefill_mass": lambda: ops.accumulate_mass(self.layer, self.slots, self.chunk, self.start, 0.3, self.mass),
            "key_redundancy": lambda: ops.score_redundancy(self.layer, self.slots, CAPACITY),
            "select_and_compact": lambda: ops.select_and_compact(
                self.pools, self.slots, self.scores, self.budgets, 0, 0, self.seen, self.death, self.state),
            "select_and_store": lambda: ops.select_and_store(
                self.pools, self.slots, self.scores, self.budgets, 0, 0, self.seen, self.source, self.death),
            "fork": lambda: ops.fork(self.pools, self.sources, self.destinations, self.ring, self.death, self.state),
        }  # fmt: skip

    def tensors(self) -> list[Tensor]:
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + [value for value in vars(self.pools).values() if isinstance(value, Tensor)]


def moved(pools: KVPools, device: str) -> KVPools:
    return replace(pools, **{name: value.to(device) for name, value in vars(pools).items()})


def recorded(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The arguments that the typed function hands to the op."""
    seen: list[tuple[Any, ...]] = []

    def note(op: str, like: Tensor, check: Callable[[], None], *args: Any, overload: str = "") -> None:
        seen.append(args)

    module = case.calls()[name].__code__.co_names[1]
    home = getattr(ops, module).__module__
    with monkeypatch.context() as patch:
        patch.setattr(f"{home}.call", note)
        case.calls()[name]()
    return seen[0]


def test_every_op_has_a_case() -> None:
    assert Case().calls().keys() == SCHEMAS.keys()


@pytest.mark.parametrize("overload", ["default", "reference"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name: str, overload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(), monkeypatch)
    results = torch.library.opcheck(getattr(getattr(OPS, name), overload), args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_compiled_without_a_graph_break(name: str) -> None:
    eager, compiled = Case(), Case()
    want = eager.calls()[name]()
    torch._dynamo.reset()
    got = torch.compile(compiled.calls()[name], fullgraph=True, backend="aot_eager")()
    assert got is want is None or same_bits(got, want)
    assert all(same_bits(a, b) for a, b in zip(compiled.tensors(), eager.tensors(), strict=True))
    assert any(not same_bits(a, b) for a, b in zip(eager.tensors(), Case().tensors(), strict=True)) or want is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", SCHEMAS)
def test_types_without_a_kernel_take_the_reference(name: str, dtype: torch.dtype) -> None:
    case, other = Case(dtype), Case()
    got, want = case.calls()[name](), other.calls()[name]()
    if want is not None:
        torch.testing.assert_close(got.double(), want.double(), atol=5e-3, rtol=5e-3)
    for a, b in zip(case.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", SCHEMAS)
def test_autocast_changes_nothing(name: str) -> None:
    for native in (True, False):
        case, other = Case(torch.float32 if native else torch.float64), Case(torch.float32 if native else torch.float64)
        want = other.calls()[name]()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = case.calls()[name]()
        assert got is want is None or same_bits(got, want)
        assert all(same_bits(a, b) for a, b in zip(case.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("name", SCHEMAS)
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


WRONG: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("append", "query", lambda t: t[:2], "query has shape"),
    ("append", "key", lambda t: t.double(), "key is torch.float64, expected torch.float32"),
    ("append", "value", lambda t: t.mT.contiguous().mT, "value is not contiguous"),
    ("append", "slots", lambda t: t.int(), "slots is torch.int32"),
    ("append", "slots", lambda t: t + 9, "slots contains 11"),
    ("append", "seen", lambda t: t[:1], "seen has shape"),
    ("append", "seen", lambda t: -t, "cannot be negative"),
    ("append", "cos", lambda t: t[:, :5].contiguous(), "5 columns|sin has shape"),
    ("append", "ring", lambda t: t[..., :8].contiguous(), "query_ring has shape"),
    ("decode_attention", "query", lambda t: t[:, :5].contiguous(), "query has 5 heads, expected a multiple of the 2"),
    ("decode_attention", "query", lambda t: t[0], "query has shape"),
    ("decode_attention", "slots", lambda t: t - 5, "slots contains -3"),
    ("window_importance", "ring", lambda t: t.bfloat16(), "queries is torch.bfloat16"),
    ("window_importance", "ring_positions", lambda t: t[:, :2], "query_positions has shape"),
    ("prefill_mass", "mass", lambda t: t[:2], "mass has shape"),
    ("prefill_mass", "start", lambda t: t - 9, "query_start.0. is -9"),
    ("select_and_compact", "scores", lambda t: t.double(), "scores is torch.float64"),
    ("select_and_compact", "budgets", lambda t: t - 2, "a budget is -1"),
    ("select_and_compact", "death", lambda t: t[:1], "death has shape"),
    ("select_and_compact", "state", lambda t: t[:3], "state_pool has shape"),
    ("select_and_store", "scores", lambda t: t[..., :2].contiguous(), "entries of scores = 2"),
    ("fork", "sources", lambda t: t + 3, "slots contains 3"),
    ("fork", "destinations", lambda t: t[:1], "destinations has shape"),
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
    ("name", "place"),
    [(n, i) for n, schema in SCHEMAS.items() for i, a in enumerate(schema.split(",")) if "Tensor" in a],
)
def test_kernels_survive_any_wrong_tensor(name: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(), monkeypatch)
    x = args[place]
    if x is None:
        pytest.skip("an optional tensor that the case leaves out")
    shorter = x[: x.shape[0] - 1].contiguous()
    other_type = x.double() if x.dtype != torch.float64 else x.float()
    strided = torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0].copy_(x)
    if (name, place) in {("key_redundancy", 0), ("prefill_mass", 2)}:
        shorter = x[:1].contiguous()  # their only pool: it must just be long enough
    for wrong in (shorter, other_type, strided, x.unsqueeze(0), x.new_zeros(0)):
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        spoiled = [*args[:place], wrong, *args[place + 1 :]]
        with pytest.raises(RuntimeError):
            getattr(OPS, name).default(*spoiled)
        assert all(same_bits(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, Tensor))


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="no compiled kernels")
@pytest.mark.parametrize("part", ["offsets", "lengths"])
@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize("name", SCHEMAS)
def test_heads_outside_the_pool_are_refused(name: str, value: int, part: str) -> None:
    case = Case()
    for pools in (case.pools, case.source):
        getattr(pools, part)[...] = value
    case.sources, case.destinations = torch.tensor([0]), torch.tensor([1])
    before = copy(case.pools)
    with pytest.raises(RuntimeError, match=r"entries|full"):
        case.calls()[name]()
    assert same_pools(case.pools, before)


def test_pools_that_do_not_fit_together_are_refused() -> None:
    case = Case()
    pools = replace(case.layer, values=case.layer.values[:-1])
    with pytest.raises(ValueError, match=r"values has shape .* expected"):
        ops.attend(pools, case.slots, case.query, 0.3, CAPACITY)
    with pytest.raises(ValueError, match=r"offsets of the pools must be \(slots, KV heads\)"):
        ops.attend(case.pools, case.slots, case.query, 0.3, CAPACITY)
    with pytest.raises(ValueError, match=r"\(layers, slots, KV heads\)"):
        ops.fork(case.layer, case.sources, case.destinations)
    doubles = KVPools.uniform((SLOTS, HEADS), 4, DIM, torch.float64, "cpu")  # the reference checks as well
    with pytest.raises(ValueError, match=r"query is torch.float32, expected torch.float64"):
        ops.attend(doubles, case.slots, case.query, 0.3, CAPACITY)


@pytest.mark.parametrize("options", [{"pooling": "mean"}, {"group_reduction": "sum"}, {"query_reduction": "max"},
                                     {"kernel_size": 4}, {"window": -1}])  # fmt: skip
def test_unknown_options_of_importance_are_refused(options: dict[str, Any]) -> None:
    case = Case()
    with pytest.raises(ValueError, match=next(iter(options))):
        ops.score_importance(case.layer, case.slots, case.ring[0], case.ring_positions, 0.3, CAPACITY,
                             **{"window": 2, **options})  # fmt: skip


@pytest.mark.gpu
def test_the_cuda_library_is_loaded() -> None:
    assert ops.MISSING["cuda"] == ""
    assert [name for name in SCHEMAS if not ops.has_kernel(name, "cuda")] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_gpu_says_what_the_cpu_says(name: str, dtype: torch.dtype) -> None:
    case, other = Case(dtype, "cuda"), Case(dtype)
    got, want = case.calls()[name](), other.calls()[name]()
    if want is not None:
        torch.testing.assert_close(got.cpu(), want, atol=1e-2, rtol=1e-2)
    for a, b in zip(case.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(device="cuda"), monkeypatch)
    assert set(torch.library.opcheck(getattr(OPS, name).default, args).values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMAS)
def test_captured_in_a_cuda_graph(name: str) -> None:
    Case(device="cuda").calls()[name]()  # loads the kernels: that must not happen while capturing
    eager, captured = Case(device="cuda"), Case(device="cuda")
    want = eager.calls()[name]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = captured.calls()[name]()
    assert all(same_bits(a, b) for a, b in zip(captured.tensors(), Case(device="cuda").tensors(), strict=True))
    graph.replay()
    torch.cuda.synchronize()
    assert got is want is None or same_bits(got, want)
    assert all(same_bits(a, b) for a, b in zip(captured.tensors(), eager.tensors(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMAS)
def test_tensors_on_two_devices_are_refused(name: str) -> None:
    case = Case()
    case.slots, case.sources = case.slots.cuda(), case.sources.cuda()
    with pytest.raises((ValueError, RuntimeError), match=r"device|cuda"):
        case.calls()[name]()
