"""What only the CUDA kernels do: run in a graph, leave out what cannot be done and say so (that emulated, too)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import CASES, EMULATED, POOLED, Case, copy, kernel, no_kernels, op_of, recorded, same_bits, same_pools

from sparse_rl_lightning import ops
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.ops.pools import FAULTS, OPS, fault
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model
from tests.gpus import RealGPU

NOTHING = {"select_pages": -1}  # what rows to skip get, if not zeros
on_cuda_kernels = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not EMULATED, reason="no emulated CUDA kernels")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


@on_cuda_kernels
@pytest.mark.parametrize("part", ["offsets", "lengths"])
@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize("name", POOLED)
def test_heads_outside_the_pool_are_skipped(device: str, name: str, value: int, part: str) -> None:
    if (name, part) == ("select_pages", "offsets"):
        pytest.skip("it does not look into the pool")
    case = Case(device=device)
    for pools in (case.pools, case.source):
        getattr(pools, part)[...] = value
    case.sources, case.destinations = (torch.tensor([slot], device=device) for slot in (0, 1))
    before = copy(case.pools)
    result = case.calls()[name]()
    with pytest.raises(
        RuntimeError, match=rf"^{op_of(name)} left out slot [012]: (a head of the slot|the slot is full|a number)"
    ):
        case.pools.raise_errors()
    case.pools.raise_errors()  # once
    if name == "fork" and part == "lengths" and value > 0:
        assert (case.pools.lengths[:, 1] <= case.pools.capacities[:, 1]).all()  # or what fits is taken
        return
    assert same_pools(case.pools, before)
    if result is not None and name != "append":  # whose result are the queries, rotated without a look at the pool
        assert (result == NOTHING.get(name, 0)).all()


@on_cuda_kernels
def test_a_full_slot_takes_no_token(device: str) -> None:
    case = Case(device=device)
    case.pools.lengths.copy_(case.pools.capacities)
    before = copy(case.pools)
    case.calls()["append"]()
    assert same_pools(case.pools, before)
    with pytest.raises(RuntimeError, match=r"append left out slot [02]: the slot is full"):
        case.pools.raise_errors()


@on_cuda_kernels
def test_a_budget_beyond_the_capacity_is_cut(device: str) -> None:
    case = Case(device=device)
    case.pools.capacities.fill_(1)
    case.budgets.fill_(10**6)
    before = copy(case.pools)
    case.calls()["evict from a source"]()
    used = case.slots[case.slots >= 0]
    assert same_bits(case.pools.lengths[:, used], case.source.lengths[:, used].clamp(max=1))
    unused = torch.ones(len(case.pools.keys), dtype=torch.bool, device=device)
    unused[case.pools.offsets[:, used]] = False
    assert same_bits(case.pools.keys[unused], before.keys[unused])
    with pytest.raises(RuntimeError, match=r"evict left out slot [02]: a budget"):
        case.pools.raise_errors()


@on_cuda_kernels
@pytest.mark.parametrize(
    ("name", "spoil", "match"),
    [
        ("append", lambda case: case.seen.neg_(), "a position"),
        ("evict", lambda case: case.budgets.fill_(-1), "a budget"),
        ("evict", lambda case: case.scores.fill_(torch.nan), "a score is NaN"),
        ("evict", lambda case: case.pools.positions.fill_(10**6), "a position"),
        ("fork", lambda case: case.pools.capacities[:, 1].fill_(1), "the slot is full"),
        ("select_pages", lambda case: case.limits.fill_(-1), "a number of pages"),
        ("page_attention", lambda case: case.pages.fill_(5), "a number of pages"),
    ],
)
def test_numbers_out_of_range_are_told(device: str, name: str, spoil: Callable[[Case], Any], match: str) -> None:
    case = Case(device=device)
    case.pools.lengths.fill_(2)
    spoil(case)
    case.calls()[name]()
    with pytest.raises(RuntimeError, match=rf"^{op_of(name)} left out slot [012]: {match}"):
        case.pools.raise_errors()


@on_cuda_kernels
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_told_where_all_is_well(device: str, name: str) -> None:
    case = Case(device=device)
    case.calls()[name]()
    case.pools.raise_errors()


@on_cuda_kernels
@pytest.mark.parametrize("name", POOLED)
def test_slots_that_are_not_there_are_skipped(device: str, name: str) -> None:
    case = Case(device=device)
    case.slots = case.sources = torch.tensor([3, -5, 10**9], device=device)
    before = copy(case.pools)
    result = case.calls()[name]()
    assert same_pools(case.pools, before)
    with pytest.raises(RuntimeError, match=f"^{op_of(name)} left out slot .*: there is no such slot"):
        case.pools.raise_errors()
    if result is not None:
        assert (result == NOTHING.get(name, 0)).all()


@pytest.mark.gpu
def test_the_cuda_library_is_loaded() -> None:
    assert ops.MISSING["cuda"] == ""  # that it has all kernels, see test_cuda_build


@on_cuda_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_says_what_the_cpu_says(name: str, dtype: torch.dtype, device: str) -> None:
    case, other = Case(dtype, device), Case(dtype)
    got = case.calls()[name]()
    with no_kernels() if EMULATED else nullcontext():
        want = other.calls()[name]()
    if want is not None:
        torch.testing.assert_close(got.cpu(), want, atol=1e-2, rtol=1e-2)
    for a, b in zip(case.tensors(), other.tensors(), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-2, rtol=1e-2)


@on_cuda_kernels
@pytest.mark.parametrize("name", CASES)
def test_opcheck_of_the_cuda_kernels(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(device=device), monkeypatch)
    assert set(torch.library.opcheck(kernel(name), args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", CASES)
def test_captured_in_a_cuda_graph(name: str, gpu: RealGPU) -> None:
    with gpu:
        Case(device="cuda").calls()[name]()  # loads the kernels: that must not happen while capturing
        eager, captured = Case(device="cuda"), Case(device="cuda")
        want = eager.calls()[name]()
        got = torch.zeros(0, device="cuda") if want is None else torch.empty_like(want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = captured.calls()[name]()
            if result is not None:
                got.copy_(result)  # out of the graph's own memory
        assert all(same_bits(a, b) for a, b in zip(captured.tensors(), Case(device="cuda").tensors(), strict=True))
        graph.replay()
        torch.cuda.synchronize()
        assert result is want is None or same_bits(got, want)
        assert all(same_bits(a, b) for a, b in zip(captured.tensors(), eager.tensors(), strict=True))


SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}


def word_of(op: str, kind: int, slot: int) -> int:
    """The word that a kernel writes for the fault FAULTS[kind - 1] of an op."""
    return OPS.index(op) + 1 | kind << 4 | slot << 8


def test_every_word_names_its_op_its_slot_and_what_was_wrong() -> None:
    for op in OPS:
        for kind, text in enumerate(FAULTS, start=1):
            for slot in (0, 7, 2**23 - 1):
                assert 0 < word_of(op, kind, slot) < 2**31
                assert fault(word_of(op, kind, slot)).startswith(f"{op} left out slot {slot}: {text}")


@pytest.mark.skipif(EMULATED, reason="the sources lie elsewhere")
def test_kernels_number_ops_and_faults_as_they_are_read() -> None:
    source = (Path(__file__).parents[2] / "cuda_ext" / "include" / "heads.h").read_text(encoding="utf-8")
    (ops,) = re.findall(r"enum class Op : int32_t \{(.*?)\};", source, re.S)
    assert tuple(re.split(r",\s*", ops.strip().replace(" = 1", ""))) == OPS
    (faults,) = re.findall(r"enum class Fault : int32_t \{(.*?)\};", source, re.S)
    assert len(faults.split(",")) == len(FAULTS)
    assert " = 1," in ops
    assert " = 1," in faults
    assert len(OPS) < 16  # four bits
    assert len(FAULTS) < 16


def test_a_rollout_ends_with_the_fault_and_the_sampler_goes_on() -> None:
    sampler = RolloutSampler(tiny_model(initializer_range=0.2), SnapKV(**SMALL))
    prompts, params = [[3, 4, 5], [6, 7]], SamplingParams(max_completion_length=40, seed=1)
    want = sampler.generate(prompts, params)

    def as_a_kernel_would(progress: Progress) -> None:
        if progress.step == 20:
            sampler.cache.pools.errors.fill_(word_of("append", 3, 1))  # type: ignore[union-attr]

    with pytest.raises(RuntimeError, match=r"append left out slot 1: the slot is full"):
        sampler.generate(prompts, params, progress=as_a_kernel_would)
    again = sampler.generate(prompts, params)
    assert torch.equal(again.sequences, want.sequences)
