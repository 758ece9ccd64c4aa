"""Quantized weights: the nearest levels, one arithmetic for sampler and learner, whole gradients, no whole weights."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_cases import need
from test_lora import PROMPTS, TINY, perturbed, tokens
from tiny_run import config, write
from torch import nn
from transformers import PreTrainedModel

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.learner.memory import MicroBatch, learner_bytes
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.policies import LoraPolicy, TinyPolicy
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.quantized import QuantizedLinear, count_weights, dequantize, product_bytes, quantize
from sparse_rl_lightning.rollout import replay_logprobs
from sparse_rl_lightning.rollout.engine.decoders.choice import decoder_bytes
from sparse_rl_lightning.testing import tiny_model

KINDS: tuple[Any, ...] = ("nf4", "int8")
NF4 = (  # appendix E of arXiv 2305.14314
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def adapted(kind: Any, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """Of random weights, with trained adapters."""
    need(kind)
    model = tiny_model(initializer_range=0.2, eos_token_id=None, **sizes).to(dtype)  # type: ignore[arg-type]
    policy = LoraPolicy(TINY, r=2, quantization=kind)
    policy.adapt(model)
    return perturbed(model)


@pytest.mark.parametrize("shape", [(48, 32), (5, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_become_the_nearest_levels(kind: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    need(kind)
    linear = nn.Linear(shape[1], shape[0], dtype=dtype)
    with torch.no_grad():
        linear.weight[0] = 0
    weight, found = linear.weight.detach().double(), QuantizedLinear.of(linear, kind).dequantized(dtype).double()
    flat, number = weight.flatten(), weight.numel()
    if kind == "nf4":
        levels = torch.tensor(NF4, dtype=torch.float64)
        scale = torch.stack([block.abs().amax() for block in flat.split(64)]).repeat_interleave(64)[:number]
    else:
        levels, scale = torch.arange(-127, 128, dtype=torch.float64) / 127, weight.abs().amax(1)
        scale = scale.repeat_interleave(shape[1])
    possible = levels[:, None] * scale
    nearest = (possible - flat).abs().amin(0)
    assert nearest.max() > 1e-4, "nothing was rounded"
    found = found.flatten()
    tolerance = 1e-6 + (2**-8 if dtype == torch.bfloat16 else 1e-6) * found.abs()
    assert ((possible - found).abs().amin(0) <= tolerance).all(), "a value that is no level"
    assert ((found - flat).abs() <= nearest + tolerance).all(), "not the nearest level"


@pytest.mark.parametrize("decoder", ["native", "transformers"])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_is_as_exact_as_with_whole_weights(kind: Any, decoder: Any) -> None:
    model = adapted(kind).eval()
    sampler = RolloutSampler(model, RKV(budget=12, buffer=5, num_sinks=1, window=3), decoder=decoder)
    rollout = sampler.generate(PROMPTS, SamplingParams(num_generations=4, max_completion_length=40, seed=3))
    model.train()  # as in an update
    replayed = replay_logprobs(model, rollout)
    torch.testing.assert_close(rollout.sampler_logprobs, replayed.detach(), atol=2e-5, rtol=0)
    dense = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0]
    assert (replayed - dense).abs().max() > 1e-3, "nothing that matters was evicted"
    replayed.sum().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                parameter -= 1e-3 * parameter.grad
    again = sampler.generate(PROMPTS, SamplingParams(num_generations=4, max_completion_length=40, seed=3))
    torch.testing.assert_close(again.sampler_logprobs, replay_logprobs(model, again), atol=2e-5, rtol=0)
    assert (again.sampler_logprobs - rollout.sampler_logprobs).abs().max() > 1e-3, "the update was not seen"
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad)[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"weights hold NaN: .*lora"):
        sampler.generate(PROMPTS, SamplingParams(max_completion_length=4))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_weights_that_it_stands_for(kind: Any, autocast: bool) -> None:
    model = adapted(kind, dtype=torch.float32 if autocast else torch.float64)
    plain = copy.deepcopy(model)
    dequantize(plain)
    gradients = []
    for one in (model, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = sequence_logprobs(one, *tokens())[0]
        logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
    assert len(gradients[0]) == 2 * 2 * 7
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=0.05 if autocast else 1e-10, rtol=0)


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int8", 8.25)])
def test_no_whole_weights_are_kept_or_copied(kind: Any, bits: float) -> None:
    need(kind)
    model = tiny_model(hidden_size=128, num_layers=6).to(torch.bfloat16)  # type: ignore[arg-type]
    number = count_weights(model)
    whole = {name: module.weight.numel() for name, module in model.named_modules() if type(module) is nn.Linear}
    del whole["lm_head"]
    LoraPolicy(TINY, r=2, quantization=kind).adapt(model)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == len(whole) == 42
    assert count_weights(model) == number + sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(layer.weight.nbytes + layer.scale.nbytes for layer in layers) <= bits / 8 * sum(whole.values())
    largest = product_bytes(model, torch.bfloat16)
    assert largest == 2 * max(whole.values())
    with LiveBytes() as live:  # a whole training pass over one token
        sequence_logprobs(model, torch.tensor([[3, 4]]), torch.tensor([[False, True]]))[0].sum().backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert largest < live.most < 2 * largest + gradients
    geometry = CacheGeometry.of(model)
    # of up to three adapters side by side, and the tied head
    others = sum(p.nbytes * (3 * ("lora" in name) + ("embed" in name)) for name, p in model.named_parameters())
    for way in ("native", "transformers"):
        assert 2 * largest <= decoder_bytes(model, geometry, 0, way) <= 2 * largest + others


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_in_another_type_has_the_same_scales(kind: Any) -> None:
    model = adapted(kind)
    before = {name: p.clone() for name, p in model.named_parameters() if p.dtype in (torch.uint8, torch.int8)}
    after = dict(model.bfloat16().named_parameters())
    assert len(before) == 2 * 2 * 7
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_micro_batch_counts_the_matrices_made(kind: Any) -> None:
    need(kind)
    model, part = TINY.load()[0], MicroBatch(rows=1, length=2, completion=1)
    found = [
        learner_bytes(model.config, part, LearnerOptions(), adapt=LoraPolicy(TINY, r=2, quantization=one).adapt)
        for one in (None, kind)
    ]
    assert 0.5 < (found[1].peak - found[0].peak) / product_bytes(adapted(kind, hidden_size=32), torch.float32) < 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_resumption_and_its_export(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(kind)
    monkeypatch.chdir(tmp_path)
    values = config(max_steps=3)
    below = values["model"]["init_args"]["policy"]
    source = {"policy": below, "r": 4, "quantization": kind}
    values["model"]["init_args"] |= {"policy": {"class_path": "LoraPolicy", "init_args": source}}
    whole = main(["fit", "--config", write(values)]).model.policy
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    main(["fit", "--config", write(values), "--trainer.max_steps=2"])
    resumed = main(["fit", "--config", write(values), "--ckpt_path=last"])
    states = whole.state_dict(), resumed.model.policy.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    main(["export", "--config", write(values), "--folder=policy"])
    plain = LoraPolicy(str(tmp_path / "again" / "policy")).base.load()[0]
    assert not any(isinstance(module, QuantizedLinear) for module in plain.modules())
    with torch.no_grad():
        found, want = (sequence_logprobs(one.eval(), *tokens())[0] for one in (plain, whole))
    torch.testing.assert_close(found, want, atol=2e-5, rtol=0)


def test_what_cannot_be_quantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="quantization must be one of nf4, int8, got quantization='int4'"):
        LoraPolicy(TinyPolicy(), quantization="int4")  # type: ignore[arg-type]
    model = TINY.load()[0]
    quantize(model, "int8")
    with pytest.raises(ValueError, match=r"quantization='int8': Qwen2Model has no plain linear layers"):
        quantize(model, "int8")
    monkeypatch.setattr(torch.ops, "bitsandbytes", object())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"pip install 'sparse-rl-lightning\[quantization\]'"):
        quantize(TINY.load()[0], "nf4")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_adapters_changes_its_type(kind: Any) -> None:
    """Frequencies of positions stay float32 in a model of 16 bits, as transformers keeps them, and to the bit."""
    need(kind)
    model = tiny_model().to(torch.bfloat16)
    model.get_decoder().rotary_emb.inv_freq = 1.0 / 3 ** torch.arange(8.0)
    before = {name: value.clone() for name, value in model.named_buffers()}
    LoraPolicy(TINY, r=2, quantization=kind).adapt(model)
    for name, value in before.items():
        torch.testing.assert_close(model.get_buffer(name), value, rtol=0, atol=0)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
