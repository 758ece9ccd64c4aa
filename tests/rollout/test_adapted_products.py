"""Layers with LoRA adapters are multiplied side by side where they are plain, and called where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.lora import adapters, add_adapter
from sparse_rl_lightning.rollout.engine.decoders import adapted_products
from sparse_rl_lightning.rollout.engine.decoders.adapted_products import Adapted, adapted
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Projection

WIDTHS = (24, 8, 8)


class Layers(nn.Module):
    """Layers that read the same."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(32, width, bias=bias and width == 8) for width in WIDTHS)


def layers(dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """Those with adapters, whose output is not zero."""
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 6, "target_modules": r"layer\.\d"} | options
    own = inject_adapter_in_model(LoraConfig(**config), Layers().to(dtype)).eval()
    for name, parameter in own.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    return list(own.layer)


def check(product: Projection | None, modules: list[Any], calls: bool, tolerance: float = 1e-5) -> None:
    """The product gives what the modules give, with or without calling them."""
    assert isinstance(product, Adapted)
    seen: list[nn.Module] = []
    x = torch.randn(5, 32, dtype=product.dtype)
    with torch.inference_mode():
        want = Projection(modules)(x)
        handles = [module.register_forward_hook(lambda module, *_: seen.append(module)) for module in modules]
        torch.testing.assert_close(product(x).float(), want.float(), atol=tolerance, rtol=tolerance)
    for handle in handles:
        handle.remove()
    assert seen == (modules if calls else [])
    assert (product._layers is None) == calls, "what is called is not copied"


def test_products_are_those_of_peft_with_current_weights() -> None:
    modules = layers()
    product = adapted(modules, torch.float32)
    check(product, modules, calls=False)
    for parameter in (modules[0].base_layer.weight, modules[1].lora_B["default"].weight, modules[2].base_layer.bias):
        parameter.data.add_(1.0)
    assert product is not None
    product.refresh()
    check(product, modules, calls=False)


def test_adapters_that_are_off_add_nothing_until_they_are_on_again() -> None:
    modules = layers()
    product = adapted(modules, torch.float32)
    assert product is not None
    for is_on in (False, True):
        for module in modules:
            module.enable_adapters(is_on)
        product.refresh()
        check(product, modules, calls=False)
    modules[0].enable_adapters(False)  # one of three
    product.refresh()
    check(product, modules, calls=True)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_under_autocast_as_close_as_its_rounding(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of it peft computes adapters in float32, whatever the product was made for."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    modules = layers(torch.bfloat16)
    product = adapted(modules, torch.bfloat16)
    assert product is not None
    for _ in range(2):
        check(product, modules, calls=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product.refresh()
            check(product, modules, calls=False, tolerance=0.02)
        product.refresh()


def test_the_adapter_in_use_is_looked_up_again() -> None:
    modules = layers()
    product = adapted(modules, torch.float32)
    assert product is not None
    for module in modules:
        module.update_layer("other", 2, 2, config=LoraConfig(r=2, init_lora_weights=False))
        module.set_adapter("other")
    product.refresh()
    check(product, modules, calls=False)


def merge(modules: list[Any]) -> None:
    for module in modules:
        module.merge()


def add_another(modules: list[Any]) -> None:
    for module in modules:
        module.update_layer("other", 2, 2, config=LoraConfig(r=2))
        module.set_adapter(["default", "other"])


def start_dropout(modules: list[Any]) -> None:
    for module in modules:
        module.lora_dropout["default"] = nn.Dropout(1.0).train()


def scale_one(modules: list[Any]) -> None:
    modules[0].scaling["default"] = 0.25


def hook_one(modules: list[Any]) -> None:
    modules[0].lora_A["default"].register_forward_hook(lambda module, inputs, out: out + 1)


@pytest.mark.parametrize("change", [merge, add_another, start_dropout, scale_one, hook_one])
def test_what_is_not_plain_is_called(change: Callable[[list[Any]], None]) -> None:
    modules = layers()
    product = adapted(modules, torch.float32)
    assert product is not None
    change(modules)
    product.refresh()
    check(product, modules, calls=True)


def test_other_methods_are_called() -> None:
    for options in ({"use_dora": True}, {"lora_bias": True}):
        modules = layers(**options)
        check(adapted(modules, torch.float32), modules, calls=True)


def test_layers_without_adapters_or_with_changes_are_not_its_own() -> None:
    modules = layers()
    assert adapted([nn.Linear(32, 4), *modules], torch.float32) is None
    modules[0].base_layer.register_forward_hook(lambda module, inputs, out: out + 1)
    assert adapted(modules, torch.float32) is None


def test_rollouts_of_an_adapted_policy_are_those_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61,
    )).eval()  # fmt: skip
    add_adapter(model, "all-linear", seed=0, r=4, lora_alpha=8)
    sampler = RolloutSampler(model, FullKV(), end_token_ids=[])
    for step in range(3):
        if step:
            for parameter in adapters(model):
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        rollout = sampler.generate([[3, 4, 5]], SamplingParams(num_generations=2, max_completion_length=8, seed=0))
        with torch.no_grad():
            own = model(rollout.sequences).logits.log_softmax(-1)[:, 2:-1]
        exact = own.gather(-1, rollout.sequences[:, 3:, None]).squeeze(-1)
        assert float((exact - rollout.sampler_logprobs[:, 3:]).abs().max()) < 2e-5
    calls: list[Any] = []
    with monkeypatch.context() as patch:
        forward = adapted_products.Adapted.__call__
        patch.setattr(adapted_products.Adapted, "__call__", lambda own, x: (calls.append(own), forward(own, x))[1])
        sampler.generate([[3, 4, 5]], SamplingParams(num_generations=2, max_completion_length=8, seed=0))
    assert calls
    assert None not in [one._layers for one in calls]
