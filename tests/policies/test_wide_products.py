"""Products of bfloat16 where a processor has no instructions for them: those of float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_grpo
import torch
import torch.nn.functional as F
from tiny_grpo import ALPHABET, likes_a
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_rl_lightning import SamplingParams
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO, SupervisedWarmup
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.policies import LoraPolicy
from sparse_rl_lightning.policies.modes import WideProducts
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

HALF = torch.bfloat16


class Counted(TorchDispatchMode):
    """Products that torch is asked for, by the type of their first matrix, but for attention of a rollout's prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name() or ("attention" in func.name() and torch.is_grad_enabled()):
            self.types[args[0].dtype] = self.types.get(args[0].dtype, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], **options)[0, 0]


CASES: dict[str, Callable[..., Tensor]] = {
    "mm": lambda a, b, c: a @ b,
    "linear with a bias": lambda a, b, c: F.linear(a, b, c[0]),
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None])[0],
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None], beta=0.5, alpha=2.0)[0],
    "attention": attention,
    "causal attention": lambda a, b, c: attention(a, b, c, is_causal=True),
    "masked attention": lambda a, b, c: attention(a, b, c, attn_mask=(a @ b.T) * 0 + torch.eye(16, dtype=a.dtype)),
}


def derived(product: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Result and gradients of a product in one type."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    result = product(*leaves)
    slope = torch.linspace(-1, 1, result.numel()).view_as(result).to(HALF).to(dtype)
    return [
        result.detach(),
        *(g for g in torch.autograd.grad(result, leaves, slope, allow_unused=True) if g is not None),
    ]


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_float64_but_for_one_rounding(case: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(16, 16).to(HALF) for _ in range(3)]
    exact = derived(CASES[case], inputs, torch.float64)
    with Counted() as counted, WideProducts():
        wide = derived(CASES[case], inputs, HALF)
    assert set(counted.types) == {torch.float32}
    assert all(tensor.dtype == HALF for tensor in wide)
    for measured, wanted in zip(wide, exact, strict=True):
        error = measured.double() - wanted
        if "attention" in case:  # its gradient is also that of a result that was rounded
            assert float(error.norm() / wanted.norm()) < 2**-7
        else:
            assert (error.abs() <= wanted.abs() * 2**-8 + wanted.abs().max() * 1e-6).all()


def test_what_is_not_a_product_of_bfloat16_on_a_cpu_keeps_its_bits() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 7, 7)
    narrow = a.to(HALF)
    for compute in (lambda: a @ b, lambda: narrow.sum(1), lambda: narrow * narrow, lambda: a.double() @ b.double()):
        with WideProducts():
            inside = compute()
        assert torch.equal(inside, compute())
        assert inside.dtype == compute().dtype


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, tokenizer = tmp_path_factory.mktemp("half") / "policy", character_tokenizer(ALPHABET)
    tiny_model(vocab_size=len(tokenizer), hidden_size=32).to(HALF).save_pretrained(path)  # type: ignore[arg-type]
    tokenizer.save_pretrained(path)
    return str(path)


def modules(policy: str) -> dict[str, Callable[[], PolicyModule]]:
    sampling = SamplingParams(num_generations=4, max_completion_length=12, seed=3)
    cache = SnapKV(budget=8, buffer=3, num_sinks=1, window=2)
    return {
        "GRPO": lambda: SparseGRPO(policy, cache, likes_a, sampling=sampling, steps_per_generation=2),
        "replay": lambda: ReplayGRPO(policy, cache, likes_a, sampling=sampling, replay_objective="sparse"),
        "adapters": lambda: SparseGRPO(LoraPolicy(policy, r=2), cache, likes_a, sampling=sampling),
        "warm-up": lambda: SupervisedWarmup(policy, solution_column="answer"),
    }


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("name", modules(""))
@pytest.mark.usefixtures("without_instructions")
def test_a_training_leaves_no_product_of_bfloat16(name: str, precision: Any, folder: str) -> None:
    """Nor do rollouts, which multiply with copies of weights."""
    if name == "adapters":
        pytest.importorskip("peft", reason="peft is an extra")
    with Counted() as counted:
        tiny_grpo.fit(modules(folder)[name](), 2, precision=precision)
    assert set(counted.types) == {torch.float32}
