"""The head differentiated by hand: gradients against autograd's, memory, types, and heads that are no plain Linear.

Logits that a model scales or caps: log-probabilities and gradients are those of the model's own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    RecurrentGemmaConfig,
)

from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs, token_logprobs
from sparse_rl_lightning.output_head import ChunkedLogprobs, LogitScaling

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
    by_row = targets if targets.ndim == 2 else targets[:, None]
    return logs.gather(-1, by_row).view(targets.shape), -(logs.exp() * logs).sum(-1)


def results(compute: Callable[..., Any], head: nn.Module, states: Tensor, *rest: Any, **named: Any) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of a mixture of both with respect to states and parameters."""
    head, states = copy.deepcopy(head), states.detach().clone().requires_grad_()
    logprobs, entropy = compute(head, states, *rest, **named)
    by_logprobs, by_entropy = (
        torch.randn(column.shape, generator=torch.Generator().manual_seed(4)) for column in (logprobs, entropy)
    )
    ((by_logprobs * logprobs).sum() + (by_entropy * entropy).sum()).backward()
    return [logprobs, entropy, states.grad, *(p.grad for p in head.parameters())]  # type: ignore[list-item]


def assert_same(actual: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        largest = max([1.0, *other.detach().abs().flatten().tolist()])
        torch.testing.assert_close(one, other, rtol=0, atol=relative * largest)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_is_plain_autograd_to_a_millionth(temperature: float, chunk_size: int, bias: bool) -> None:
    head, states, targets = problem(bias=bias)
    expected = results(plain, head, states, targets, temperature)
    assert all(tensor.abs().max() > 0.1 for tensor in expected)
    assert_same(results(token_logprobs, head, states, targets, temperature, chunk_size), expected, 1e-6)


class Called(nn.Linear):
    """A head that is called and not multiplied with."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states)


@pytest.mark.parametrize("kind", [nn.Linear, Called])
def test_several_targets_of_a_row_are_plain_autograd_too(kind: type[nn.Linear]) -> None:
    """Some twice, as the token drawn is among the most likely ones; also through a head that is no plain Linear."""
    head, states, _ = problem(torch.float64)
    head.__class__ = kind
    several = torch.randint(V, (N, 5), generator=torch.Generator().manual_seed(2))
    several[:, 3] = several[:, 0]
    want = results(plain, head, states, several, 0.8)
    assert_same(results(token_logprobs, head, states, several, 0.8, 4), want, 1e-12)


@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("several", [1, 3])
def test_gradcheck_in_float64(which: str, several: int) -> None:
    head, states, targets = problem(torch.float64)
    targets = torch.stack([(targets + 5 * number) % V for number in range(several)], dim=1)

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
    ours = results(token_logprobs, head.float(), states, targets, 1.0, 4)
    theirs = results(plain, head, states, targets, 1.0)
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


def test_nothing_larger_than_a_chunk_of_logits_or_the_gradients_ever_exists() -> None:
    head = nn.Linear(4, 50)
    states, targets = torch.randn(64, 4, requires_grad=True), torch.randint(50, (64,))
    with Largest() as seen:
        logprobs, entropy = token_logprobs(head, states, targets, chunk_size=5)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.bytes == 4 * max(5 * 50, 50 * 4, 64 * 4)
    with Largest() as seen:
        plain(head, states, targets, 1.0)
    assert seen.bytes == 4 * 64 * 50


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


SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.5, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
SCALED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 6.0, "embedding_multiplier": 3.0}, "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.4, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8,
                  "mamba_d_state": 4},
}  # fmt: skip


def by_the_model(model: Any, sequences: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """By the model's own forward: all log-probabilities, those of the tokens, entropies."""
    logs = (model(sequences).logits[:, :-1] / temperature).log_softmax(-1)
    own = logs.gather(-1, sequences[:, 1:, None]).squeeze(-1)
    shown = mask[:, 1:]
    return logs, own * shown, -(logs.exp() * logs).sum(-1) * shown


@pytest.mark.parametrize("by_product", [True, False])
@pytest.mark.parametrize("family", SCALED)
def test_scores_and_gradients_are_those_of_the_models_own_forward(family: str, by_product: bool) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **SCALED[family])).double().eval()
    if not by_product:  # any head but a plain linear layer is called and differentiated by torch
        model.get_output_embeddings().register_forward_hook(lambda *_: None)
    sequences = torch.randint(2, 31, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, :2] = False
    weights = torch.randn(2, 2, 6, dtype=torch.float64)

    logs, logprobs, entropy = by_the_model(model, sequences, mask, 0.7)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    own, uncertain = sequence_logprobs(model, sequences, mask, 0.7, chunk_size=3)
    (weights[0] * own[:, 1:] + weights[1] * uncertain[:, 1:]).sum().backward()

    torch.testing.assert_close(own[:, 1:], logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(uncertain[:, 1:], entropy, rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-11, msg=name)
    ids = torch.randint(31, (2, 7, 3))
    found = logprobs_at(model, sequences, ids, mask, 0.7, chunk_size=4)
    want = logs.detach().gather(-1, ids[:, 1:]) * mask[:, 1:, None]
    torch.testing.assert_close(found[:, 1:], want, rtol=0, atol=1e-12)


def test_only_what_the_class_declares_counts() -> None:
    stray = LlamaForCausalLM(LlamaConfig(**SIZES, logits_scaling=8.0)).eval()
    assert stray.config.logits_scaling == 8.0
    sequences, mask = torch.randint(2, 31, (1, 5)), torch.tensor([[False, True, True, True, True]])
    with torch.no_grad():
        logprobs, want = sequence_logprobs(stray, sequences, mask)[0], by_the_model(stray, sequences, mask, 1.0)[1]
    torch.testing.assert_close(logprobs[:, 1:], want)
    assert LogitScaling.of(stray.config).is_plain


def test_what_is_not_known_to_be_right_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'recurrent_gemma' has logits_soft_cap=30.0.*it knows final_logit_soft"):
        LogitScaling.of(RecurrentGemmaConfig())

    class Width(PreTrainedConfig):
        model_type = "width"
        logit_multiplier: float = 1.0

    assert LogitScaling.of(Width()).is_plain
    with pytest.raises(ValueError, match=r"'width' has logit_multiplier=0.5"):
        LogitScaling.of(Width(logit_multiplier=0.5))
