"""Layers with a sliding window: the last W tokens in the rollout, in replay, in memory and in what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_cases import put_back
from transformers import PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.cache.windows import WindowCache
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.callbacks import DryRun, MismatchSplit
from sparse_rl_lightning.compressors import (
    H2O,
    RKV,
    Compressor,
    ExpectedAttention,
    FullKV,
    LearnedScore,
    RandomEviction,
    SnapKV,
    TriAttention,
)
from sparse_rl_lightning.integrations.record import SampledRecord
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.attention import causal_attention
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.geometry import CacheGeometry, model_sizes
from sparse_rl_lightning.policies.windows import deaths_by_layer, layer_windows
from sparse_rl_lightning.records import NEVER, EvictionRecord, LayerState
from sparse_rl_lightning.report.rollout_view import held_share
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import (
    RolloutSampler,
    RolloutSession,
    SamplingParams,
    forced_rollout,
    replay_logprobs,
)
from sparse_rl_lightning.testing import character_tokenizer
from tests.closeness import assert_same_logprobs
from tests.families import family
from tests.learned import learned_score
from tests.rollout.test_rollout_memory import allocated, attributes
from tests.tiny_grpo import ALPHABET, fit, module, weights

W = 8
SLIDING, FULL = "sliding_attention", "full_attention"
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, W - 1, W, W + 1, 40, 1)]
SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
GREEDY = SamplingParams(max_completion_length=3 * W, temperature=0)
ONCE = SamplingParams(max_completion_length=30, seed=5)
PARAMS = replace(ONCE, num_generations=3)


def mixed(layers: int = 4, **changed: Any) -> PreTrainedModel:
    """A walked model whose first two layers are of full attention."""
    return family(
        "qwen2", **{"num_hidden_layers": layers, "use_sliding_window": True, "sliding_window": W,
                    "max_window_layers": 2, **changed}
    )  # fmt: skip


def windowed(name: str) -> PreTrainedModel:
    """Some layers with a window, or all of them."""
    return mixed() if name == "qwen2" else family(name, sliding_window=W)


def parity(a: Any, b: Any) -> None:
    assert_same_logprobs(a, b)


# ---------------------------------------------------------------- the truth


@pytest.mark.thinned(3)
@pytest.mark.parametrize("chunk", [16384, 16, 5])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3_text", "olmo3"])
def test_greedy_tokens_are_those_of_generate(name: str, chunk: int) -> None:
    """Prompts around the window and several windows long, read whole and in chunks."""
    model = windowed(name)
    rollout = RolloutSampler(model, FullKV(), 3, max_prefill_tokens=chunk).generate(PROMPTS, GREEDY)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3 * W, do_sample=False)[0]
        assert rollout.sequences[row, : len(want)].tolist() == want.tolist()
    with torch.no_grad():
        parity(sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0], rollout.sampler_logprobs)
    parity(replay_logprobs(model, rollout), rollout.sampler_logprobs)


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_chunks_of_a_prompt_are_staged_as_far_as_windows_reach(name: str) -> None:
    model, params = windowed(name), SamplingParams(max_completion_length=2)
    sampler = RolloutSampler(model, FullKV(), max_prefill_tokens=5)
    full, slides = (0, 2) if name == "mistral" else (2, 2)
    for length in (40, 80):
        usage = sampler.generate([list(range(5, 5 + length))], params).kv
        assert usage.prefill_peak_bytes == 2 * 2 * 16 * 4 * (full * length + slides * W)


@pytest.mark.parametrize("window", [1, 3, 300, 5000])
@pytest.mark.parametrize(("count", "total"), [(7, 7), (1, 9), (600, 600), (300, 700)])
def test_attention_in_blocks_is_that_of_one_mask(window: int, count: int, total: int) -> None:
    query, key, value = (torch.randn(n, heads, 4) for n, heads in ((count, 4), (total, 2), (total, 2)))
    last, index = torch.arange(total - count, total)[:, None], torch.arange(total)
    logits = torch.einsum("qhd,khd->hqk", query.double(), key.double().repeat_interleave(2, 1)) * 0.3
    logits = logits.masked_fill((index > last) | (index <= last - window), -torch.inf)
    want = torch.einsum("hqk,khd->qhd", logits.softmax(-1), value.double().repeat_interleave(2, 1))
    torch.testing.assert_close(causal_attention(query, key, value, 0.3, window).double(), want, atol=2e-6, rtol=1e-5)


COMPRESSORS = {
    "SnapKV": SnapKV(**SMALL),
    "native scores, heads of their own": SnapKV(**SMALL, budget_rule=Adaptive(floor=7)),
    "layers of their own": RKV(**{**SMALL, "budget": 16}, budget_rule=Pyramid(beta=2)),
    "running state": H2O(**SMALL),
    "rotation": ExpectedAttention(query_window=6, num_future=9, **SMALL),
    "random": RandomEviction(**SMALL),
    "weights by layer": learned_score(**SMALL),
    "the prompt stays at first": SnapKV(**SMALL, compress_prompt=False),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compressor", list(COMPRESSORS.values()), ids=list(COMPRESSORS))
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_replay_is_exact_and_batches_do_not_matter(name: str, compressor: Compressor) -> None:
    model = windowed(name)
    if isinstance(compressor, LearnedScore):  # of all layers, by the model's numbers
        compressor = learned_score(model=model_sizes(model, CacheGeometry.of(model)), **SMALL)
    rollout = RolloutSampler(model, compressor).generate(PROMPTS, ONCE)
    record = rollout.evictions
    assert record.num_layers == 2, "windows are not recorded"
    assert bool((rollout.kv.stored < rollout.kv.full).any())
    parity(replay_logprobs(model, rollout), rollout.sampler_logprobs)
    refilled = RolloutSampler(model, compressor, 2, max_prefill_tokens=16).generate(PROMPTS, ONCE)
    assert torch.equal(refilled.sequences, rollout.sequences)
    assert torch.equal(refilled.evictions.death, record.death)
    forced = forced_rollout(model, rollout, compressor, seed=5)
    if not isinstance(compressor, RandomEviction):  # whose numbers are keyed by sequence
        assert torch.equal(forced.evictions.death, record.death)
        parity(forced.sampler_logprobs, rollout.sampler_logprobs)


def test_replay_is_window_and_death() -> None:
    """Deaths are those of the record in full layers, and k + W elsewhere; the earlier one if both are known."""
    config = mixed().config
    assert layer_windows(config) == (0, 0, W, W)
    death = torch.full((2, 1, 2, 20), NEVER, dtype=torch.int32)
    death[1, 0, 1, 3] = 9
    passed = torch.arange(20, dtype=torch.int32) + W
    found = deaths_by_layer(config, EvictionRecord.from_dense(death))
    assert len(found) == 4
    assert torch.equal(torch.stack(list(found[:2])), death)
    assert all(torch.equal(own, passed.expand(1, 2, 20)) for own in found[2:])
    everywhere = torch.full((4, 1, 2, 20), NEVER, dtype=torch.int32)
    everywhere[2, 0, 0, 3], everywhere[2, 0, 0, 4] = 9, 15
    third = deaths_by_layer(config, EvictionRecord.from_dense(everywhere))[2]
    assert third[0, 0].tolist() == [*passed[:3].tolist(), 9, *passed[4:].tolist()]


# ---------------------------------------------------------------- memory, sessions, counts


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16])
def test_memory_is_that_of_both_kinds_of_layers(name: str, kv_dtype: torch.dtype | None) -> None:
    model = windowed(name)
    compressor = FullKV() if name == "mistral" else SnapKV(**SMALL)
    limit = 20_000 if name == "mistral" else 45_000
    sampler = RolloutSampler(model, compressor, memory_limit=limit, kv_dtype=kv_dtype)
    rollout = sampler.generate(PROMPTS, PARAMS)
    plan, engine = sampler.memory_plan, sampler.engine
    assert 1 < plan.num_slots < 21
    assert plan.total_bytes == allocated(attributes(engine.cache), vars(engine.logs)) <= limit
    assert plan.pool_bytes == engine.cache.pool_bytes == rollout.kv.peak_bytes
    full, slides = (0, 2) if name == "mistral" else (2, 2)
    entry = 2 * 16 * (2 if kv_dtype else 4)
    assert plan.pool_bytes == plan.num_slots * 2 * entry * (full * 17 + slides * W)
    assert rollout.kv.full_peak_bytes == plan.num_slots * 2 * entry * (full * 70 + slides * W)


@pytest.mark.parametrize("longest", [3, 30])
def test_what_is_stored_and_read_is_counted_in_all_layers(longest: int) -> None:
    model, params = mixed(3), SamplingParams(max_completion_length=longest, seed=2, num_generations=2)
    rollout = RolloutSampler(model, SnapKV(**SMALL)).generate(PROMPTS, params)
    death, kv = rollout.evictions.death, rollout.kv
    for row, prompt in enumerate(rollout.prompt_lengths.tolist()):
        end = prompt + int(rollout.completion_lengths[row]) - 1  # tokens fed

        def held(query: int, row: int = row) -> float:  # by the full layers, when this token attends
            return float((death[:, row, :, : query + 1] > query).sum() / (2 * 2))

        after = float((death[:, row, :, :end] > end).sum() / (2 * 2))
        assert float(kv.stored[row]) == pytest.approx((2 * after + min(end, W)) / 3)
        assert float(kv.full[row]) == pytest.approx((2 * end + min(end, W)) / 3)
        steps = range(prompt, end)
        read = sum((2 * held(query) + min(query + 1, W)) / 3 for query in steps)
        assert float(kv.stored_integral[row]) == pytest.approx(read, rel=1e-5)
        dense = sum((2 * (query + 1) + min(query + 1, W)) / 3 for query in steps)
        assert float(kv.full_integral[row]) == pytest.approx(dense, rel=1e-5)


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_slots_that_are_put_back_go_on(name: str) -> None:
    model = windowed(name)
    compressor = FullKV() if name == "mistral" else SnapKV(**SMALL)
    want = RolloutSampler(model, compressor).generate(PROMPTS, PARAMS)

    session = RolloutSession(RolloutSampler(model, compressor, 4), PARAMS, max_prompt_length=40)
    numbers = session.add(PROMPTS, range(21))
    session.advance(max_steps=13)
    assert session.num_unfinished
    put_back(session)
    session.advance()
    found = session.take(numbers)
    assert torch.equal(found.sequences, want.sequences)
    assert torch.equal(found.evictions.death, want.evictions.death)
    parity(found.sampler_logprobs, want.sampler_logprobs)


# ---------------------------------------------------------------- decoders, types, compressors


def test_both_decoders_give_the_same_rollout() -> None:
    model = mixed()
    samplers = (RolloutSampler(model, RKV(**SMALL), decoder=kind) for kind in ("native", "transformers"))
    a, b = (sampler.generate(PROMPTS, PARAMS) for sampler in samplers)
    assert torch.equal(a.sequences, b.sequences)
    assert torch.equal(a.evictions.death, b.evictions.death)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_other_types_stay_as_close_as_their_rounding(name: str, dtype: torch.dtype) -> None:
    model = windowed(name).to(dtype)
    rollout = RolloutSampler(model, RKV(**SMALL)).generate(PROMPTS, PARAMS)
    apart = (replay_logprobs(model, rollout) - rollout.sampler_logprobs).abs()[rollout.completion_mask].mean()
    assert float(apart.detach()) < (0.05 if dtype == torch.bfloat16 else 1e-6)


def test_compressors_see_full_layers_with_their_own_rotation_and_number() -> None:
    seen: list[tuple[int, float]] = []

    class Looks(SnapKV):
        needs_layer_index = True

        def score(self, layer: LayerState) -> torch.Tensor:
            seen.append((int(layer.layer_index), float(layer.inv_freq[1])))
            return super().score(layer)

    model: Any = family("gemma3_text")
    RolloutSampler(model, Looks(**SMALL)).generate(PROMPTS, PARAMS)
    rotary = model.model.rotary_emb
    assert {number for number, _ in seen} == {1, 3}
    assert {angle for _, angle in seen} == {float(rotary.full_attention_inv_freq[1])}
    assert float(rotary.full_attention_inv_freq[1]) != float(rotary.sliding_attention_inv_freq[1])


def test_statistics_of_full_layers_serve_a_rollout() -> None:
    """They are those of the model's own queries, under its windows, before their layer's rotation."""
    model: Any = family("gemma3_text", head_dim=16)
    ids = torch.arange(3, 63)[None]
    statistics = gather_statistics(model, ids, torch.tensor([60]))
    inputs: list[torch.Tensor] = []
    layer = model.model.layers[3].self_attn
    hook = layer.register_forward_pre_hook(
        lambda _, args, named: inputs.append(named["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(ids)
        hook.remove()
        queries = layer.q_norm(layer.q_proj(inputs[0]).view(60, 4, 16))
    torch.testing.assert_close(statistics.mean[3], queries.mean(0), atol=1e-5, rtol=1e-4)
    rollout = RolloutSampler(model, TriAttention(statistics=statistics, **SMALL)).generate(PROMPTS, PARAMS)
    parity(replay_logprobs(model, rollout), rollout.sampler_logprobs)


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_training_replays_windows(name: str) -> None:
    """The learner under the record and the windows is the sampler, so that all of the mismatch is the compressor's."""
    tokenizer, compressor = character_tokenizer(ALPHABET), RKV(budget=8, buffer=3, num_sinks=1, window=2)
    grpo = module(compressor=compressor if name == "gemma3_text" else FullKV(), lr=0.05)
    model = family(name, vocab_size=len(tokenizer), initializer_range=0.1, sliding_window=6)
    grpo.policy_source = LoadedPolicy(model, tokenizer)
    grpo.configure_model()
    before = weights(grpo)
    fit(grpo, 2, [DryRun(), MismatchSplit()])
    assert not torch.equal(before, weights(grpo))
    found = {key: float(value) for key, value in grpo.trainer.callback_metrics.items()}
    assert abs(found["mismatch_split/rounding/kl_k1"]) < 1e-5
    assert (found["mismatch_split/compression/kl_k3"] > 1e-4) == (name == "gemma3_text")
    assert (found["kv/saving_final"] > 0.1) == (name == "gemma3_text")
    assert found["kv/peak_bytes"] <= found["kv/full_peak_bytes"]


def test_a_retriever_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Quest does not know layers with a sliding window.*sliding_window=8"):
        RolloutSampler(mixed(), FullKV(), retriever=Quest(16, page_size=4, num_dense_layers=0))


def test_a_window_that_the_configuration_hides_is_refused() -> None:
    model: Any = mixed()
    model.config.layer_types = [FULL] * 4
    with pytest.raises(ValueError, match=r"its layers \[2, 3\] have sliding windows"):
        RolloutSampler(model)


def test_a_ring_is_no_longer_than_a_sequence() -> None:
    geometry = CacheGeometry.of(mixed(sliding_window=4096))
    cache = CacheSize(2, (20, 20), 4, 50).allocate(geometry)
    windows = cache.other(WindowCache)
    assert windows is not None
    assert windows.width == 50


def test_windows_shorter_than_the_check_of_a_model() -> None:
    """Sequences fit into the window, the text that the model is compared on does not."""
    sampler = RolloutSampler(mixed(max_window_layers=0), SnapKV(**SMALL), 2)
    rollout = sampler.generate([[5, 6, 7]], SamplingParams(max_completion_length=5))
    parity(replay_logprobs(sampler.model, rollout), rollout.sampler_logprobs)


def test_a_model_of_windows_alone_has_nothing_to_record() -> None:
    sampler = RolloutSampler(mixed(max_window_layers=0), FullKV(), 2)
    rollout = sampler.generate([[5, 6, 7]], SamplingParams(max_completion_length=30))
    assert rollout.evictions is not None
    assert held_share(rollout.evictions).tolist() == [[1.0] * rollout.evictions.length]
    with pytest.raises(ValueError, match="nothing is there to record"):
        SampledRecord.of(rollout)
