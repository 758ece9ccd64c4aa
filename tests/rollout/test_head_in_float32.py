"""Logits in float32 from a policy in 16 bits: exact sums, the learner's own, on a GPU one product without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, forced_rollout
from sparse_rl_lightning.rollout.engine.decoders import linear_products as heads
from sparse_rl_lightning.rollout.engine.decoders.base import DecoderKind
from sparse_rl_lightning.rollout.engine.decoders.choice import decoder_bytes, make_decoder
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Unrounded, head_in_float32
from sparse_rl_lightning.rollout.engine.memory import slot_bytes
from sparse_rl_lightning.rollout.options import RolloutOptions
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.pretend_gpu import PretendGPU

SMALL: dict[str, Any] = {"budget": 16, "buffer": 8, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=4, max_completion_length=30, seed=1)
PROMPTS = [[5, 9, 11, 40], [7, 22, 8] * 5]
VOCABULARY = 128


def policy(dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny_model(initializer_range=0.3, eos_token_id=None, vocab_size=VOCABULARY, hidden_size=64).to(dtype)


def quiet_policy(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A policy whose layers add so little that hidden states hardly depend on how these round."""
    model = policy(dtype)
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if name.endswith("o_proj.weight") or name.endswith("down_proj.weight"):
                parameter.mul_(1e-4)
        model.model.norm.weight.mul_(0.25)  # a token is not certain to be repeated, though the head is tied
    return model


def mismatch(model: Any, rollout: Rollout, wide: bool = True) -> float:
    """The mean distance of the sampler's log-probabilities from the learner's."""
    with torch.no_grad():
        own = sequence_logprobs(model, rollout.sequences, rollout.completion_mask, head_in_float32=wide)[0]
    return float((own - rollout.sampler_logprobs)[rollout.completion_mask].abs().mean())


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True), (torch.float32, False)],
)
@pytest.mark.parametrize("way", ["native", "transformers"])
def test_logits_are_the_exact_sums(dtype: torch.dtype, autocast: bool, way: DecoderKind) -> None:
    model = policy(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        decoder = make_decoder(model, CacheGeometry.of(model), way, in_float32=True)
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        found = decoder.logits(hidden)
        rounded = make_decoder(model, CacheGeometry.of(model), way).logits(hidden)
        exact = hidden.double() @ model.lm_head.weight.double().T
        error = float((rounded.double() - exact).abs().max())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)
    assert (error > 1e-3) == (dtype != torch.float32 or autocast)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_learner_and_the_sampler_agree_better(autocast: bool) -> None:
    """What is left of the mismatch are the hidden states, which both round in their own order."""
    model = quiet_policy(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        narrow, wide = (
            RolloutSampler(model, FullKV(), head_in_float32=wide).generate(PROMPTS, PARAMS) for wide in (False, True)
        )
        assert mismatch(model, wide) < 0.1 * mismatch(model, narrow)
        assert mismatch(model, wide) < 0.1 * mismatch(model, wide, wide=False)


def test_a_policy_in_float32_is_as_before() -> None:
    model = policy(torch.float32)
    narrow, wide = (
        RolloutSampler(model, RKV(**SMALL), head_in_float32=wide).generate(PROMPTS, PARAMS) for wide in (False, True)
    )
    assert torch.equal(narrow.sequences, wide.sequences)
    assert torch.equal(narrow.sampler_logprobs, wide.sampler_logprobs)
    assert_same_logprobs(replay_logprobs(model, wide), wide.sampler_logprobs)


def test_forced_rollouts_form_them_alike_and_the_weights_are_the_current_ones() -> None:
    model = policy()
    sampler = RolloutSampler(model, RKV(**SMALL), head_in_float32=True)
    for _ in range(2):
        rollout = sampler.generate(PROMPTS, PARAMS)
        again = forced_rollout(model, rollout, RKV(**SMALL), head_in_float32=True)
        assert_same_logprobs(again.sampler_logprobs, rollout.sampler_logprobs, share=1e-5)
        narrow = forced_rollout(model, rollout, RKV(**SMALL))
        assert (narrow.sampler_logprobs - rollout.sampler_logprobs).abs().max() > 1e-3
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
    sampler.head_in_float32 = False
    narrow = sampler.generate(PROMPTS, PARAMS)
    fresh = RolloutSampler(model, RKV(**SMALL)).generate(PROMPTS, PARAMS)
    assert torch.equal(narrow.sampler_logprobs, fresh.sampler_logprobs)


def test_the_option_reaches_the_sampler() -> None:
    tokenizer, options = character_tokenizer(), RolloutOptions(head_in_float32=True)
    assert options.sampler(policy(), tokenizer, FullKV()).head_in_float32
    assert not RolloutOptions().sampler(policy(), tokenizer, FullKV()).head_in_float32


def test_heads_that_are_more_than_a_product_are_refused() -> None:
    model = policy()
    model.lm_head.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(UserError, match=r"plain nn.Linear, got Linear with hooks .* or set head_in_float32 to false"):
        RolloutSampler(model, head_in_float32=True).generate(PROMPTS, PARAMS)
    with pytest.raises(UserError, match=r"plain nn.Linear, got Sequential\. Leave"):
        head_in_float32(nn.Sequential(nn.Linear(8, 8)))


# ---------------------------------------------------------------- on a GPU


def narrow_and_wide(model: Any, gpu: PretendGPU, **options: Any) -> list[Rollout]:
    made = []
    for wide in (False, True):
        sampler = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), 4, head_in_float32=wide, **options)
        made.append(sampler.generate(PROMPTS, PARAMS).to("cpu"))
    return made


def test_on_a_gpu_it_is_one_product_from_a_graph() -> None:
    model = quiet_policy()
    with PretendGPU() as gpu:
        narrow, wide = narrow_and_wide(model, gpu, cuda_graphs="require")
        assert gpu.captures.refused == []
        steps, products = zip(*((graph.replays, _products(graph)) for graph in gpu.captures.graphs), strict=True)
    assert products == (0, 1)
    assert min(steps) > 30
    assert mismatch(model, wide) < 0.1 * mismatch(model, narrow)


def _products(graph: Any) -> int:
    """The products into float32 that a captured step makes."""
    return sum(getattr(node.func, "__name__", "") == "product" for node in graph.nodes)


def test_torch_makes_float32_logits_of_a_fake_gpu_in_16_bits() -> None:
    """Torch's own rule of shapes and types for the device; there is no such product on CPUs."""
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16):
            for bias in (False, True):
                module = nn.Linear(64, 100, bias=bias, device="meta")
                for name, parameter in list(module.named_parameters()):
                    there = torch.empty(parameter.shape, device="cuda", dtype=dtype)
                    setattr(module, name, nn.Parameter(there, requires_grad=False))
                made = head_in_float32(module)
                assert type(made) is Unrounded
                out = made(torch.empty(8, 64, device="cuda", dtype=dtype))
                assert (out.dtype, out.shape, out.device.type) == (torch.float32, (8, 100), "cuda")
    assert not heads._multiplies_into_float32(torch.zeros(8, 8, dtype=torch.bfloat16))


def test_where_torch_has_no_such_product_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PretendGPU, func: Any, args: Any, kwargs: Any) -> Tensor:
        raise NotImplementedError("Could not run 'aten::mm.dtype'")

    monkeypatch.setattr(PretendGPU, "_on_mm", missing)
    with PretendGPU() as gpu:
        refused = RolloutSampler(gpu.copy_of(policy()), head_in_float32=True)
        with pytest.raises(UserError, match=r"torch 2\S+ on cuda:0 has no product of torch.bfloat16 with a float32"):
            refused.generate(PROMPTS, PARAMS)


def test_the_memory_plan_counts_logits_of_four_bytes_and_no_copy_of_the_head() -> None:
    model = policy()
    geometry = replace(CacheGeometry.of(model), device=torch.device("cuda"))
    size = RolloutSampler(model, FullKV()).engine_key(PARAMS, 2, 4).size
    narrow, wide = (
        slot_bytes(geometry, size, PARAMS, vocabulary=VOCABULARY, logits=kind) for kind in (None, torch.float32)
    )
    assert wide.total - narrow.total == 2 * VOCABULARY * 2  # in the memory of graphs, and where first tokens are drawn
    with PretendGPU() as gpu:
        there = gpu.copy_of(policy(torch.float32))
        under = replace(CacheGeometry.of(there), dtype=torch.bfloat16)
        ways: tuple[DecoderKind, ...] = ("native", "transformers")
        copied = [[decoder_bytes(there, under, 32, way, wide) for wide in (False, True)] for way in ways]
    for rounded, exact in copied:
        assert rounded - exact == 2 * VOCABULARY * 64  # under autocast the head's copy in bfloat16 goes
