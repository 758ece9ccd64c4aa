"""Layers with a sliding window: the last W tokens in the rollout, in replay, in memory and in what is counted.

And how long a sequence may be: scaled rotary positions reach further, windows bind only where they cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from rollout_cases import put_back_midway
from rollouts import assert_generated, assert_replayed, assert_same, roll_out
from transformers import (
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.cache.windows import WindowCache
from sparse_rl_lightning.callbacks import DryRun, MismatchSplit
from sparse_rl_lightning.integrations.record import SampledRecord
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.geometry import CacheGeometry, context_length, model_sizes
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
    retrieval_logprobs,
)
from sparse_rl_lightning.testing import character_tokenizer
from tests.families import family
from tests.learned import learned_score
from tests.rollout.test_rollout_memory import allocated, attributes
from tests.tiny_grpo import ALPHABET, fit, module

W = 8
SLIDING, FULL = "sliding_attention", "full_attention"
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, W - 1, W, W + 1, 40, 1)]
SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
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


# ---------------------------------------------------------------- the truth


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_chunks_of_a_prompt_are_staged_as_far_as_windows_reach(name: str) -> None:
    model, params = windowed(name), SamplingParams(max_completion_length=2)
    sampler = RolloutSampler(model, c.FullKV(), max_prefill_tokens=5)
    full, slides = (0, 2) if name == "mistral" else (2, 2)
    for length in (40, 80):
        usage = sampler.generate([list(range(5, 5 + length))], params).kv
        assert usage.prefill_peak_bytes == 2 * 2 * 16 * 4 * (full * length + slides * W)


COMPRESSORS = {
    "SnapKV": c.SnapKV(**SMALL),
    "native scores, heads of their own": c.SnapKV(**SMALL, budget_rule=Adaptive(floor=7)),
    "layers of their own": c.RKV(**{**SMALL, "budget": 16}, budget_rule=Pyramid(beta=2)),
    "running state": c.H2O(**SMALL),
    "rotation": c.ExpectedAttention(query_window=6, num_future=9, **SMALL),
    "random": c.RandomEviction(**SMALL),
    "weights by layer": learned_score(**SMALL),
    "the prompt stays at first": c.SnapKV(**SMALL, compress_prompt=False),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compressor", list(COMPRESSORS.values()), ids=list(COMPRESSORS))
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_replay_is_exact_and_batches_do_not_matter(name: str, compressor: c.Compressor) -> None:
    model = windowed(name)
    if isinstance(compressor, c.LearnedScore):  # of all layers, by the model's numbers
        compressor = learned_score(model=model_sizes(model, CacheGeometry.of(model)), **SMALL)
    rollout = RolloutSampler(model, compressor).generate(PROMPTS, ONCE)
    record = rollout.evictions
    assert record.num_layers == 2, "windows are not recorded"
    assert bool((rollout.kv.stored < rollout.kv.full).any())
    assert_replayed(model, rollout)
    assert_same(roll_out(model, compressor, 2, prompts=PROMPTS, params=ONCE, max_prefill_tokens=16), rollout)
    forced = forced_rollout(model, rollout, compressor, seed=5)
    if not isinstance(compressor, c.RandomEviction):  # whose numbers are keyed by sequence
        assert torch.equal(forced.evictions.death, record.death)
        assert_same_logprobs(forced.sampler_logprobs, rollout.sampler_logprobs)


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


class Scored(c.RandomEviction):
    """Without its op."""

    def score(self, layer: LayerState) -> torch.Tensor:
        return super().score(layer)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "gpt_oss"])
def test_chance_is_numbered_by_the_layers_of_the_model(name: str) -> None:
    """The op knows the layers of full attention, which a model may have in other places than the first."""
    model = windowed(name)
    by_op, by_score = (
        RolloutSampler(model, cls(**SMALL)).generate(PROMPTS, ONCE) for cls in (c.RandomEviction, Scored)
    )
    assert bool((by_op.kv.stored < by_op.kv.full).any())
    assert_same(by_op, by_score)


# ---------------------------------------------------------------- memory, sessions, counts


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16])
def test_memory_is_that_of_both_kinds_of_layers(name: str, kv_dtype: torch.dtype | None) -> None:
    model = windowed(name)
    compressor = c.FullKV() if name == "mistral" else c.SnapKV(**SMALL)
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
    rollout = RolloutSampler(model, c.SnapKV(**SMALL)).generate(PROMPTS, params)
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
    compressor = c.FullKV() if name == "mistral" else c.SnapKV(**SMALL)
    moved = put_back_midway(RolloutSampler(model, compressor, 4), PROMPTS, PARAMS)
    assert_same(moved, roll_out(model, compressor, prompts=PROMPTS, params=PARAMS))


# ---------------------------------------------------------------- decoders, types, compressors


def test_both_decoders_give_the_same_rollout() -> None:
    model = mixed()
    given = {"prompts": PROMPTS, "params": PARAMS}
    assert_same(*(roll_out(model, c.RKV(**SMALL), decoder=way, **given) for way in ("native", "transformers")))


def test_compressors_see_full_layers_with_their_own_rotation_and_number() -> None:
    seen: list[tuple[int, float]] = []

    class Looks(c.SnapKV):
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


@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "gpt_oss"])
def test_training_replays_windows_and_sinks(name: str) -> None:
    """The learner under the record and the windows is the sampler, so that all of the mismatch is the compressor's."""
    tokenizer, compressor = character_tokenizer(ALPHABET), c.RKV(budget=8, buffer=3, num_sinks=1, window=2)
    grpo = module(compressor=c.FullKV() if name == "mistral" else compressor, lr=0.05)
    model: Any = family(name, vocab_size=len(tokenizer), initializer_range=0.1, sliding_window=6)
    grpo.policy_source = LoadedPolicy(model, tokenizer)
    grpo.configure_model()
    before = {weight: parameter.detach().clone() for weight, parameter in model.named_parameters()}
    fit(grpo, 1, [DryRun(), MismatchSplit()])
    changed = {weight for weight, parameter in model.named_parameters() if not torch.equal(parameter, before[weight])}
    assert any("q_proj" in weight for weight in changed)
    assert any("sinks" in weight for weight in changed) == (name == "gpt_oss")
    metrics = {key: float(value) for key, value in grpo.trainer.callback_metrics.items()}
    assert abs(metrics["mismatch_split/rounding/kl_k1"]) < 1e-5
    assert (metrics["mismatch_split/compression/kl_k3"] > 1e-4) == (name != "mistral")
    assert (metrics["kv/saving_final"] > 0.1) == (name != "mistral")
    assert metrics["kv/peak_bytes"] <= metrics["kv/full_peak_bytes"]


def test_a_retriever_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Quest does not know layers with a sliding window.*sliding_window=8"):
        RolloutSampler(mixed(), c.FullKV(), retriever=Quest(16, page_size=4, num_dense_layers=0))


def test_a_window_that_the_configuration_hides_is_refused() -> None:
    model: Any = mixed()
    model.config.layer_types = [FULL] * 4
    with pytest.raises(ValueError, match=r"its layers \[2, 3\] have sliding windows"):
        RolloutSampler(model)


def test_a_ring_is_no_longer_than_a_sequence() -> None:
    geometry = CacheGeometry.of(mixed(sliding_window=4096))
    cache = CacheSize(2, (20, 20), 4, 50).allocate(geometry)
    windows = cache.storage(WindowCache)
    assert windows.width == 50


def test_windows_shorter_than_the_check_of_a_model() -> None:
    """Sequences fit into the window, the text that the model is compared on does not."""
    sampler = RolloutSampler(mixed(max_window_layers=0), c.SnapKV(**SMALL), 2)
    rollout = sampler.generate([[5, 6, 7]], SamplingParams(max_completion_length=5))
    assert_same_logprobs(replay_logprobs(sampler.model, rollout), rollout.sampler_logprobs)


def test_a_model_of_windows_alone_has_nothing_to_record() -> None:
    sampler = RolloutSampler(mixed(max_window_layers=0), c.FullKV(), 2)
    rollout = sampler.generate([[5, 6, 7]], SamplingParams(max_completion_length=30))
    assert held_share(rollout.evictions).tolist() == [[1.0] * rollout.evictions.length]
    with pytest.raises(ValueError, match="nothing is there to record"):
        SampledRecord.of(rollout)


# ---------------------------------------------------------------- how long a sequence may be


CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "initializer_range": 0.2, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
WINDOW = 24


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),  # as Qwen's cards say
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32}, 128),  # extended already
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128),  # Llama 3.1: 131,072 are written down
        ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 128,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_the_limit_is_the_extended_one(key: str, rope: dict[str, Any], longest: int) -> None:
    given = {key: rope | ({"rope_theta": 10000.0} if key == "rope_parameters" else {})} if rope else {}
    assert context_length(LlamaConfig(**CONFIG, max_position_embeddings=128, **given)) == longest


def test_what_a_configuration_does_not_say_is_no_limit() -> None:
    class Nothing:
        pass

    assert context_length(Nothing()) is None


def test_a_sequence_beyond_the_original_context_is_that_of_generate() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    stretched = Qwen3Config(**CONFIG, head_dim=16, max_position_embeddings=40, rope_parameters=rope)
    model = Qwen3ForCausalLM(stretched).eval()
    prompt = torch.randint(3, 64, (60,)).tolist()
    greedy = SamplingParams(max_completion_length=40, temperature=0)
    assert_generated(model, roll_out(model, prompts=[prompt], params=greedy), 40, [prompt])
    sampler = RolloutSampler(model, c.SnapKV(budget=30, buffer=6), num_slots=1)
    evicted = sampler.generate([prompt], greedy)
    assert_replayed(model, evicted)
    for generate in (sampler.generate, RolloutSession(sampler, greedy, 100).add):
        with pytest.raises(ValueError, match="exceeds the model's context of 128 tokens"):
            generate([[*prompt, *prompt]], *([greedy] if generate == sampler.generate else [range(1)]))


def test_a_window_in_all_layers_is_refused_only_where_it_binds() -> None:
    """Within it all layers are of full attention; beyond it none is left to evict from or to retrieve in."""
    model = MistralForCausalLM(MistralConfig(**CONFIG, head_dim=16, sliding_window=WINDOW)).eval()
    prompt, fits = torch.randint(3, 64, (WINDOW - 12,)).tolist(), SamplingParams(max_completion_length=12, seed=1)
    small, retriever = c.SnapKV(budget=10, buffer=4, num_sinks=1, window=4), Quest(16, page_size=4, num_dense_layers=0)
    evicted = RolloutSampler(model, small, num_slots=1).generate([prompt], fits)
    assert int(evicted.completion_lengths) == 12
    assert bool((evicted.evictions.death[..., : WINDOW - 4] < NEVER).any(dim=-1).all()), "in all layers"
    assert_same_logprobs(replay_logprobs(model, evicted), evicted.sampler_logprobs)
    forced = forced_rollout(model, evicted, small, seed=1)
    assert_same_logprobs(forced.sampler_logprobs, evicted.sampler_logprobs)
    paged = RolloutSampler(model, c.FullKV(), retriever=retriever).generate([prompt], fits)
    retrieved = retrieval_logprobs(model, paged, retriever).logprobs
    assert_same_logprobs(retrieved, paged.sampler_logprobs)

    longer, sampler = SamplingParams(max_completion_length=13, seed=1), RolloutSampler(model, small, num_slots=1)
    whole = RolloutSampler(model, c.FullKV()).generate([prompt], longer)
    for name, use in {
        "SnapKV": lambda: sampler.generate([prompt], longer),
        "SnapKV ": lambda: RolloutSession(sampler, longer, 12).add([prompt], range(1)),
        " SnapKV": lambda: forced_rollout(model, whole, small),
        "Quest": lambda: RolloutSampler(model, c.FullKV(), retriever=retriever).generate([prompt], longer),
        " Quest": lambda: retrieval_logprobs(model, whole, retriever),
    }.items():
        refused = rf"sliding window in every layer \(sliding_window={WINDOW}\), .* up to 25 tokens .* {name.strip()}"
        with pytest.raises(ValueError, match=refused):
            use()


def test_layers_that_are_neither_full_nor_sliding_are_refused() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"layers of type \['linear_attention'\]"):
        RolloutSampler(model)
