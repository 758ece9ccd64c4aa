"""Layers with LoRA adapters are multiplied side by side where they are plain, and called where they are not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from rollout_cases import PROMPTS, adapt, assert_same, policy
from rollouts import assert_replayed
from torch import Tensor, nn

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.lora import adapters, add_adapter
from sparse_rl_lightning.rollout.engine.decoders import adapted_products
from sparse_rl_lightning.rollout.engine.decoders.adapted_products import Adapted, Apart, SideBySide, adapted
from sparse_rl_lightning.rollout.engine.decoders.choice import decoder_bytes
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Projection
from sparse_rl_lightning.rollout.engine.decoders.native import NativeDecoder
from tests.pretend_gpu import PretendGPU

peft = pytest.importorskip("peft", reason="peft is an extra")

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
    own = peft.inject_adapter_in_model(peft.LoraConfig(**config), Layers().to(dtype)).eval()
    for name, parameter in own.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    return list(own.layer)


def check(product: Projection | None, modules: list[Any], tolerance: float = 1e-5) -> None:
    """The product gives what the modules give, without calling them."""
    assert isinstance(product, Adapted)
    seen: list[nn.Module] = []
    x = torch.randn(5, 32, dtype=product.dtype)
    with torch.inference_mode():
        want = Projection(modules)(x)
        handles = [module.register_forward_hook(lambda module, *_: seen.append(module)) for module in modules]
        torch.testing.assert_close(product(x).float(), want.float(), atol=tolerance, rtol=tolerance)
    for handle in handles:
        handle.remove()
    assert not seen


def test_products_are_those_of_peft_with_current_weights() -> None:
    modules = layers()
    product = adapted(modules, torch.float32)
    check(product, modules)
    for parameter in (modules[0].base_layer.weight, modules[1].lora_B["default"].weight, modules[2].base_layer.bias):
        parameter.data.add_(1.0)
    product.refresh()
    check(product, modules)


def test_adapters_that_are_off_add_nothing_until_they_are_on_again() -> None:
    modules = layers()
    product = adapted(modules, torch.float32)
    for is_on in (False, True):
        for module in modules:
            module.enable_adapters(is_on)
        product.refresh()
        check(product, modules)
    modules[0].enable_adapters(False)  # one of three
    modules[1].scaling["default"] = 0.3
    product.refresh()
    check(product, modules)


@pytest.mark.parametrize("has_bfloat16", {False, torch.ops.mkldnn._is_mkldnn_bf16_supported()})
def test_in_16_bits_and_under_autocast_as_close_as_its_rounding(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scaling of 1.5 is rounded with the weights that it is folded into, where peft rounds its products with it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    modules, x = layers(torch.bfloat16), torch.randn(256, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        modules[-1].base_layer.bias += 100  # as keys of Qwen2 have
        exact = Projection([copy.deepcopy(module).double() for module in modules])(x.double())
    for is_autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast), torch.inference_mode():
            product = adapted(modules, torch.bfloat16)
            assert isinstance(product, Adapted)
            product.refresh()
            sums = SideBySide(modules, torch.bfloat16, with_bias=True)
            on_gpu = Apart([module.base_layer for module in modules], torch.bfloat16).add(sums(x).to(x.dtype), x)
            results = (Projection(modules)(x), product(x), on_gpu)
            errors = [(result - exact).square() for result in results]
        # of one layer more than of all: on a GPU what adapters add is rounded, here larger than the layer's own product
        layers_apart = zip(*(error.split(WIDTHS, dim=1) for error in errors), strict=True)
        for some, most in ((errors, 1.2), *((layer, 1.5) for layer in layers_apart)):
            pefts, *ours = (error.mean().sqrt() for error in some)
            assert all(0 < error < most * pefts for error in ours), (ours, pefts)


def test_outside_of_autocast_adapters_compute_in_their_own_type() -> None:
    """So peft does: all that is rounded to 16 bits is the input and the sum."""
    modules = layers(torch.bfloat16)
    product, x = adapted(modules, torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    for module in modules:
        module.base_layer.weight.data.zero_()
        if module.base_layer.bias is not None:
            module.base_layer.bias.data.zero_()
        module.scaling["default"] = 0.3
    product.refresh()
    with torch.no_grad():
        parts = [(m.lora_A["default"].weight.double(), m.lora_B["default"].weight.double()) for m in modules]
        exact = torch.cat([0.3 * x.double() @ down.T @ up.T for down, up in parts], dim=-1)
        assert (product(x) != exact.to(torch.bfloat16)).float().mean() < 0.01  # only where a sum is next to a tie


def test_the_adapter_in_use_is_copied() -> None:
    modules = layers()
    for module in modules:
        module.update_layer("other", 2, 2, config=peft.LoraConfig(r=2, init_lora_weights=False))
        module.set_adapter("other")
    check(adapted(modules, torch.float32), modules)


def each(modules: list[Any], change: Callable[[Any], Any]) -> None:
    for module in modules:
        change(module)


def add_another(module: Any) -> None:
    module.update_layer("other", 2, 2, config=peft.LoraConfig(r=2))
    module.set_adapter(["default", "other"])


def add_one(module: Any, inputs: Any, out: Tensor) -> Tensor:
    return out + 1


CHANGES: dict[str, tuple[dict[str, Any], Callable[[list[Any]], Any]]] = {
    "merged": ({}, lambda modules: each(modules, lambda module: module.merge())),
    "two adapters": ({}, lambda modules: each(modules, add_another)),
    "dropout": (
        {},
        lambda modules: each(modules, lambda m: m.lora_dropout.update({"default": nn.Dropout(1.0).train()})),
    ),
    "a hook of an adapter": ({}, lambda modules: modules[0].lora_A["default"].register_forward_hook(add_one)),
    "a hook of a layer": ({}, lambda modules: modules[0].base_layer.register_forward_hook(add_one)),
    "a layer without an adapter": ({}, lambda modules: modules.insert(0, nn.Linear(32, 4))),
    "DoRA": ({"use_dora": True}, lambda modules: None),
    "a bias": ({"lora_bias": True}, lambda modules: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_plain_is_called(name: str) -> None:
    options, change = CHANGES[name]
    modules = layers(**options)
    assert (adapted(modules, torch.float32) is None) == bool(options)
    change(modules)
    assert adapted(modules, torch.float32) is None


def test_rollouts_of_an_adapted_policy_are_those_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = policy("llama")
    add_adapter(model, "all-linear", seed=0, r=4, lora_alpha=8)
    sampler, params = RolloutSampler(model), SamplingParams(num_generations=2, max_completion_length=8, seed=0)
    for step in range(3):
        if step:
            for parameter in adapters(model):
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        assert_replayed(model, sampler.generate([[3, 4, 5]], params))
    calls: list[Any] = []
    with monkeypatch.context() as patch:
        forward = adapted_products.Adapted.__call__
        patch.setattr(adapted_products.Adapted, "__call__", lambda own, x: (calls.append(own), forward(own, x))[1])
        sampler.generate([[3, 4, 5]], params)
    assert calls
    assert all(one._base for one in calls)


def small(dtype: torch.dtype = torch.float32) -> Any:
    """A policy with adapters that change something."""
    model = policy(initializer_range=0.2).to(dtype)
    adapt(model, None)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_layers_have_products_of_their_own_and_adapters_share_theirs(dtype: torch.dtype) -> None:
    model = small(dtype)
    with PretendGPU() as gpu:
        layer = NativeDecoder(gpu.copy_of(model), CacheGeometry.of(model)).layers[0]
        gpu.reset()
        for product in (layer.project_in, layer.project_out, layer.mlp):
            product(torch.zeros(8, 32, dtype=dtype, device="cuda"))
    ops = Counter(op for _, op in gpu.launches.elements())
    casts = 0 if dtype == torch.float32 else 2 * 4  # of each input, to the adapters' float32, and of what they give
    assert sum(ops[op] for op in ("mm", "addmm")) == 2 * 4
    assert (ops["addmm_"], ops["_to_copy"]) == (7, casts)
    assert sum(ops.values()) - ops["zeros"] == 15 + casts + 1, "19 a layer, with two norms and attention"
    assert not gpu.waits


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_copies_of_adapters_count_on_a_gpu_and_those_of_frozen_weights_are_not_made(architecture: str) -> None:
    model = policy(architecture)
    adapt(model, None)
    with PretendGPU() as gpu:
        there, geometry = gpu.copy_of(model), CacheGeometry.of(model)
        before = torch.cuda.memory_allocated()
        decoder = NativeDecoder(there, geometry)
        assert torch.cuda.memory_allocated() - before == decoder_bytes(there, geometry, 0, "native") > 0
        del decoder
    frozen = sum(p.nbytes for p in model.model.layers.parameters() if not p.requires_grad)
    assert decoder_bytes(model.to("meta"), geometry, 0, "native") < frozen / 4


def test_graphs_follow_adapters_that_are_trained_and_switched() -> None:
    model, params = small(), SamplingParams(max_completion_length=3, seed=1)
    found = list[Tensor]()
    with PretendGPU() as gpu:
        sampler = RolloutSampler(gpu.copy_of(model), FullKV(), num_slots=2, cuda_graphs="require")
        for is_on in (True, False, True):
            for one in (model, sampler.model):
                one.enable_adapters() if is_on else one.disable_adapters()
            want = RolloutSampler(model, FullKV(), num_slots=2).generate(PROMPTS[:2], params)
            assert_same(sampler.generate(PROMPTS[:2], params).to("cpu"), want)
            found.append(want.sampler_logprobs)
            with torch.no_grad():
                for one in (model, sampler.model):
                    for parameter in adapters(one):
                        parameter.mul_(1.5)
        assert len(gpu.captures.graphs) == 1
    assert len({float(logprobs.sum()) for logprobs in found}) == 3


def rescale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


def hook_norm(model: Any, added: float) -> None:
    """In place of the hook before, so that there is one as before."""
    norm = model.model.layers[1].post_attention_layernorm
    norm._forward_hooks.clear()
    norm.register_forward_hook(lambda module, inputs, out: out + added)


def turn_faster(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3


def widen(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 5.0


SWITCHED: list[Callable[[Any], None]] = [lambda model: model.disable_adapters(), lambda model: model.enable_adapters()]
OTHERS: list[Callable[[Any], None]] = [partial(hook_norm, added=0.1), partial(hook_norm, added=0.5), turn_faster, widen]


@pytest.mark.parametrize(
    ("lora", "options", "changes"),
    [
        ({"use_dora": True}, {}, [*SWITCHED, rescale]),
        ({"lora_bias": True}, {}, [*SWITCHED, rescale]),
        ({"target_modules": ["q_proj", "v_proj"]}, {}, [*SWITCHED, rescale]),  # beside a layer without one
        ({}, {"decoder": "transformers"}, [*SWITCHED, rescale]),  # which calls every module
        (None, {}, OTHERS),
        (None, {"decoder": "transformers"}, OTHERS),
    ],
    ids=["DoRA", "bias", "some layers", "own forward pass", "others", "others, own forward pass"],
)
def test_graphs_do_not_outlive_what_python_said(
    lora: dict[str, Any] | None, options: Any, changes: list[Callable[[Any], None]]
) -> None:
    model, params = policy(initializer_range=0.2), SamplingParams(max_completion_length=3, seed=1)
    if lora is not None:
        own = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8} | lora
        add_adapter(model, own.pop("target_modules"), seed=0, **own)
        for parameter in adapters(model):
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    logprobs = list[Tensor]()
    with PretendGPU() as gpu:
        sampler = RolloutSampler(gpu.copy_of(model), FullKV(), num_slots=2, cuda_graphs="require", **options)
        for change in [lambda model: None, *changes]:
            for one in (model, sampler.model):
                change(one)
            want = RolloutSampler(model, FullKV(), num_slots=2, **options).generate(PROMPTS[:2], params)
            for _ in range(2):  # the second one replays
                assert_same(sampler.generate(PROMPTS[:2], params).to("cpu"), want)
            logprobs.append(want.sampler_logprobs)
        assert len(gpu.captures.graphs) == 1 + len(changes)
    assert all(not torch.equal(one, other) for one, other in pairwise(logprobs))


def test_what_graphs_could_not_follow_makes_another_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = small()
    decoder = NativeDecoder(model, CacheGeometry.of(model))
    module = model.model.layers[1].self_attn.q_proj
    assert decoder.serves(model, decoder.geometry, False)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not decoder.serves(model, decoder.geometry, False)
    module.merge()
    assert not decoder.serves(model, decoder.geometry, False)
    module.unmerge()
    module.update_layer("other", 2, 2, config=peft.LoraConfig(r=2))
    decoder = NativeDecoder(model, decoder.geometry)
    module.set_adapter(["default", "other"])
    assert not decoder.serves(model, decoder.geometry, False)
