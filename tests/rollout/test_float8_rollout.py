"""Rollouts whose keys and values are kept in eight bits: what they compute, what they weigh, how far off they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_same_logprobs
from native_cases import head_rows
from rollouts import PARAMS, PROMPTS, SMALL, assert_same, put_back_midway, roll_out
from rollouts import small_model as model
from test_float8_ops import rounded
from test_native_scores import importance_of, published_redundancy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.cache.slots import SlotSelection
from sparse_rl_lightning.cache.states import block_state
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV, SnapKV, StreamingLLM
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.ops import key_redundancy, window_importance
from sparse_rl_lightning.ops.pools import FLOAT8
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

COMPRESSORS: dict[str, Compressor] = {
    "full": FullKV(),
    "large": RKV(budget=80, buffer=16),
    "streaming": StreamingLLM(**SMALL),
    "snapkv": SnapKV(**SMALL),
    "whole-prompt": RKV(budget=12, buffer=5, num_sinks=0, window=4, compress_prompt=False),
    "heads": SnapKV(**SMALL, budget_rule=Adaptive(8)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Budget and buffer, 96 tokens")
# the engine records attention in float32 only
in_float64 = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS.keys())
each_compressor = pytest.mark.parametrize(
    "compressor", [*COMPRESSORS.values(), H2O(**SMALL)], ids=[*COMPRESSORS, "h2o"]
)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + D / 2) of (H, T, D) turned by (T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def expected_logits(policy: PreTrainedModel, ids: list[int], prompt: int, death: Tensor) -> Tensor:
    """Logits (T, V) in float64 of a decoder that reads entries from memory of eight bits, its own included.

    The tokens of the prompt saw each other before they were stored. ``death`` is (L, H, T).
    """
    config, decoder = policy.config, policy.get_decoder()
    group, dim = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    query_at, key_at = torch.arange(len(ids))[:, None], torch.arange(len(ids))
    angles = key_at[:, None].float() * decoder.rotary_emb.inv_freq
    x = decoder.embed_tokens(torch.tensor(ids))
    for index, layer in enumerate(decoder.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        query, key, value = (
            F.linear(normed, p.weight, p.bias).unflatten(1, (-1, dim)).transpose(0, 1)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = rotated(query, angles), rotated(key, angles)
        heads = []
        for q in range(len(query)):
            h = q // group
            visible = (key_at <= query_at) & (query_at < death[index, h])
            sums = []
            for k, v in ((key[h], value[h]), (rounded(key[h].float()), rounded(value[h].float()))):
                logits = (query[q] @ k.T / dim**0.5).masked_fill(~visible, -torch.inf)
                sums.append(logits.softmax(-1) @ v)
            heads.append(torch.where(query_at < prompt, *sums))
        x = x + F.linear(torch.cat(heads, dim=1), attention.o_proj.weight, attention.o_proj.bias)
        normed = layer.post_attention_layernorm(x)
        up = F.silu(F.linear(normed, layer.mlp.gate_proj.weight)) * F.linear(normed, layer.mlp.up_proj.weight)
        x = x + F.linear(up, layer.mlp.down_proj.weight)
    return F.linear(decoder.norm(x), policy.get_output_embeddings().weight)


@pytest.mark.thinned(3)
@torch.no_grad()
@in_float64
def test_greedy_tokens_are_those_of_a_decoder_that_rounds(compressor: Compressor) -> None:
    """In float64, so that no number falls on the other side of a border between two numbers of eight bits."""
    policy = model(eos_token_id=None).double()
    sampler = RolloutSampler(policy, compressor, num_slots=3, kv_dtype="fp8")
    rollout = sampler.generate(PROMPTS, SamplingParams(max_completion_length=40, temperature=0))
    assert sampler.cache.key_pool.dtype == FLOAT8
    unrounded = replay_logprobs(policy, rollout)[rollout.completion_mask] - rollout.sampler_logprobs[
        rollout.completion_mask]  # fmt: skip
    assert unrounded.abs().max() > 1e-2, "rounding changed nothing: the test would prove nothing"
    for row, prompt in enumerate(PROMPTS):
        ids = rollout.sequences[row, : len(prompt) + 40].tolist()
        logprobs = expected_logits(policy, ids, len(prompt), rollout.evictions.death[:, row, :, : len(ids)])
        logprobs = logprobs[len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == ids[len(prompt) :]
        got = rollout.sampler_logprobs[row, len(prompt) : len(ids)].double()
        assert_same_logprobs(got, logprobs.amax(-1))


@pytest.mark.thinned(3)
@in_float64
def test_batches_slots_and_chunks_change_nothing(compressor: Compressor) -> None:
    """In float64, too: in float32 the last bit of a key, which hangs on the prompts read with it, may round it away."""
    policy = model().double()
    whole = roll_out(policy, compressor, kv_dtype=FLOAT8)
    assert_same(roll_out(policy, compressor, 3, kv_dtype=FLOAT8, max_prefill_tokens=7), whole)


@pytest.mark.thinned(3)
@each_compressor
def test_a_byte_per_number(compressor: Compressor) -> None:
    policy = model(eos_token_id=None)
    half, quarter = (
        RolloutSampler(policy, compressor, num_slots=4, kv_dtype=kind, memory_limit=10**8).generate(PROMPTS, PARAMS).kv
        for kind in ("bfloat16", "float8_e4m3fn")
    )
    assert 2 * quarter.peak_bytes == half.peak_bytes
    assert 2 * quarter.full_peak_bytes == half.full_peak_bytes
    sampler = RolloutSampler(policy, compressor, num_slots=4, kv_dtype="fp8", memory_limit=10**8)
    sampler.generate(PROMPTS, PARAMS)
    pools = sampler.cache.pools
    assert pools.keys.itemsize == pools.values.itemsize == 1
    assert sampler.memory_plan.pool_bytes == quarter.peak_bytes == pools.keys.numel() + pools.values.numel()
    assert sampler.cache.queries.dtype == torch.float32


def test_what_is_out_of_range_saturates() -> None:
    policy = model(eos_token_id=None)
    with torch.no_grad():
        for layer in policy.get_decoder().layers:
            layer.self_attn.v_proj.weight.mul_(1000)
            layer.self_attn.k_proj.bias.add_(1000)
    sampler = RolloutSampler(policy, SnapKV(**SMALL), kv_dtype="fp8")
    rollout = sampler.generate(PROMPTS, PARAMS)
    assert rollout.sampler_logprobs.isfinite().all()
    for pool in (sampler.cache.key_pool, sampler.cache.value_pool):
        assert pool.float().isfinite().all()
        assert pool.float().abs().max() == 448


def test_compressors_see_numbers_they_can_compute_with() -> None:
    seen: list[LayerState] = []

    class Watching(SnapKV):
        def score(self, layer: LayerState) -> Tensor:
            seen.append(layer)
            return super().score(layer)

    for policy in (model(eos_token_id=None), model(eos_token_id=None).bfloat16()):
        seen.clear()
        RolloutSampler(policy, Watching(**SMALL), kv_dtype="fp8").generate(PROMPTS, PARAMS)
        assert len(seen) > 2
        for layer in seen:
            assert layer.keys.dtype == layer.values.dtype == layer.queries.dtype == policy.dtype
            for numbers in (layer.keys[layer.valid], layer.values[layer.valid]):
                torch.testing.assert_close(numbers.double(), rounded(numbers), atol=0, rtol=0)
            assert (layer.queries.double() != rounded(layer.queries)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["snapkv", "heads"])
def test_scores_are_those_of_the_stored_numbers(name: str, dtype: torch.dtype) -> None:
    """The two scores with an op of their own, against float64 on what the pools hold; "heads" have unequal lengths."""
    policy = model(eos_token_id=None).to(dtype)
    session = RolloutSession(RolloutSampler(policy, COMPRESSORS[name], num_slots=4, kv_dtype="fp8"), PARAMS, 40)
    session.add(PROMPTS, sequence_ids=range(10))
    session.advance(max_steps=20)
    cache, slots = session.engine.cache, [0, 2, 3]
    choice = {"window": 4, "exclude_window": True, "group_reduction": "max", "query_reduction": "mean",
              "pooling": "max", "kernel_size": 7}  # fmt: skip
    for layer, pools in enumerate(cache.layers):
        width = int(cache.lengths[layer, slots].max())
        state = block_state(cache, range(layer, layer + 1), SlotSelection.of(slots, torch.tensor(slots), width))
        assert pools.keys.dtype == FLOAT8
        given = (state.queries, state.query_positions, state.keys, state.lengths, state.positions, state.scale)
        importance = window_importance(*given, **choice)
        redundancy = key_redundancy(state.keys, state.lengths, 0.5)
        for row, slot in enumerate(slots):
            grouped = state.queries[row].double().unflatten(0, (state.keys.shape[1], -1))
            for head, queries in enumerate(grouped):
                rows = head_rows(pools, slot, head)
                keys = pools.keys[rows].double()
                given = (queries, state.query_positions[row], keys, pools.positions[rows], state.scale)
                want = importance_of(*given, **choice)
                held = slice(0, len(keys))
                assert len(keys) > 8
                torch.testing.assert_close(importance[row, head, held].double(), want, atol=5e-6, rtol=5e-5)
                want = published_redundancy(keys, 0.5)
                torch.testing.assert_close(redundancy[row, head, held].double(), want, atol=5e-6, rtol=5e-5)


def test_slots_that_are_put_back_go_on() -> None:
    policy = model()
    want = roll_out(policy, SnapKV(**SMALL), 3, kv_dtype="fp8")
    assert_same(put_back_midway(policy, SnapKV(**SMALL), kv_dtype="fp8"), want)


# -------------------------------------------------------------------- noise: the numbers of docs/design.md

# (k1, k3, 5th percentile of the ratio) of replay to sampler: at most, at most, at least
BOUNDS = {
    "tiny": {"bfloat16": (3e-4, 2e-5, 0.985), "fp8": (4e-3, 2e-3, 0.9)},
    "stories": {"bfloat16": (2e-3, 5e-4, 0.95), "fp8": (4e-2, 4e-2, 0.65)},
}


def noise(policy: PreTrainedModel, kind: str, prompts: list[list[int]], length: int) -> tuple[float, ...]:
    """What MismatchSplit logs as the kernel's part: of the sampler to its replay, evictions left out of account."""
    params = SamplingParams(num_generations=8, max_completion_length=length, seed=5)
    rollout = RolloutSampler(policy, SnapKV(budget=32, buffer=16, window=8), kv_dtype=kind).generate(prompts, params)
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout)
    mask = rollout.completion_mask
    found = mismatch_statistics(consistency_log_ratio(replayed, rollout.sampler_logprobs, mask), mask)
    return tuple(float(found[f"mismatch/{name}"]) for name in ("kl_k1", "kl_k3", "ratio_p05"))


def check_noise(name: str, policy: PreTrainedModel, prompts: list[list[int]], length: int) -> None:
    found = {kind: noise(policy, kind, prompts, length) for kind in BOUNDS[name]}
    for kind, (k1, k3, p05) in BOUNDS[name].items():
        assert abs(found[kind][0]) < k1
        assert found[kind][1] < k3
        assert found[kind][2] > p05
    assert found["fp8"][1] > 10 * found["bfloat16"][1], "eight bits cannot be as exact as sixteen"


def test_noise_of_a_tiny_model() -> None:
    check_noise("tiny", tiny_model(initializer_range=0.1, eos_token_id=None), PROMPTS, 60)


def test_noise_of_a_real_model(models_dir: Path) -> None:
    folder = models_dir / "stories260K"
    policy = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["Once upon a time, there was a little girl named Lily.", "Tom and his dog", "The sun was hot and"]
    check_noise("stories", policy, [tokenizer(text)["input_ids"] for text in texts], 120)
