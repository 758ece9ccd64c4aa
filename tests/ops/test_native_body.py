"""rms_norm and silu_mul: kernel = reference = float64, for every pair of types and any width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import EMULATED, kernel, on_each_device, reference, same_bits, without_kernels
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.errors import UserError

TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
UNIT = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a rounding, or of a sum


def types_for(device: str) -> list[tuple[torch.dtype, torch.dtype]]:
    """Types of hidden states and products in the compiled kernels."""
    halves = [(torch.float16, torch.float16), (torch.float32, torch.float16)]
    return TYPES if device == "cpu" and not EMULATED else TYPES + halves


def width_for(device: str, width: int) -> int:
    return width if device == "cpu" and not EMULATED else -(-width // 8) * 8


def run(name: str, args: list[object], device: str) -> list[list[Tensor | None]]:
    """The tensors after the kernel and after the reference, each on its own copies."""
    results = []
    for function, where in ((kernel(name), device), (reference(name), "cpu")):
        own = [a.to(where, copy=True) if isinstance(a, Tensor) else a for a in args]
        function(*own)
        results.append([a.cpu() if isinstance(a, Tensor) else None for a in own])
    return results


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), rows=st.integers(0, 5), width=st.integers(1, 130), pair=st.integers(0, 4),
    added=st.booleans(), epsilon=st.sampled_from([0.0, 1e-6, 1e-3]), scale=st.sampled_from([1e-2, 1.0, 30.0]),
)  # fmt: skip
def test_rms_norm(
    device: str, seed: int, rows: int, width: int, pair: int, added: bool, epsilon: float, scale: float
) -> None:
    g, types = torch.Generator().manual_seed(seed), types_for(device)
    (dtype, product), width = types[pair % len(types)], width_for(device, width)
    hidden = (scale * torch.randn(rows, width, generator=g)).to(dtype)
    addend = torch.randn(rows, width, generator=g).to(product) if added else None
    weight = 1 + 0.3 * torch.randn(width, generator=g)
    normed = torch.empty(rows, width, dtype=product)
    total = (hidden + addend).to(dtype) if addend is not None else hidden
    exact = total.double() * (total.double().square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.double()
    for result in run("rms_norm", [hidden, addend, weight, epsilon, normed], device):
        assert same_bits(result[0], total)
        error = (result[4].double() - exact).abs()
        allowed = (2.2 * UNIT[dtype] + UNIT[product]) * exact.abs() + 1e-7
        assert (error <= allowed).all(), (error - allowed).max()


@on_each_device
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), rows=st.integers(0, 5), width=st.integers(0, 130), pair=st.integers(0, 4),
    scale=st.sampled_from([1e-3, 1.0, 40.0]),
)  # fmt: skip
def test_silu_mul(device: str, seed: int, rows: int, width: int, pair: int, scale: float) -> None:
    g, types = torch.Generator().manual_seed(seed), types_for(device)
    dtype, width = types[pair % len(types)][0], width_for(device, width)
    both = torch.randn(rows, 2 * width, generator=g)
    both[:, :width] *= scale
    both = both.to(dtype)
    gate, up = both.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    for result in run("silu_mul", [both, torch.empty(rows, width, dtype=dtype)], device):
        error = (result[1].double() - exact).abs()
        assert (error <= 2.2 * UNIT[dtype] * exact.abs() + 1e-7).all(), error.max()


@on_each_device
def test_far_gates_are_closed_or_open(device: str) -> None:
    gate = torch.tensor([[-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30, torch.nan]])
    both = torch.cat([gate, torch.full_like(gate, 2.0)], dim=1).to(device)
    gated = ops.silu_mul(both).cpu()[0]
    assert gated[:4].abs().max() <= 1e-6
    assert gated[4:7].tolist() == [200.0, 2e4, 2 * float(gate[0, 6])]
    assert gated[7].isnan()


@without_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, both = torch.randn(300, 96, generator=g).to(dtype), torch.randn(300, 192, generator=g).to(dtype)
    weight = torch.ones(96)
    normed, gated = ops.rms_norm(hidden.clone(), weight, 1e-6, hidden), ops.silu_mul(both)
    for b in (0, 1, 150, 299):
        own = hidden[b : b + 1].clone()
        assert same_bits(ops.rms_norm(own.clone(), weight, 1e-6, own), normed[b : b + 1])
        assert same_bits(ops.silu_mul(both[b : b + 1]), gated[b : b + 1])


def test_a_result_of_another_type_needs_float32() -> None:
    with pytest.raises(UserError, match="give float32 hidden states"):
        ops.rms_norm(torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(8), 0.0, dtype=torch.float32)
