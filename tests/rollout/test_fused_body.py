"""The decoder's fused parts give what transformers' forward pass gives, with current weights and live modules."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.engine.decoders import linear_products as products
from sparse_rl_lightning.rollout.engine.decoders.choice import decoder_bytes
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Joined, Packed, Projection, join
from sparse_rl_lightning.rollout.engine.memory import slot_bytes
from tests.families import family

SIZES = {"hidden_size": 40, "intermediate_size": 72, "vocab_size": 61, "initializer_range": 0.02, "eos_token_id": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),  # biases of queries, keys and values
    "qwen3": ("qwen3", {}),  # norms of queries and keys
    "llama": ("llama", {"attention_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu"}),  # no op for it
}
WAYS = ["packed", "joined", "called"]


def policy(name: str, dtype: torch.dtype = torch.float32) -> Any:
    of, changed = FAMILIES[name]
    return family(of, **SIZES, **changed).to(dtype)


def mismatch(model: Any, sampler: RolloutSampler) -> float:
    """The largest difference between the sampler's log-probabilities and those of transformers' forward pass."""
    params = SamplingParams(num_generations=3, max_completion_length=12, seed=0)
    rollout = sampler.generate([[3, 4, 5], [6, 7, 8, 9, 10]], params)
    with torch.no_grad():
        logprobs = model(rollout.sequences).logits.float().log_softmax(-1)[:, :-1]
    exact = logprobs.gather(-1, rollout.sequences[:, 1:, None]).squeeze(-1)
    return float((exact - rollout.sampler_logprobs[:, 1:])[rollout.completion_mask[:, 1:]].abs().max())


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products are made: as on a CPU with oneDNN, as on a GPU, or by the modules."""
    kinds = {"joined": Joined, "called": None}
    if request.param in kinds:
        monkeypatch.setattr(products, "_copied_class", lambda modules, dtype: kinds[request.param])
    return str(request.param)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_transformers_after_an_optimizer_step_too(name: str, way: str) -> None:
    model = policy(name)
    sampler = RolloutSampler(model, FullKV(), end_token_ids=[])
    assert mismatch(model, sampler) < 2e-5
    before = {weight: p.detach().clone() for weight, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([[5, 9, 2, 7]])).logits.square().mean().backward()
    optimizer.step()
    moved = [weight for weight, p in model.named_parameters() if not torch.equal(p, before[weight])]
    assert {*moved} >= {weight for weight in before if "k_proj.bias" not in weight}
    assert mismatch(model, sampler) < 2e-5


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_bfloat16_and_autocast_stay_as_close_as_their_rounding(name: str) -> None:
    model = policy(name, torch.bfloat16)
    assert mismatch(model, RolloutSampler(model, FullKV(), end_token_ids=[])) < 0.15
    model = policy(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mismatch(model, RolloutSampler(model, FullKV(), end_token_ids=[])) < 0.15


def test_modules_with_hooks_are_called() -> None:
    model, seen = policy("qwen3"), set()
    layer = model.model.layers[1]
    for module in (layer.input_layernorm, layer.self_attn.q_norm, layer.mlp.act_fn, layer.self_attn.v_proj):
        module.register_forward_hook(lambda module, inputs, out: seen.add(type(module).__name__))
    assert mismatch(model, RolloutSampler(model, FullKV(), end_token_ids=[])) < 2e-5
    assert seen == {"Qwen3RMSNorm", "SiLUActivation", "Linear"}


def test_joined_products_are_those_of_the_modules_with_and_without_biases() -> None:
    g = torch.Generator().manual_seed(0)
    modules = [torch.nn.Linear(24, n, bias=n != 5) for n in (16, 5, 8)]
    x = torch.randn(8, 24, generator=g)
    with torch.no_grad():
        want = Projection(modules)(x)
        for kind in (Joined, Packed):
            own = kind(modules, torch.float32)
            torch.testing.assert_close(own(x), want, atol=1e-6, rtol=1e-5)
            place = own._weight.data_ptr() if kind is Joined else 0
            modules[2].weight.mul_(2)
            own.refresh()
            want = Projection(modules)(x)
            torch.testing.assert_close(own(x), want, atol=1e-6, rtol=1e-5)
            assert kind is Packed or own._weight.data_ptr() == place
    hooked = torch.nn.Linear(24, 4)
    hooked.register_forward_hook(lambda module, inputs, out: out + 1)
    assert type(join([hooked, modules[0]], torch.float32)) is Projection


def test_bfloat16_products_by_float32_ones_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    wide = [torch.nn.Linear(256, n) for n in (64, 32)]  # as under autocast, which rounds weights and inputs
    rounded = [copy.deepcopy(m).to(torch.bfloat16) for m in wide]
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    low = x.to(torch.bfloat16)
    exact = torch.cat([low.double() @ m.weight.double().T + m.bias.double() for m in rounded], dim=-1)
    for modules in (rounded, wide):
        own = join(modules, torch.bfloat16)
        assert type(own) is Packed
        assert (own.dtype, own._multiplied) == (torch.bfloat16, torch.float32)
        with torch.no_grad():
            found = own(x)
        assert found.dtype == torch.bfloat16
        assert (found != exact.to(torch.bfloat16)).float().mean() < 0.01  # only where the exact sum is next to a tie


def test_copied_weights_count_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy("qwen2", torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(
            products, "_copied_class", lambda modules, dtype: Joined if len(modules) > 1 else None
        )  # as on a GPU
        geometry = CacheGeometry.of(model)
        copied = decoder_bytes(model, geometry, 32, "native")
    inner = model.model.layers
    joined = [m for layer in inner for m in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)]
    joined += [m for layer in inner for m in (layer.mlp.gate_proj, layer.mlp.up_proj)]
    weights = sum(2 * p.numel() for module in joined for p in module.parameters())
    assert copied == weights + 2 * 32 * geometry.head_dim * 4
    size = RolloutSampler(model, FullKV(), end_token_ids=[]).engine_key(SamplingParams(), 2, 4).size
    on_gpu = replace(geometry, device=torch.device("cuda"))
    assert slot_bytes(on_gpu, size, decoder=copied).of(3) - slot_bytes(on_gpu, size).of(3) == copied
    assert slot_bytes(geometry, size, decoder=copied) == slot_bytes(geometry, size)
