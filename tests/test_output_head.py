"""The head differentiated by hand: gradients against autograd's, memory, types, and heads that are no plain Linear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_rl_lightning.logprobs import token_logprobs
from sparse_rl_lightning.output_head import ChunkedLogprobs

N, C, V = 11, 6, 37


def problem(
    dtype: torch.dtype = torch.float32, bias: bool = True, scale: float = 1.0
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, states (N, C) with gradient and targets (N,)."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(C, V, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    states = scale * torch.randn(N, C, generator=generator)
    return head.to(dtype), states.to(dtype).requires_grad_(), torch.randint(V, (N,), generator=generator)


def plain(head: nn.Module, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(states)
    logs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def factors(n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, n, generator=torch.Generator().manual_seed(4)).to(dtype)


def results(compute: Callable[..., Any], head: nn.Module, states: Tensor, *rest: Any, **named: Any) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of a mixture of both with respect to states and parameters."""
    head, states = copy.deepcopy(head), states.detach().clone().requires_grad_()
    logprobs, entropy = compute(head, states, *rest, **named)
    (factors(len(states))[0] * logprobs + factors(len(states))[1] * entropy).sum().backward()
    return [logprobs, entropy, states.grad, *(p.grad for p in head.parameters())]  # type: ignore[list-item]


def assert_same(actual: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one, other, rtol=0, atol=relative * max([1.0, *other.detach().abs().flatten().tolist()])
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_is_plain_autograd_to_a_millionth(temperature: float, chunk_size: int, bias: bool) -> None:
    head, states, targets = problem(bias=bias)
    expected = results(plain, head, states, targets, temperature)
    assert all(tensor.abs().max() > 0.1 for tensor in expected)
    assert_same(results(token_logprobs, head, states, targets, temperature, chunk_size), expected, 1e-6)


@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
def test_gradcheck_in_float64(which: str) -> None:
    head, states, targets = problem(torch.float64)

    def function(*inputs: Tensor) -> Any:
        out = ChunkedLogprobs.apply(*inputs, targets, 0.7, 4, torch.float64)
        return out if which == "both" else out[which == "entropy"]

    assert torch.autograd.gradcheck(function, (states, head.weight, head.bias))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(1, 12), st.integers(2, 9), st.floats(0.2, 3.0), st.floats(0.1, 100.0))
def test_any_size_chunk_temperature_and_scale(n: int, chunk: int, v: int, temperature: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(n)
    head = nn.Linear(3, v).double()
    states = scale * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(v, (n,), generator=generator)
    expected = results(plain, head, states, targets, temperature)
    assert_same(results(token_logprobs, head, states, targets, temperature, chunk), expected, 1e-9)


def test_large_logits_lose_nothing() -> None:
    head, states, targets = problem(scale=300.0)  # float32 logits in the thousands
    expected = results(plain, head.double(), states.double(), targets, 1.0)
    exact = [tensor.float() for tensor in expected]
    ours, theirs = (
        results(token_logprobs, head.float(), states, targets, 1.0, 4),
        results(plain, head, states, targets, 1.0),
    )
    for own, other, truth in zip(ours, theirs, exact, strict=True):
        assert (own - truth).abs().max() <= 2 * (other - truth).abs().max() + 1e-6 * truth.abs().max()


def test_only_gradients_asked_for_are_computed() -> None:
    head, states, targets = problem()
    head.weight.requires_grad_(False)
    logprobs, entropy = token_logprobs(head, states, targets, chunk_size=4)
    entropy.mean().detach()
    logprobs.sum().backward()
    assert head.weight.grad is None
    assert head.bias.grad is not None
    with torch.no_grad():
        assert not token_logprobs(head, states, targets)[0].requires_grad


# ---------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """The most elements any tensor made inside has."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def test_nothing_larger_than_a_chunk_of_logits_or_the_gradients_ever_exists() -> None:
    head = nn.Linear(4, 50)
    states, targets = torch.randn(64, 4, requires_grad=True), torch.randint(50, (64,))
    with LargestTensor() as seen:
        logprobs, entropy = token_logprobs(head, states, targets, chunk_size=5)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.largest == max(5 * 50, 50 * 4, 64 * 4)
    with LargestTensor() as seen:
        plain(head, states, targets, 1.0)
    assert seen.largest == 64 * 50


# ---------------------------------------------------------------- types


def test_bfloat16_with_and_without_the_float32_head() -> None:
    head, states, targets = problem(torch.bfloat16)
    expected = results(plain, head, states, targets, 0.7)
    assert_same(results(token_logprobs, head, states, targets, 0.7, N), expected, 0.02)
    exact = results(plain, copy.deepcopy(head).float(), states.float(), targets, 0.7)
    wide = results(token_logprobs, head, states, targets, 0.7, 4, head_in_float32=True)
    assert_same(wide[:2], exact[:2], 1e-6)
    assert_same([g.float() for g in wide[2:]], exact[2:], 2**-8)  # rounded once, to the parameters' own type
    narrow = results(token_logprobs, head, states, targets, 0.7, 4)
    assert (narrow[0] - exact[0]).abs().max() > 100 * (wide[0] - exact[0]).abs().max()


def test_autocast_leaves_float64_alone() -> None:
    inputs = *problem(torch.float64), 1.0
    expected = results(plain, *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(results(token_logprobs, *inputs), expected, 1e-12)


@pytest.mark.parametrize("in_float32", [False, True])
def test_autocast(in_float32: bool) -> None:
    head, states, targets = problem()

    def cast(*args: Any, **named: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return token_logprobs(*args, **named)

    def cast_plainly(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not in_float32):
            return plain(*args)

    expected = results(cast_plainly, head, states, targets, 1.0)
    found = results(cast, head, states, targets, 1.0, 4, head_in_float32=in_float32)
    assert_same(found[:2], expected[:2], 1e-6)
    assert_same(found[2:], expected[2:], 1e-6 if in_float32 else 0.02)
    assert {tensor.dtype for tensor in found} == {torch.float32}


# ---------------------------------------------------------------- other heads


class Adapted(nn.Module):
    """A head as LoRA wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(C, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Doubling(nn.Linear):
    """A subclass that does more than a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubled(head: nn.Linear) -> nn.Linear:
    head.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    return head


def subclass(head: nn.Linear) -> nn.Linear:
    other = Doubling(C, V)
    other.load_state_dict(head.state_dict())
    return other


@pytest.mark.parametrize("make", [Adapted, doubled, subclass])
@pytest.mark.parametrize("in_float32", [False, True])
def test_a_head_that_is_more_than_a_product_is_called(make: Callable[[nn.Linear], nn.Module], in_float32: bool) -> None:
    torch.manual_seed(0)
    linear, states, targets = problem()
    head = make(linear)
    expected = results(plain, head, states, targets, 0.7)
    found = results(token_logprobs, head, states, targets, 0.7, 4, head_in_float32=in_float32)
    assert_same(found, expected, 1e-6)
    if in_float32:
        exact = results(plain, copy.deepcopy(head).bfloat16().float(), states.bfloat16().float(), targets, 0.7)
        head, states = head.bfloat16(), states.bfloat16()
        wide = results(token_logprobs, head, states, targets, 0.7, 4, head_in_float32=True)
        assert_same(wide[:2], exact[:2], 1e-6)


def test_a_head_that_returns_its_input_is_not_overwritten() -> None:
    states = torch.randn(5, 7)
    before = states.clone()
    with torch.no_grad():
        token_logprobs(nn.Identity(), states, torch.zeros(5, dtype=torch.long))
    assert torch.equal(states, before)
