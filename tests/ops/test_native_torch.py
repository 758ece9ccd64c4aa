"""The ops as torch sees them: opcheck, torch.compile, other types, other threads."""

from __future__ import annotations

import pytest
import torch
from native_cases import CASES, Case, kernel, op_of, recorded, same_bits

from sparse_rl_lightning.ops.schemas import SCHEMAS


def test_every_op_has_a_case() -> None:
    assert list(Case().calls()) == sorted(CASES, key=list(Case().calls()).index)
    assert {op_of(name) for name in CASES} == SCHEMAS.keys()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = recorded(name, Case(full=full), monkeypatch)
    results = torch.library.opcheck(kernel(name), args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("full", [True, False])
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
